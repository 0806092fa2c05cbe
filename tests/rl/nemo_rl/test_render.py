import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_ext.rl.algorithms import Algorithm, PolicyGradient, algorithm_of, load, presets
from nemo_ext.rl.nemo_rl import compat
from nemo_ext.rl.nemo_rl.checkout import Checkout, leaves
from nemo_ext.rl.nemo_rl.draft import section_of
from nemo_ext.rl.nemo_rl.render import render
from nemo_ext.rl.rendering import Rendered
from nemo_ext.rl.teachers import divergence

# Keys as 0.5 has them, in the forms that NeMo-RL writes them in.
GRPO = """
from typing import Any, NotRequired, TypedDict
from nemo_rl.models.policy import PolicyConfig
from nemo_rl.algorithms.loss_functions import ClippedPGLossConfig
class GRPOConfig(TypedDict):
    num_prompts_per_step: int
    overlong_filtering: NotRequired[bool]
class MasterConfig(TypedDict):
    policy: PolicyConfig
    loss_fn: ClippedPGLossConfig
    grpo: GRPOConfig
    env: dict[str, Any]
def grpo_train(master_config):
    dynamic_sampling(master_config["grpo"]["overlong_filtering"])
def async_grpo_train(master_config):
    scale_rewards(master_config["grpo"])
"""
POLICY = """
class Base(TypedDict):
    model_name: str
class Disabled(TypedDict):
    enabled: bool
class Enabled(Disabled):
    lr: float
class PolicyConfig(Base):
    megatron_cfg: NotRequired[Enabled | Disabled | None]
    scheduler: NotRequired[list[Enabled] | None]
"""
LOSS = """
class ClippedPGLossConfig(BaseModel, extra="allow"):
    ratio_clip_min: float = 0.2
"""
EXAMPLE = """
grpo: {num_prompts_per_step: 32, val_period: 10}
loss_fn: {ratio_clip_min: 0.2}
policy:
  model_name: tiny
  length: 4
  tokens: "${mul:${policy.length}, 2}"
  generation: {temperature: 1.0, vllm_kwargs: {}}
"""


TEACHERS = ("opd", "mopd")


def loaded(preset: str, real: Checkout) -> Algorithm:
    """A preset in a form that NeMo-RL can train; versions without teachers skip the test."""
    if preset in TEACHERS and not real.distils:
        pytest.skip("this version has no teachers outside NeMo Gym")
    return load(preset, {"asynchronous": {"max_age": 1}} if preset == "opd" else None)


