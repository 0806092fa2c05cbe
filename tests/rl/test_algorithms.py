import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import EnvironmentUse, PolicyGradient, Preference, Schedule, algorithm_of, load, presets
from nemo_ext.rl.rendering import Rendered
from nemo_ext.rl.task import Task

SMALL: dict[str, Any] = {
    "algorithm": "grpo",
    "source": "a test",
    "prompts_per_step": 4,
    "generations_per_prompt": 8,
    "batch": 32,
    "advantage": {"baseline": "mean", "normalise": "none"},
    "loss": {"level": "token", "clip_low": 0.2, "clip_high": 0.2},
    "lengths": {"prompt": 8, "response": 8},
    "optimizer": {"learning_rate": 1e-6},
}
PAIRS: dict[str, Any] = {
    "algorithm": "dpo",
    "source": "a test",
    "batch": 8,
    "loss": {"beta": 0.1},
    "lengths": {"total": 64},
    "optimizer": {"learning_rate": 1e-6},
}


def policy_gradient(preset: str) -> PolicyGradient:
    algorithm = load(preset)
    assert isinstance(algorithm, PolicyGradient)
    return algorithm


def preference(preset: str) -> Preference:
    algorithm = load(preset)
    assert isinstance(algorithm, Preference)
    return algorithm


@pytest.mark.parametrize("preset", presets())
def test_every_preset_names_its_source(preset: str) -> None:
    assert load(preset).source


JUDGES = {
    "llama_nemotron_grpo": ("environments.judge.settings.judge",),
    "llama_nemotron_rlhf": ("group.judge",),
    "nemotron3_rlhf": ("group.judge",),
    "nemotron3_rlvr": ("environments.judge.settings.judge", "environments.graded.settings.judge"),
    "olmo_rl": ("environments.judge.settings.judge",),
}
"""Endpoints for presets that require them."""


@pytest.mark.parametrize("preset", presets())
def test_a_preset_composes_unchanged_in_hydra(preset: str) -> None:
    given = [f"{judge}.{key}=there" for judge in JUDGES.get(preset, ()) for key in ("endpoint", "model")]
    given += ["distillation.teachers.default=there"] if preset in ("opd", "mopd", "logit_distillation") else []
    composed = compose("rl", [f"rl={preset}", *(f"rl.{word}" for word in given)])["rl"]

    assert algorithm_of(composed) == load(preset, OmegaConf.to_container(OmegaConf.from_dotlist(given)))  # type: ignore[arg-type]


def test_a_judge_endpoint_is_required() -> None:
    with pytest.raises(ValueError, match=r"not set: rl\.group\.judge\.endpoint"):
        compose("rl", ["rl=nemotron3_rlhf"])


def test_domyn_small() -> None:
    math, several, pairs = (
        policy_gradient("domyn_math_grpo"),
        policy_gradient("domyn_multi_env_grpo"),
        preference("dpo_delta"),
    )

    assert (math.responses_per_step, math.updates_per_step, math.steps) == (1024, 1, 432)  # 55 373 // 128
    assert (math.loss.clip_low, math.loss.clip_high, math.loss.kl.coefficient) == (0.2, 3.0, 0)
    assert math.environments["math"].reward == {"name": "domyn_math", "max_tokens": 8192}
    assert (several.responses_per_step, several.warmup, several.loss.dual_clip) == (512, 30, 10)
    assert (several.loss.kl.coefficient, several.loss.kl.estimator) == (0.01, "k3")
    assert several.advantage is not None and several.advantage.baseline == "leave_one_out"
    assert several.asynchronous is not None
    assert several.asynchronous.max_age == 1
    assert len(several.environments) == 5
    assert (pairs.batch, pairs.loss.beta, pairs.lengths.prompt, pairs.lengths.total) == (2048, 0.1, 640, 3456)
    assert (pairs.steps, pairs.warmup) == (252, 26)  # 2 x (260 000 // 2048), a tenth of it rounded up


