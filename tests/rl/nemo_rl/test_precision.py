"""A precision plan in the config of a real checkout, and settings that it cannot express."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.checkpoint.description import from_config
from nemo_ext.checkpoint.formats import choose
from nemo_ext.job.config import compose
from nemo_ext.rl.algorithms import Algorithm, Asynchronous, PolicyGradient, load
from nemo_ext.rl.job import checked_algorithm
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.job import settings_of
from nemo_ext.rl.nemo_rl.precision import IGNORED
from nemo_ext.rl.nemo_rl.render import render
from nemo_ext.rl.precision import Precision

RULES = ["* bf16", "M>* bf16", "head bf16"]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """Folder with the config.json of Nemotron 3 Nano's tiny model, MEM*EME-."""
    _, values = choose(from_config(compose("describe", ["model=nemotron3_nano_tiny"])))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps(values))
    return tmp_path / "policy"


@pytest.fixture
def planned(policy: Path) -> Callable[..., Precision]:
    def make(where: str | None = None, **plan: Any) -> Precision:
        section = {"default": "fp8", "recipe": "blockwise", "rules": RULES} | plan
        made = Precision.from_config({"precision_plan": section, "policy": str(policy)}, where)
        assert made is not None
        return made

    return make


def corrected(name: str = "domyn_math_grpo") -> PolicyGradient:
    """Preset with the correction that FP8 generation requires."""
    algorithm = load(name)
    assert isinstance(algorithm, PolicyGradient)
    correction = replace(algorithm.loss.importance_correction, kind="untruncated", cap=None, floor=None)
    return replace(algorithm, asynchronous=None, loss=replace(algorithm.loss, importance_correction=correction))


def why(real: Checkout, algorithm: Algorithm, precision: Precision, backend: Any = "megatron") -> dict[str, str]:
    """Settings that cannot be expressed because of the plan, with reasons."""
    without = render(algorithm, real, backend=backend).inexpressible
    found = render(algorithm, real, backend=backend, precision=precision).inexpressible
    return {key: reason for key, reason in found.items() if without.get(key) != reason}


@pytest.mark.nemo_rl
def test_generation_leaves_fp8_by_the_names_of_modules(
    real: Checkout, planned: Callable[..., Precision], policy: Path
) -> None:
    from transformers import AutoConfig, AutoModel

    precision = planned(kv_cache="fp8")
    rendered = render(corrected(), real, precision=precision)
    config = real.config("grpo", rendered.settings)["policy"]

    assert not why(real, corrected(), precision)
    vllm = config["generation"]["vllm_cfg"]
    assert (vllm["precision"], vllm["kv_cache_dtype"]) == ("fp8", "fp8")
    assert not (config["megatron_cfg"].get("fp8_cfg") or {}).get("enabled")
    # NeMo-RL excludes modules whose names contain a keyword, with AutoModel's names.
    model = AutoModel.from_config(AutoConfig.from_pretrained(policy))
    names = [name.removesuffix(".weight") for name, tensor in model.named_parameters() if tensor.dim() > 1]
    left = {name for name in names if any(word in f"model.{name}" for word in vllm[IGNORED])}
    assert left == {
        "layers.2.mixer.in_proj",
        "layers.2.mixer.out_proj",
        *(f"layers.3.mixer.{name}_proj" for name in "qkvo"),
    }


@pytest.mark.nemo_rl
def test_training_in_fp8(real: Checkout, planned: Callable[..., Precision]) -> None:
    whole = planned("training", rules=["head bf16"], format="hybrid", recipe="tensorwise")
    config = real.config("grpo", render(corrected(), real, precision=whole).settings)["policy"]

    assert not why(real, corrected(), whole)
    assert (
        config["megatron_cfg"]["fp8_cfg"] | {"enabled": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}
        == (config["megatron_cfg"]["fp8_cfg"])
    )
    assert config["generation"]["vllm_cfg"]["precision"] != "fp8"
    preference = load("dpo_delta")
    assert real.config("dpo", render(preference, real, precision=whole).settings)["policy"]["megatron_cfg"]["fp8_cfg"][
        "enabled"
    ]


@pytest.mark.nemo_rl
def test_settings_that_cannot_be_expressed_are_reported(real: Checkout, planned: Callable[..., Precision]) -> None:
    algorithm = corrected()
    loss = algorithm.loss
    uncorrected = replace(
        algorithm, loss=replace(loss, importance_correction=replace(loss.importance_correction, kind="none"))
    )

    assert "all linear layers in FP8 or none" in why(real, algorithm, planned("both"))["precision_plan.rules"]
    assert "FP8 in the output layer" in why(real, algorithm, planned(rules=[]))["precision_plan.rules"]
    assert "128x128, not tensorwise" in why(real, algorithm, planned(recipe="tensorwise"))["precision_plan.recipe"]
    assert "requires a correction" in why(real, uncorrected, planned())["loss.importance_correction.kind"]
    assert render(uncorrected, real, precision=planned()).settings["loss_fn"]["use_importance_sampling_correction"]
    assert "does not generate" in why(real, load("dpo_delta"), planned())["precision_plan"]
    cache = planned(kv_cache="fp8")
    assert "megatron backend computes scales" in why(real, algorithm, cache, "dtensor")["precision_plan.kv_cache"]
    later = replace(algorithm, asynchronous=Asynchronous(max_age=1, in_flight=False))
    assert "does not support an FP8 cache" in why(real, later, cache)["precision_plan.kv_cache"]
    assert "all are in FP8" not in str(why(real, algorithm, planned("training"), "dtensor"))
    assert "megatron backend trains in FP8" in why(real, algorithm, planned("training"), "dtensor")["nemo_rl.fp8_in"]
    alone = planned(default="bf16", kv_cache="fp8", rules=[])
    assert "only with FP8 weights" in why(real, algorithm, alone)["precision_plan.kv_cache"]
    mx = real.keys("grpo").missing("policy.generation.vllm_cfg.is_mx") is None
    assert ("precision_plan.recipe" in why(real, algorithm, planned(recipe="mxfp8"))) != mx
    ignored = render(algorithm, real, precision=planned(recipe="mxfp8")).settings["policy"]["generation"]["vllm_cfg"][
        IGNORED
    ]
    assert ("lm_head" in ignored) == mx


@pytest.mark.nemo_rl
def test_the_job_applies_a_plan(real: Checkout, policy: Path, tmp_path: Path) -> None:
    words = ["preset=nemotron3_rlvr", "engine=nemo_rl", f"model={policy}", "tasks.train={path: a.jsonl}"]
    words += ["precision=nemotron3_selective", "precision_plan.recipe=blockwise", "on_inexpressible=warn"]
    words += [f"run_dir={tmp_path / 'run'}", "environments={math: {}}", "rl.schedule.steps=2"]
    config = compose("rl", words)

    _, master = settings_of(config, checked_algorithm(config), real)

    assert master["policy"]["generation"]["vllm_cfg"]["precision"] == "fp8"
    assert "layers.3.mixer.q_proj" in master["policy"]["generation"]["vllm_cfg"][IGNORED]
