import re
import sys
from importlib.util import find_spec
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient, algorithm_of, load, presets
from nemo_ext.rl.trl.render import config_class, make_config, render
from nemo_ext.rl.trl.run import BY_ADAPTER

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}


def small(**changes: Any) -> PolicyGradient:
    config: dict[str, Any] = {
        "algorithm": "grpo",
        "source": "a test",
        "prompts_per_step": 4,
        "generations_per_prompt": 4,
        "batch": 16,
        "advantage": {"baseline": "mean", "normalise": "unbiased_std"},
        "loss": {"level": "token", "clip_low": 0.1, "clip_high": 0.3},
        "lengths": {"response": 8, "total": 8},
        "optimizer": {"learning_rate": 1e-6},
    }
    made = algorithm_of(config | changes)
    assert isinstance(made, PolicyGradient)
    return made


def loss(**changes: Any) -> dict[str, Any]:
    return {"level": "token", "clip_low": 0.1, "clip_high": 0.3} | changes


def loaded(preset: str) -> Algorithm:
    """A preset in a form that TRL can train."""
    halved = {"mopd": 512, "logit_distillation": 64}
    changes = {"generations_per_prompt": 2, "prompts_per_step": halved[preset]} if preset in halved else None
    return load(preset, changes)


def test_a_single_response_per_prompt_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 2 responses per prompt"):
        render(load("mopd"))


@pytest.mark.parametrize("preset", presets())
def test_trl_accepts_every_preset(preset: str, tmp_path: Path) -> None:
    algorithm = loaded(preset)

    config = make_config(algorithm, render(algorithm).settings, output_dir=str(tmp_path), **CPU)

    assert type(config) is config_class(algorithm)
    assert config.learning_rate == algorithm.optimizer.learning_rate
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert batch == algorithm.batch
    if isinstance(algorithm, PolicyGradient):
        # Several updates on the same generated responses.
        assert config.steps_per_generation * config.num_iterations == (
            config.gradient_accumulation_steps * algorithm.updates_per_step
        )
        assert config.generation_batch_size == algorithm.responses_per_step


def test_the_loss() -> None:
    corrected = loss(
        dual_clip=10,
        kl={"coefficient": 0.01, "estimator": "k3"},
        importance_correction={"kind": "masked", "cap": 5, "floor": 0.5},
    )
    settings = render(small(loss=corrected)).settings

    assert (settings["epsilon"], settings["epsilon_high"], settings["delta"], settings["beta"]) == (0.1, 0.3, 10, 0.01)
    assert settings["loss_type"] == "dapo"
    assert settings["vllm_importance_sampling_mode"] == "token_mask"
    assert settings["vllm_importance_sampling_clip_max"] == 5
    assert settings["vllm_importance_sampling_clip_min"] == 0.5


def test_an_untruncated_correction_has_bounds_that_never_bind(tmp_path: Path) -> None:
    algorithm = small(loss=loss(importance_correction={"kind": "untruncated"}))
    config = make_config(algorithm, render(algorithm).settings, output_dir=str(tmp_path), **CPU)

    assert config.vllm_importance_sampling_mode == "token_truncate"
    assert (config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max) == (0, None)


def test_dual_clip_is_trls_delta() -> None:
    """TRL bounds the ratio by delta before it takes the minimum, which for negative advantages is dual clipping."""
    for ratio in (0.5, 1.0, 1.2, 5.0, 50.0):
        for advantage in (-2.0, 2.0):
            clipped = min(max(ratio, 0.8), 1.28)
            trls = -min(min(ratio, 10) * advantage, clipped * advantage)
            surrogate = max(-ratio * advantage, -clipped * advantage)
            dual = min(surrogate, -10 * advantage) if advantage < 0 else surrogate
            assert trls == dual


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"loss": loss(kl={"coefficient": 0.1, "estimator": "k1"})}, "loss.kl.estimator"),
        ({"lengths": {"prompt": 4, "response": 4}}, "lengths.prompt"),
        ({"lengths": {"total": 8, "response": 4}}, "lengths.total"),
        ({"asynchronous": {"max_age": 1}}, "asynchronous"),
        (
            {"algorithm": "rloo", "sampling": {"drop_zero_variance": True, "max_batches": 2}},
            "sampling.drop_zero_variance",
        ),
        ({"router": {"frozen": True}}, "router.frozen"),
        ({"validation": {"every": 2, "keep_best": 3}}, "validation.keep_best"),
        ({"batch": 8, "loss": loss(clip_low=None, clip_high=None)}, "loss.clip_low"),
        ({"algorithm": "rloo"}, "advantage.baseline"),
        ({"algorithm": "rloo", "loss": loss()}, "loss.level"),
        ({"algorithm": "rloo", "turns": 2}, "turns"),
        ({"schedule": {"kind": "linear", "steps": 4, "final_share": 0.1}}, "schedule.final_share"),
    ],
)
def test_settings_that_trl_cannot_express_are_reported_unless_handled(change: dict[str, Any], key: str) -> None:
    algorithm = small(**change)

    assert key in render(algorithm).inexpressible
    assert key not in render(algorithm, by_adapter=(key,)).inexpressible


def test_plain_grpo_is_fully_expressed() -> None:
    assert set(render(small()).inexpressible) == {"lengths.total"}