def test_olmo_3() -> None:
    think, zero, pairs = policy_gradient("olmo_rl"), policy_gradient("rl_zero"), preference("think_dpo")

    assert (think.prompts_per_step, think.generations_per_prompt, think.lengths.response) == (64, 8, 32768)
    assert (zero.prompts_per_step, zero.generations_per_prompt, zero.lengths.response) == (32, 8, 16384)
    for algorithm in (think, zero):
        assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.272)
        assert algorithm.loss.importance_correction.cap == 2
        assert algorithm.advantage is not None and algorithm.advantage.normalise == "none"
        assert algorithm.sampling.drop_zero_variance
    assert (pairs.loss.beta, pairs.loss.length_normalised, pairs.optimizer.learning_rate) == (5, True, 8e-8)


def test_nemotron_3_nano() -> None:
    verified, judged, genrm = (policy_gradient(f) for f in ("nemotron3_rlvr", "nemotron3_rlhf", "genrm_training"))
    tools = preference("dpo_tool_hallucination")

    assert (verified.responses_per_step, verified.updates_per_step) == (2048, 1)
    assert verified.overlong_filtering
    assert verified.router.frozen
    assert verified.router.bias_update_rate > 0
    assert judged.group is not None
    assert judged.group.length_control["percentile"] == 80
    assert (genrm.responses_per_step, genrm.batch) == (1024, 1024)
    assert (tools.batch, tools.steps, tools.loss.beta, tools.loss.sft_weight) == (128, 50, 0.05, 0.2)


def test_llama_nemotron() -> None:
    science, following = policy_gradient("llama_nemotron_grpo"), policy_gradient("rloo_if")
    online, offline = preference("rpo_online"), preference("rpo_offline")

    assert (science.responses_per_step, science.batch, science.updates_per_step) == (1152, 576, 2)
    assert science.curriculum is not None and science.curriculum.drop_from == 0.75
    assert (following.prompts_per_step, following.steps) == (128, 119)
    assert (online.optimizer.learning_rate, online.loss.beta, online.loss.eta, online.batch) == (4e-7, 1e-5, 3, 64)
    assert online.online is not None
    assert (online.steps, online.online.rounds) == (500, 2)
    assert (offline.optimizer.learning_rate, offline.loss.beta, offline.batch) == (7e-7, 3e-2, 512)
    assert offline.steps == 400