def module_of(algorithm: Algorithm) -> ModuleType:
    return compat.algorithm(section_of(algorithm))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Small folder in the form of a checkout, with few keys."""
    for name, text in {
        "nemo_rl/algorithms/grpo.py": GRPO,
        "nemo_rl/algorithms/dpo.py": GRPO,
        "nemo_rl/algorithms/loss_functions.py": "from nemo_rl.algorithms.loss import ClippedPGLossConfig",
        "nemo_rl/algorithms/loss/__init__.py": LOSS,
        "nemo_rl/models/policy/__init__.py": POLICY,
        "examples/configs/grpo_math_1B.yaml": EXAMPLE,
        "examples/configs/dpo.yaml": EXAMPLE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Checkout(tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "grpo.overlong_filtering",
        "grpo.val_period",
        "loss_fn.ratio_clip_min",
        "policy.model_name",
        "policy.megatron_cfg.lr",
        "policy.megatron_cfg.enabled",
        "policy.scheduler",
        "policy.generation.vllm_kwargs.whatever",
        "env.math.num_workers",
    ],
)
def test_keys_of_types_and_example(checkout: Checkout, path: str) -> None:
    assert checkout.keys("grpo").missing(path) is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("grpo.num_prompt_per_step", "did you mean 'num_prompts_per_step'"),
        ("grpo.ratio_clip_min", "there is loss_fn.ratio_clip_min"),
        ("policy.scheduler.lr", "no key 'lr' in policy.scheduler"),
        ("polic", "did you mean 'policy'"),
    ],
)
def test_a_missing_key(checkout: Checkout, path: str, message: str) -> None:
    missing = checkout.keys("grpo").missing(path)

    assert missing is not None
    assert message in missing


def test_the_whole_config(checkout: Checkout) -> None:
    config = checkout.config("grpo", {"policy": {"length": 8}}, {"policy": {"generation": {"vllm_kwargs": {"a": 1}}}})

    assert (config["policy"]["length"], config["policy"]["tokens"]) == (8, 16)
    assert config["policy"]["generation"] == {"temperature": 1.0, "vllm_kwargs": {"a": 1}}


def test_a_change_with_an_unknown_key_is_refused(checkout: Checkout) -> None:
    with pytest.raises(ValueError, match=r"nemo_rl\.set\.loss_fn\.ratio_clip_c: this version of NeMo-RL has no key"):
        checkout.config("grpo", {"loss_fn": {"ratio_clip_c": 3.0}})


def test_missing_parts_of_the_asynchronous_loop(checkout: Checkout) -> None:
    assert "scale_rewards" in checkout.asynchronous
    assert "dynamic_sampling" not in checkout.asynchronous


def test_a_loop_that_refills_is_recognized_by_its_source(checkout: Checkout) -> None:
    collector = checkout.root / "nemo_rl/algorithms/async_utils/trajectory_collector.py"
    assert not checkout.refills

    collector.parent.mkdir()
    collector.write_text("buffer.get_trajectories_needed.remote(step)")

    assert Checkout(checkout.root).refills


@pytest.mark.parametrize("refills", [False, True])
def test_groups_are_dropped_asynchronously_if_the_loop_refills(
    real: Checkout, monkeypatch: pytest.MonkeyPatch, refills: bool
) -> None:
    monkeypatch.setattr(Checkout, "refills", refills)

    rendered = render(load("domyn_multi_env_grpo"), real)

    assert rendered.settings["grpo"]["use_dynamic_sampling"] is refills
    assert ("sampling.drop_zero_variance" in rendered.inexpressible) is not refills


def test_a_folder_that_is_not_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a checkout of NeMo-RL"):
        Checkout(tmp_path)


def test_keys_that_a_version_does_not_have_are_reported(checkout: Checkout) -> None:
    rendered = render(load("olmo_rl"), checkout)

    assert "no key 'num_generations_per_prompt'" in rendered.inexpressible["generations_per_prompt"]
    assert rendered.settings["grpo"]["num_prompts_per_step"] == 64
    with pytest.raises(ValueError, match="generations_per_prompt: this version"):
        rendered.settled()


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
@pytest.mark.parametrize("preset", presets())
def test_every_key_is_known_and_every_preset_whole(real: Checkout, preset: str, backend: Any) -> None:
    algorithm = loaded(preset, real)
    rendered = render(algorithm, real, backend=backend)

    missing = [why for why in rendered.inexpressible.values() if "has no key" in why]
    assert not missing
    keys = real.keys(section_of(algorithm))
    assert not [path for path in leaves(rendered.settings) if keys.missing(path)]
    config = real.config(section_of(algorithm), rendered.settings)
    assert config["policy"]["train_global_batch_size"] == algorithm.batch
    assert config["policy"]["max_total_sequence_length"] == algorithm.lengths.context


@pytest.mark.parametrize("preset", presets())
def test_the_real_config_and_loss_accept_it(real: Checkout, nemo_rl: ModuleType, preset: str) -> None:
    algorithm = loaded(preset, real)
    module = module_of(algorithm)
    config = real.config(section_of(algorithm), render(algorithm, real).settings)

    made = compat.master_config(module, config)

    if isinstance(algorithm, PolicyGradient) and algorithm.logits is not None:
        loss = module.DistillationLossFn(compat.setting(made, "loss_fn"))
        assert (loss.kl_type, loss.mixed_kl_weight) == ("mixed", algorithm.logits.forward_share)
        assert compat.setting(made, "distillation", "topk_logits_k") == algorithm.logits.top_k
    elif isinstance(algorithm, PolicyGradient):
        loss = module.ClippedPGLossFn(compat.setting(made, "loss_fn"))
        assert loss.ratio_clip_c == algorithm.loss.dual_clip
        assert loss.reference_policy_kl_penalty == algorithm.loss.kl.coefficient
        assert loss.use_importance_sampling_correction == (algorithm.loss.importance_correction.kind != "none")
        assert loss.disable_ppo_ratio == (algorithm.loss.clip_low is None)
        # The loss does not depend on defaults of the example.
        assert loss.truncated_importance_sampling_ratio == algorithm.loss.importance_correction.cap
    else:
        loss = module.DPOLossFn(compat.setting(made, "dpo"))
        assert loss.reference_policy_kl_penalty == algorithm.loss.beta
        assert loss.preference_average_log_probs == algorithm.loss.length_normalised
        assert loss.sft_loss_weight == algorithm.loss.sft_weight


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_divergence_is_that_of_nemo_rl(real: Checkout, nemo_rl: ModuleType, share: float) -> None:
    """Our formula, with which TRL trains, gives the loss and the gradient of NeMo-RL's loss."""
    from nemo_rl.algorithms.loss.utils import prepare_loss_input
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    algorithm = load("logit_distillation", {"distillation": {"logits": {"top_k": 5, "forward_share": share}}})
    assert isinstance(algorithm, PolicyGradient) and algorithm.logits is not None
    module = compat.algorithm("distillation")
    config = compat.master_config(module, real.config("distillation", render(algorithm, real).settings))
    loss_fn = module.DistillationLossFn(compat.setting(config, "loss_fn"))
    torch.manual_seed(1)
    policy, teacher = torch.randn(2, 6, 9, requires_grad=True), torch.randn(2, 6, 9)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])
    logits, places = teacher.topk(5)
    data = BatchedDataDict(
        input_ids=torch.zeros(2, 6, dtype=torch.long),
        token_mask=mask,
        sample_mask=torch.ones(2),
        teacher_topk_logits=logits,
        teacher_topk_indices=places,
    )
    counts = {"global_valid_seqs": torch.tensor(2), "global_valid_toks": mask[:, 1:].sum()}

    inputs, data = prepare_loss_input(policy, data, loss_fn)
    theirs, _ = loss_fn(data=data, **inputs, **counts)
    ours = (divergence(policy, teacher, algorithm.logits)[:, :-1] * mask[:, 1:]).sum() / mask[:, 1:].sum()

    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(loss, policy)[0] for loss in (ours, theirs)))


