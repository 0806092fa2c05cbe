"""A precision plan on the module names of real models."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.precision_plan import LOW, Plan, assigned, weights
from nemo_ext.job.config import compose
from nemo_ext.megatron.check import check_machine
from nemo_ext.megatron.fp8 import Precision, plan_flags

FAMILIES = ("nemotron3_nano_tiny", "domyn_small_tiny", "llama_nemotron_tiny", "olmo1_tiny", "olmo3_tiny")
NAMES = {
    "mixer.in_proj": "in_proj",
    "mixer.out_proj": "out_proj",
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "proj",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
    "mlp.router": "router",
    "mlp.shared_experts.linear_fc1": "shared_fc1",
    "mlp.shared_experts.linear_fc2": "shared_fc2",
}


@pytest.fixture(autouse=True, scope="module")
def imported(megatron: None) -> None:
    """Modules that import Megatron, which takes seconds: imported when tests run, not during collection."""
    global get_quant_config_or_none, stage_blocks
    from megatron.core.quantization.utils import get_quant_config_or_none

    from nemo_ext.megatron.model import stage_blocks


def part_of(name: str) -> tuple[int | None, str] | None:
    """Block and part of a module with a matrix, derived only from its name."""
    if name in ("output_layer", "embedding.word_embeddings"):
        return None, {"output_layer": "head"}.get(name, "embedding")
    found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if found is None:
        return None
    inside = re.sub(r"experts\.local_experts\.\d+\.", "", found[2])
    if inside in ("self_attention", "mlp", "mixer"):
        return int(found[1]), "linear"
    return (int(found[1]), NAMES[inside]) if inside in NAMES else None


def matrices(model: torch.nn.Module) -> list[str]:
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            found.append(name)
    return found


RULES = st.lists(
    st.sampled_from(
        [
            *("* bf16", "M>* bf16", "-<* fp8", "first 2 bf16", "last 1 bf16", "1,3 bf16", "1,3 fp8", "head bf16"),
            *("head fp8", "M.out_proj nvfp4", "last 20% nvfp4"),
            *(".router fp32", "M.in_proj bf16", ".fc1 fp8", "E.shared_fc1 bf16", "E>M fp8", ".conv1d fp32"),
        ]
    ),
    max_size=4,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_has_the_precision_of_the_plan(family: str, build: Callable[..., Any]) -> None:
    model = build(f"model={family}")
    sizes = Architecture.from_config(compose("describe", [f"model={family}"]))
    names = matrices(model)
    assert {part_of(name) for name in names} == {
        (weight.block, weight.part) for weight in weights(sizes) if weight.part != "conv1d"
    }

    @settings(suppress_health_check=[HealthCheck.differing_executors])
    @given(RULES, st.sampled_from(["nvfp4", "fp8", "bf16"]), st.sampled_from(["tensorwise", "blockwise", "mxfp8"]))
    def matches(rules: list[str], default: str, scaling: str) -> None:
        plan = Plan.from_config({"default": default, "recipe": scaling, "rules": rules})
        wanted = {(each.weight.block, each.weight.part): each.precision for each in assigned(plan, sizes)}
        config = Precision(plan, sizes).recipe_config(range(len(sizes.sizes)))
        for name in names:
            got = get_quant_config_or_none(name, config)
            assert got is not None, name
            assert (got.config_key if got.config_key != "bf16" else None) == (
                wanted[part_of(name)] if wanted[part_of(name)] in LOW else None
            ), name

    matches()


@given(st.lists(st.sampled_from("M*-E"), min_size=4, max_size=12), st.integers(1, 4), st.integers(1, 2), st.data())
def test_a_stage_has_its_own_blocks(kinds: list[str], size: int, virtual: int, data: st.DataObject) -> None:
    stages = size * virtual
    if stages > len(kinds):
        return
    cuts = sorted(data.draw(st.sets(st.integers(1, len(kinds) - 1), min_size=stages - 1, max_size=stages - 1)))
    edges = [0, *cuts, len(kinds)]
    pattern = parse("|".join("".join(kinds[first:last]) for first, last in pairwise(edges)))
    found = [stage_blocks(pattern, rank, size, stage) for stage in range(virtual) for rank in range(size)]

    assert found == [range(first, last) for first, last in pairwise(edges)]


ENGINE = "model.backend=transformer_engine"
FITS = ("megatron.mamba_num_heads=32", "megatron.mamba_head_dim=8")
"""The tiny Nano's Mamba blocks with sizes for MXFP8 and NVFP4."""