def test_changes_are_merged() -> None:
    changed = load("domyn_math_grpo", {"lengths": {"response": 256}, "loss": {"kl": {"coefficient": 0.01}}})

    assert isinstance(changed, PolicyGradient)
    assert changed.loss.clip_high == 3.0
    assert changed.loss.kl.coefficient == 0.01
    assert changed.environments["math"].reward == {"name": "domyn_math", "max_tokens": 256}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "gpro"}, "unknown algorithm 'gpro'; did you mean 'grpo'"),
        ({"prompt_per_step": 4}, "unknown key 'prompt_per_step': did you mean 'prompts_per_step'"),
        ({"loss": {"level": "token", "clip_lo": 0.2, "clip_high": 0.2}}, "loss.clip_lo.*did you mean 'clip_low'"),
        ({"loss": {"level": "tokens", "clip_low": 0.2, "clip_high": 0.2}}, "loss.level='tokens'"),
        (
            {"loss": {"level": "token", "clip_low": 0.2, "clip_high": None}},
            "loss.clip_high=null, but loss.clip_low is a number",
        ),
        ({"loss": {"level": "token", "ratio": "sequence", "clip_low": 0.2, "clip_high": 0.2}}, "GSPO"),
        ({"loss": SMALL["loss"] | {"level": "group"}, "batch": 16}, "level=group requires .* one update per step"),
        ({"loss": SMALL["loss"] | {"level": "group", "kl": {"coefficient": 0.1}}}, "set loss.kl.coefficient=0"),
        ({"batch": 24}, "batch=24 must divide .* = 32"),
        ({"generations_per_prompt": 1, "batch": 4}, "generations_per_prompt=1"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate=nan"),
        ({"optimizer": {}}, "'optimizer.learning_rate' is missing"),
        ({"lengths": {"prompt": 8}}, "lengths.response is null"),
        ({"environments": {"maths": {}}}, "environments: unknown key 'maths': did you mean 'math'"),
        ({"environments": {"math": {"weight": 0}}}, "environments.math.weight=0"),
        ({"sampling": {"drop_zero_variance": True}}, "sampling.max_batches require each other"),
        (
            {"loss": SMALL["loss"] | {"on_policy": True}, "batch": 16},
            "one update per step, not 2; set batch to .* = 32",
        ),
        ({"penalties": {"tool_call": 1.0}}, "penalties.tool_call=1.0"),
        (
            {"penalties": {"thinking": -5.0}, "advantage": SMALL["advantage"] | {"clip": 2.0}},
            "penalties.thinking=-5 exceeds advantage.clip=2",
        ),
        ({"schedule": {"kind": "cosine"}}, "schedule.kind=cosine requires a total number of steps"),
        ({"schedule": {"warmup_share": 0.1}}, "schedule.warmup_share=0.1 requires a total number of steps"),
        ({"schedule": {"steps": 3, "epochs": 1}}, "schedule.steps=3 and schedule.epochs=1 cannot both be set"),
    ],
)
def test_an_invalid_config_is_refused_with_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm_of(SMALL | change)


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"kind": "truncated"}, "requires cap"),
        ({"kind": "masked", "cap": 2.0}, "requires floor"),
        ({"kind": "none", "cap": 2.0}, "takes neither cap nor floor"),
        ({"kind": "masked", "cap": 2.0, "floor": 2.0}, "must be below"),
    ],
)
def test_bounds_of_the_importance_correction(correction: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm_of(SMALL | {"loss": SMALL["loss"] | {"importance_correction": correction}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": "rpo"}, "algorithm=rpo requires loss.eta and loss.distance"),
        ({"loss": {"beta": 0.1, "eta": 1.0}}, "eta is only for algorithm=rpo"),
        ({"lengths": {"prompt": 8}}, "lengths.total=null"),
        ({"router": {"replay": True}}, "router.replay=true requires responses generated during training"),
        ({"prompts_per_step": 8}, "unknown key 'prompts_per_step'"),
    ],
)
def test_an_invalid_preference_config_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm_of(PAIRS | change)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'olmo_rl'"):
        load("olmo_r")


@given(
    examples=st.integers(1, 10**6),
    each=st.integers(1, 10**4),
    epochs=st.integers(1, 4),
    share=st.floats(0, 1, exclude_max=True),
)
def test_the_warm_up_is_part_of_the_steps(examples: int, each: int, epochs: int, share: float) -> None:
    schedule = Schedule(epochs=epochs, examples=examples, warmup_share=share)
    total = schedule.total(each)

    assert total is not None
    assert total * each <= epochs * examples
    assert 0 <= schedule.warmup(total) <= total


def test_settings_of_the_adapter() -> None:
    def surrounded(preset: str, **changes: Any) -> Rendered:
        made = Rendered()
        made.surround(dataclasses.replace(load(preset), **changes))
        return made

    made = surrounded("domyn_multi_env_grpo")
    assert made.adapter["environments"]["bank"] == {"reward": "outcome"}
    assert made.adapter["thinking_share"] == 0.8
    assert not made.inexpressible
    assert surrounded("dpo_delta").adapter["max_prompt_tokens"] == 640
    uses = {"code": EnvironmentUse(concurrency=1024)}
    expected = {"code": {"reward": "outcome", "concurrency": 1024}}
    assert surrounded("domyn_multi_env_grpo", environments=uses).adapter["environments"] == expected


def test_inexpressible_settings_are_an_error_unless_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    rendered = Rendered(settings={}, inexpressible={"loss.level": "token instead"})

    with pytest.raises(ValueError, match=r"loss\.level: token instead"):
        rendered.settled()
    with pytest.raises(ValueError, match="'warning'"):
        rendered.settled("warning")  # type: ignore[arg-type]
    assert rendered.settled("warn") is rendered
    assert "loss.level: token instead" in capsys.readouterr().err
    assert Rendered(settings={}).settled()


def test_choices_without_a_source_are_marked() -> None:
    folder = Path(hydra_conf.__file__).parent / "rl"

    assert all("(choice)" in file.read_text() for file in folder.glob("*.yaml"))
    assert "learning_rate: 3.0e-6, weight_decay: 0.0}     # (choice)" in (folder / "nemotron3_rlvr.yaml").read_text()


def test_algorithms_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("olmo_rl").batch = 1  # type: ignore[misc]


DISTILLED: dict[str, Any] = {key: value for key, value in SMALL.items() if key != "advantage"} | {
    "distillation": {"teachers": {"math": "m", "default": "d"}}
}
LOGITS = {"teachers": {"default": "d"}, "logits": {"top_k": 64}}
REINFORCE = {"level": "token", "clip_low": None, "clip_high": None}


def test_the_teacher_of_a_task() -> None:
    algorithm = algorithm_of(DISTILLED | {"generations_per_prompt": 1, "batch": 4})
    alone = algorithm_of(DISTILLED | {"distillation": {"teachers": {"sums": "m", "default": None}, "by": "domain"}})

    def task(environment: str, domain: str) -> Task:
        return Task.from_record({"id": 1, "environment": environment, "domain": domain, "prompt": "?"})

    assert isinstance(algorithm, PolicyGradient) and algorithm.distillation is not None
    assert algorithm.distillation.teacher(task("math", "sums")) == "math"
    assert algorithm.distillation.teacher(task("code", "sums")) == "default"
    assert isinstance(alone, PolicyGradient) and alone.distillation is not None
    assert alone.distillation.teacher(task("math", "sums")) == "sums"
    with pytest.raises(ValueError, match="no teacher for domain 'math'"):
        alone.distillation.teacher(task("sums", "math"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": SMALL["advantage"]}, "advantage and distillation are both set"),
        ({"distillation": None}, "advantage and distillation are both null"),
        ({"distillation": {"teachers": {"default": None}}}, "no teacher"),
        ({"algorithm": "rloo"}, "algorithm=rloo does not support distillation"),
        ({"sampling": {"temperature": 0.7}}, "at temperature 1, not 0.7"),
        ({"sampling": {"drop_zero_variance": True, "max_batches": 2}}, "equal rewards"),
        ({"group": {"length_control": {"answer": 0.5}}}, "does not affect distillation"),
        ({"distillation": {"teachers": {"default": "d"}, "logits": {}, "clip": 20}}, "clip=20 bounds advantages"),
        ({"distillation": LOGITS}, "logits replaces the policy's loss"),
        ({"distillation": LOGITS, "loss": REINFORCE, "asynchronous": {}}, "asynchronous cannot be combined"),
        ({"distillation": LOGITS, "loss": REINFORCE, "penalties": {"thinking": -1}}, "penalties cannot be combined"),
        ({"distillation": LOGITS, "loss": REINFORCE, "router": {"replay": True}}, r"router\.replay cannot be combined"),
    ],
)
def test_distillation_rejects_settings_of_rewards(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithm_of(DISTILLED | changes)


PAGE = Path(__file__).parents[2] / "docs" / "rl" / "presets.md"


@pytest.mark.parametrize("preset", presets())
def test_the_page_has_the_numbers_of_every_preset(preset: str) -> None:
    assert row(preset) in PAGE.read_text().splitlines()


def row(preset: str) -> str:
    """The line of docs/rl/presets.md."""
    algorithm = load(preset)
    steps = "" if algorithm.steps is None else f", {algorithm.steps} steps"
    rate = f"{algorithm.optimizer.learning_rate:.1e}".replace(".0e-0", "e-").replace("e-0", "e-") + steps
    if isinstance(algorithm, PolicyGradient):
        size = f"{algorithm.prompts_per_step} x {algorithm.generations_per_prompt}, {algorithm.batch}"
        loss = algorithm.loss
        clip = "no clip" if loss.clip_low is None else f"clip {loss.clip_low:g}, {loss.clip_high:g}"
        kl = f", KL {loss.kl.coefficient:g}" if loss.kl.coefficient else ""
        advantage = algorithm.advantage
        signal = "teachers" if advantage is None else f"{advantage.baseline}, {advantage.normalise}"
        what = f"{signal}; {loss.level}, {clip}{kl}"
        what = what if algorithm.logits is None else f"teachers' logits, top {algorithm.logits.top_k}"
        length = str(algorithm.lengths.response)
    else:
        size, length = str(algorithm.batch), str(algorithm.lengths.total)
        what = f"beta {algorithm.loss.beta:g}"
        what += f", eta {algorithm.loss.eta:g}" if algorithm.loss.eta else ""
        what += ", length-normalised" if algorithm.loss.length_normalised else ""
        what += f", SFT {algorithm.loss.sft_weight:g}" if algorithm.loss.sft_weight else ""
    return f"| {preset} | {algorithm.algorithm} | {size} | {what} | {rate} | {length} |"