def test_one_teacher_gives_nemo_rl_its_logits(real: Checkout) -> None:
    teachers = {"distillation": {"teachers": {"math": "a", "default": "b"}}}
    with pytest.raises(ValueError, match="supports only one teacher"):
        render(load("logit_distillation", teachers), real)
    every = load("logit_distillation", {"distillation": {"logits": {"top_k": None}}})
    assert "distillation.logits.top_k" in render(every, real).inexpressible


def test_masking_is_reported_if_a_version_only_truncates(real: Checkout) -> None:
    rendered = render(load("nemotron3_rlvr"), real)
    masks = real.keys("grpo").missing("loss_fn.truncated_importance_sampling_type") is None

    assert ("loss.importance_correction.kind" in rendered.inexpressible) != masks
    if masks:
        assert rendered.settings["loss_fn"]["truncated_importance_sampling_type"] == "icepop"
        assert rendered.settings["loss_fn"]["truncated_importance_sampling_ratio_min"] == 0.5


def test_the_router(real: Checkout) -> None:
    megatron = render(load("nemotron3_rlvr"), real).settings["policy"]["megatron_cfg"]

    assert megatron["freeze_moe_router"]
    assert megatron["moe_router_bias_update_rate"] == 1e-3
    assert {"router.frozen", "router.bias_update_rate"} <= set(
        render(load("nemotron3_rlvr"), real, backend="dtensor").inexpressible
    )


GUARDS = {
    "advantage": {"clip": 20.0},
    "penalties": {"thinking": -5.0, "tool_call": -5.0},
    "loss": {
        "on_policy": True,
        "mismatch": 2.0,
        "importance_correction": {"kind": "truncated", "floor": 0.2, "cap": 5},
    },
    "router": {"replay": True},
}