def test_names_are_relative_to_the_stage() -> None:
    sizes = Architecture.from_config(compose("describe", ["model=nemotron3_nano_tiny"]))
    plan = Plan.from_config({"default": "fp8", "rules": ["* bf16"]})
    config = Precision(plan, sizes).recipe_config(range(2, 5))  # M*E

    got = {
        name: get_quant_config_or_none(f"decoder.layers.{name}", config)
        for name in ("0.mixer.in_proj", "1.self_attention.linear_qkv", "2.mlp.experts.linear_fc1", "3.mixer.in_proj")
    }
    assert [None if each is None else each.config_key for each in got.values()] == ["fp8", "bf16", "fp8", None]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["precision=fp8_current", "megatron.mamba_num_heads=8"],
            "in_proj: out 392 is not a multiple of 16 (tensorwise); use 384 or 400",
        ),
        (["precision=fp8_current", "megatron.fp8_format=e4m3"], "megatron.fp8_format and precision_plan are both set"),
        (["precision=fp8_delayed", "model.backend=local"], "precision_plan.recipe=delayed needs Transformer Engine"),
        (["precision=fp8_delayed", "precision_plan.rules=[M bf16, - fp8]"], "delayed applies to the whole model"),
        (
            ["precision=fp8_current", "precision_plan.rules=[M bf16, head fp32]"],
            "head to fp32, but Megatron supports fp32 only for routers",
        ),
        (
            ["precision=fp8_current", "precision_plan.rules=[M bf16, first 2.router fp32]"],
            "only some routers to fp32",
        ),
        (
            ["precision=fp8_current", "precision_plan.default=bf16", "precision_plan.rules=[E.fc1 fp8]", ENGINE],
            "fc1 to fp8 with default=bf16, but Megatron pads the tokens of experts",
        ),
        (
            ["precision=nvfp4_experts", "precision_plan.default=fp8", "precision_plan.rules=[E.fc2 nvfp4]", ENGINE],
            "fc2 to nvfp4 with default=fp8, but Megatron pads the tokens of experts, as NVFP4 needs, only if NVFP4",
        ),
        (["precision=nvfp4_experts", "precision_plan.nvfp4=w4a16", ENGINE], "trains with NVFP4 inputs only; use w4a4"),
        (["precision=nvfp4", "megatron.fp4_format=e2m1"], "megatron.fp4_format and precision_plan are both set"),
        (["precision=nvfp4"], "not a multiple of 32 (nvfp4)"),
        (["precision=mxfp8", "precision_plan.rules=[M bf15]"], "expected a selector and one of"),
        (["train.quantization_aware=true"], "requires a precision plan with FP8 or NVFP4, such as precision=nvfp4"),
        (["precision=fp8_blockwise", "train.quantization_aware=true"], "not support precision_plan.recipe=blockwise"),
        (["precision=fp8_current", "train.quantization_aware=true", ENGINE], "set model.backend=local"),
    ],
)
def test_invalid_plans_are_refused(words: list[str], said: str) -> None:
    config = compose("train", ["run_dir=unused", "data=mock", *words])
    with pytest.raises(ValueError, match=r"\w") as raised:
        plan_flags(config)
    assert said in str(raised.value)


def test_quantisation_aware_training_needs_sizes_of_checkpoints_and_sets_no_precision() -> None:
    words = [
        "run_dir=unused",
        "data=mock",
        "precision=nvfp4",
        "precision_plan.rules=[]",
        "train.quantization_aware=true",
    ]

    assert plan_flags(compose("train", words)) == {}
    with pytest.raises(ValueError, match=r"block 1 fc1: out 136 is not a multiple of 16 \(nvfp4\)"):
        plan_flags(compose("train", [*words, "megatron.moe_ffn_hidden_size=136"]))


@pytest.mark.parametrize(
    ("rule", "more"), [("E.fc1 fp8", ["model.backend=local"]), ("E.shared_fc1 fp8", [ENGINE]), ("* fp8", [ENGINE])]
)
def test_fp8_without_padded_experts_may_be_selected_by_rules(rule: str, more: list[str]) -> None:
    words = ["precision=fp8_current", "precision_plan.default=bf16", f"precision_plan.rules=[{rule}]", *more]

    assert "fp8_format" not in plan_flags(compose("train", ["run_dir=unused", "data=mock", *words]))