def test_steps_are_updates(tmp_path: Path) -> None:
    algorithm = small(batch=8, passes=2, schedule={"steps": 10, "warmup_share": 0.2}, validation={"every": 5})
    config = make_config(algorithm, render(algorithm, micro_batch=2).settings, output_dir=str(tmp_path), **CPU)

    assert algorithm.updates_per_step == 4
    assert (config.max_steps, config.warmup_steps, config.eval_steps, config.save_steps) == (40, 8, 20, 20)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (2, 4)
    assert config.lr_scheduler_type == "constant_with_warmup"


def test_validation_uses_whole_groups(tmp_path: Path) -> None:
    algorithm = small(batch=8, generations_per_prompt=4)
    rendered = render(algorithm, micro_batch=2)
    make_config(algorithm, rendered.settings, output_dir=str(tmp_path), eval_strategy="steps", eval_steps=1, **CPU)

    assert rendered.settings["per_device_eval_batch_size"] == algorithm.responses_per_step
    with_kl = small(batch=8, generations_per_prompt=4, loss=loss(kl={"coefficient": 0.1}))
    assert [render(with_kl, micro_batch=size).settings["per_device_eval_batch_size"] for size in (2, 8)] == [4, 8]


def test_pairs() -> None:
    delta, think, tools = (render(load(name)).settings for name in ("dpo_delta", "think_dpo", "dpo_tool_hallucination"))

    assert (delta["loss_type"], delta["beta"], delta["max_length"]) == (["sigmoid"], 0.1, 3456)
    assert (delta["lr_scheduler_type"], delta["max_steps"], delta["warmup_steps"]) == ("cosine", 252, 26)
    assert (think["loss_type"], think["beta"]) == (["sigmoid_norm"], 5)
    assert (tools["loss_type"], tools["loss_weights"]) == (["sigmoid", "sft"], [1.0, 0.2])
    assert "loss.sft_length_normalised" in render(load("dpo_tool_hallucination"), micro_batch=2).inexpressible


def test_processes_share_the_batch() -> None:
    steps = [
        render(small(), micro_batch=2, processes=number).settings["gradient_accumulation_steps"] for number in (1, 4)
    ]

    assert steps == [8, 2]
    with pytest.raises(ValueError, match=r"rl\.batch=16 must be a multiple of micro_batch x processes = 6"):
        render(small(), micro_batch=2, processes=3)


def test_a_batch_that_microbatches_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rl\.batch=16 must be a multiple of micro_batch x processes = 3"):
        render(small(), micro_batch=3)


def test_an_unknown_argument_is_refused_with_the_nearest(tmp_path: Path) -> None:
    algorithm = small()

    with pytest.raises(ValueError, match="trl: unknown key 'epsilon_hi': did you mean 'epsilon_high'"):
        make_config(algorithm, render(algorithm).settings, output_dir=str(tmp_path), epsilon_hi=0.2)


@given(
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    normalise=st.sampled_from(["std", "unbiased_std", "none"]),
    level=st.sampled_from(["token", "sequence", "sequence_sum"]),
    kind=st.sampled_from(["grpo", "rloo"]),
    correction=st.sampled_from(
        [
            {"kind": "none"},
            {"kind": "untruncated"},
            {"kind": "truncated", "cap": 2.0},
            {"kind": "masked", "cap": 2.0, "floor": 0.0},
        ]
    ),
    clip=st.sampled_from([None, 0.2]),
)
def test_every_combination_is_accepted(
    baseline: str, normalise: str, level: str, kind: str, correction: dict[str, Any], clip: float | None
) -> None:
    parts = {"level": level, "clip_low": clip, "clip_high": clip, "importance_correction": correction}
    algorithm: Algorithm = small(algorithm=kind, advantage={"baseline": baseline, "normalise": normalise}, loss=parts)

    assert make_config(algorithm, render(algorithm).settings, output_dir="unused", **CPU).num_generations == 4


def test_rendering_imports_no_engine() -> None:
    code = (
        "import sys; from nemo_ext.rl.algorithms import load; from nemo_ext.rl.trl.render import render; "
        "render(load('olmo_rl')); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'trl', 'transformers', 'ray')))"
    )

    assert run([sys.executable, "-c", code], check=False).returncode == 0


PAGE = Path(__file__).parents[3] / "docs" / "rl" / "presets.md"


def test_the_page_says_what_trl_cannot_do() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.M)
    told = {(preset, key, reason) for key, names, reason in rows for preset in names.split(", ")}

    micro_batch = compose("rl", [])["micro_batch"]
    rendered = {
        preset: render(loaded(preset), micro_batch=micro_batch, by_adapter=BY_ADAPTER).inexpressible
        for preset in presets()
    }
    assert told == {(preset, key, reason) for preset, one in rendered.items() for key, reason in one.items()}


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("grpo", {"router.replay"}),
        ("rloo", {"router.replay", "loss.mismatch", "advantage.clip", "penalties"}),
    ],
)
def test_guards_that_trl_cannot_apply_are_reported(algorithm: str, expected: set[str]) -> None:
    plain = {"algorithm": algorithm, "advantage": {"baseline": "leave_one_out", "normalise": "none"}}
    plain["loss"] = loss(level="sequence_sum", clip_low=None, clip_high=None)
    guarded = plain | {
        "advantage": {**plain["advantage"], "clip": 20.0},
        "loss": {**plain["loss"], "on_policy": True, "mismatch": 2.0},
        "penalties": {"thinking": -5.0, "tool_call": -5.0},
        "router": {"replay": True},
    }

    added = set(render(small(**guarded)).inexpressible) - set(render(small(**plain)).inexpressible)

    assert added == expected