def test_guards_are_rendered_and_accepted_by_the_real_config(real: Checkout, nemo_rl: ModuleType) -> None:
    algorithm = load("nemotron3_rlvr", GUARDS)
    rendered = render(algorithm, real)
    if real.keys("grpo").missing("grpo.seq_logprob_error_threshold"):
        assert {"penalties", "loss.on_policy", "loss.mismatch", "router.replay"} <= set(rendered.inexpressible)
        return

    made = compat.master_config(nemo_rl, real.config("grpo", rendered.settings))

    assert not rendered.inexpressible
    assert rendered.adapter["penalties"] == {"thinking": -5.0, "tool_call": -5.0}
    names = ("advantage_clip_low", "advantage_clip_high", "seq_logprob_error_threshold")
    assert [compat.setting(made, "grpo", name) for name in names] == [-20, 20, 2]
    assert compat.setting(made, "policy", "router_replay", "enabled")
    loss = nemo_rl.ClippedPGLossFn(compat.setting(made, "loss_fn"))
    assert loss.force_on_policy_ratio and loss.truncated_importance_sampling_type == "tis"
    bounds = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    assert bounds == (0.2, 5)
    assert "router.replay" in render(algorithm, real, backend="dtensor").inexpressible


def test_settings_of_the_adapter(real: Checkout) -> None:
    judged, rpo = render(load("nemotron3_rlhf"), real).adapter, render(load("rpo_offline"), real).adapter
    rloo = render(load("rloo_if"), real)

    assert judged["group"]["length_control"]["thinking"] == 0.5
    assert judged["advantage"] == {"baseline": "leave_one_out", "normalise": "unbiased_std"}
    assert rpo["rpo"] == {"eta": 1.0, "distance": "backward_kl"}
    assert rloo.adapter["loss"] == {"level": "sequence_sum"} and "loss" not in judged
    assert rloo.settings["loss_fn"]["token_level_loss"] is False and "loss.level" not in rloo.inexpressible


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ({"kind": "constant", "steps": 8}, [1.0] * 8),
        ({"kind": "constant", "warmup_steps": 4, "steps": 8}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ({"kind": "linear", "warmup_steps": 2, "steps": 6}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"kind": "linear", "warmup_steps": 1, "steps": 5, "final_share": 0.5}, [1, 1, 0.875, 0.75, 0.625, 0.5]),
        ({"kind": "cosine", "steps": 4, "final_share": 0.2}, [1, 0.8828, 0.6, 0.3172, 0.2]),
    ],
)
def test_torch_makes_the_learning_rates_of_it(real: Checkout, schedule: dict[str, Any], shares: list[float]) -> None:
    preset = {
        "algorithm": "dpo",
        "source": "a test",
        "batch": 8,
        "loss": {"beta": 0.1},
        "lengths": {"total": 64},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": schedule,
    }
    listed = render(algorithm_of(preset), real, backend="dtensor").settings["policy"]["scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    parts = [
        getattr(torch.optim.lr_scheduler, s["name"].rpartition(".")[2])(optimizer, **s["kwargs"]) for s in listed[:-1]
    ]
    made = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, **listed[-1])

    rates = []
    for _ in shares:
        rates.append(optimizer.param_groups[0]["lr"] / 1e-3)
        optimizer.step()
        made.step()

    assert rates == pytest.approx(shares, abs=1e-4)


PAGE = Path(__file__).parents[3] / "docs" / "rl" / "presets.md"


def column(real: Checkout) -> str:
    """Column of this version on the page."""
    masks = real.keys("grpo").missing("loss_fn.truncated_importance_sampling_type") is None
    return "0.7 and main" if masks else "0.5"


def test_the_page_says_what_this_version_cannot_do(real: Checkout) -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.M)
    told = {
        (preset, key, reason.strip())
        for key, versions, names, reason in rows
        if column(real) in versions or versions.strip() == "all"
        for preset in names.strip().split(", ")
    }

    usable = [preset for preset in presets() if real.distils or preset not in TEACHERS]
    assert told == cannot({preset: render(loaded(preset, real), real) for preset in usable})


def cannot(rendered: dict[str, Rendered]) -> set[tuple[str, str, str]]:
    return {(name, key, reason) for name, one in rendered.items() for key, reason in one.inexpressible.items()}