@pytest.mark.parametrize("word", ["precision=fp8_delayed", "megatron.fp8_format=e4m3", "megatron.fp4_format=e2m1"])
def test_fp8_is_not_ignored_silently(word: str) -> None:
    config = compose("train", ["run_dir=unused", "data=mock", "model.backend=local", word])

    with pytest.raises(ValueError, match=r"needs Transformer Engine, but model\.backend is local here"):
        check_machine(config)


@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_megatron_reads_the_recipe_for_transformer_engine(scaling: str, form: str) -> None:
    """The parser of its Transformer Engine layers does not need Transformer Engine."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.extensions.transformer_engine import TEQuantizationParams

    sizes = Architecture.from_config(compose("describe", ["model=nemotron3_nano_tiny"]))
    plan = Plan.from_config({"default": "fp8", "recipe": scaling, "format": form, "rules": ["* bf16"]})
    config = Precision(plan, sizes).recipe_config(range(len(sizes.sizes)))

    def read(name: str) -> Any:
        found = get_quant_config_or_none(f"decoder.layers.{name}", config)
        assert found is not None
        return TEQuantizationParams.parse_from_config(found).training_recipe

    low, high = read("0.mixer.in_proj"), read("3.self_attention.linear_qkv")
    assert (low.fp8_quantization_recipe, low.fp8_format) == (Fp8Recipe(scaling), form)
    assert low.override_nonquantized_autocast
    assert high.fp8_quantization_recipe is None
    assert high.override_quantized_autocast


@pytest.mark.parametrize(("backend", "flags"), [("transformer_engine", ("e4m3", "blockwise")), ("local", (None, None))])
def test_the_plan_sets_megatrons_flags_where_transformer_engine_runs(
    backend: str, flags: tuple[str | None, str | None]
) -> None:
    rules = "precision_plan.rules=[M bf16, E bf16, * bf16, - bf16, head bf16]"
    config = compose("train", ["data=mock", f"model.backend={backend}", "precision=fp8_blockwise", rules])
    made = plan_flags(config)
    assert tuple(made.get(name) for name in ("fp8_format", "fp8_recipe")) == flags


def test_nvfp4_sets_megatrons_flags_and_reads_as_its_recipe() -> None:
    """One pipeline stage of a plan with NVFP4, MXFP8 and BF16, and prediction depths, which stay in BF16."""
    from megatron.core.enums import Fp4Recipe, Fp8Recipe
    from megatron.core.extensions.transformer_engine import TEQuantizationParams

    config = compose("train", ["data=mock", ENGINE, "model=nemotron3_nano_tiny", "precision=nvfp4", *FITS])
    assert plan_flags(config) == {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}
    precision = Precision.from_config(config)
    assert precision is not None

    def read(name: str) -> Any:
        found = get_quant_config_or_none(name, precision.recipe_config(range(2)))
        assert found is not None
        recipe = TEQuantizationParams.parse_from_config(found).training_recipe
        return recipe.fp4_quantization_recipe or recipe.fp8_quantization_recipe

    assert read("decoder.layers.0.mixer.in_proj") == Fp4Recipe.nvfp4
    assert read("decoder.layers.0.mixer.out_proj") == Fp8Recipe.mxfp8
    assert read("mtp.layers.0.eh_proj") is None
    assert read("mtp.layers.0.mtp_model_layer.layers.1.mlp.experts.linear_fc1") is None


def test_nvfp4_needs_blackwell_and_a_new_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_ext.megatron.fp8 import check_gpu, remark

    words = ["run_dir=unused", "data=mock", "precision=nvfp4", *FITS]
    with_engine, simulated = (compose("train", [*words, f"model.backend={b}"]) for b in ("transformer_engine", "local"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ValueError, match=r"NVFP4 needs Blackwell GPUs, not NVIDIA H100: use precision=fp8_blockwise"):
        check_gpu(with_engine)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr("megatron.core.utils.is_te_min_version", lambda version: False)
    with pytest.raises(ValueError, match=r"NVFP4 needs Transformer Engine 2\.7\.0\.dev0 or later: update it"):
        check_gpu(with_engine)
    check_gpu(simulated)
    assert "NVFP4 without Transformer Engine is simulated" in str(remark(simulated))
