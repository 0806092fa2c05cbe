"""A plan's quantizers on the modules of every Hugging Face class, as ModelOpt itself makes and finds them."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.precision_plan import RECIPES, Plan, Rule, Selector, assigned
from nemo_ext.checkpoint.formats import FORMATS
from nemo_ext.megatron.nvfp4 import fake_nvfp4, packed, quantise_nvfp4
from nemo_ext.quantization.modelopt import (
    SCALINGS,
    check_calibrated,
    check_quantizers,
    excluded,
    matrices,
    parameters,
    quantize_config,
)

pytestmark = [
    pytest.mark.ptq,
    pytest.mark.skipif(find_spec("modelopt") is None, reason="needs ModelOpt: pip install 'nemo_ext[ptq]'"),
]

LEAVES = {
    **{f"{name}_proj": "qkv" for name in "qkv"},
    **{"o_proj": "proj", "gate_proj": "fc1", "up_proj": "fc1", "down_proj": "fc2"},
    **{
        "in_proj": "in_proj",
        "out_proj": "out_proj",
        "linear_attn": "linear",
        "linear_mlp": "linear",
        "mixer": "linear",
    },
    **{"experts.up_proj": "fc1", "experts.down_proj": "fc2"},
    **{"shared_experts.up_proj": "shared_fc1", "shared_experts.down_proj": "shared_fc2"},
    **{"fc1_latent_proj": "latent_fc1", "fc2_latent_proj": "latent_fc2"},
}
"""What transformers calls a part in its models, written down once more."""
HYBRID = ["M", "E", "*", "-"]
OWN = [
    "M{heads=4}",
    "E{experts=3,ffn=32}",
    "E{latent=48}",
    "*{kv=1}",
    "*{window=8}",
    "-{ffn=48}",
    "-{linear}",
    "*{linear}",
    "M{linear}",
]
PATTERNS = {
    "NemotronForCausalLM": ("domyn_small_tiny", st.integers(1, 3).map(lambda count: "*-" * count)),
    "LlamaForCausalLM": ("llama_nemotron_tiny", st.integers(1, 3).map(lambda count: "*-" * count)),
    "OlmoForCausalLM": ("olmo1_tiny", st.integers(1, 3).map(lambda count: "*-" * count)),
    "Olmo3ForCausalLM": ("olmo3_tiny", st.lists(st.sampled_from(["*-", "*{window=8}-"]), min_size=1, max_size=3)),
    "NemotronHForCausalLM": ("nemotron3_nano_tiny", st.lists(st.sampled_from(HYBRID), min_size=1, max_size=5)),
    "NemotronHPuzzleForCausalLM": (
        "nemotron3_nano_tiny",
        st.lists(st.sampled_from([*HYBRID, "E{experts=3,ffn=32}", "*{kv=1}", "-{ffn=48}"]), max_size=5),
    ),
    "DeciLMForCausalLM": (
        "llama_nemotron_tiny",
        st.lists(st.sampled_from(["*", "-", "*{kv=2}", "-{ffn=96}", "*{linear}", "-{linear}"]), max_size=5),
    ),
    "NemoExtBlocksForCausalLM": ("nemotron3_nano_tiny", st.lists(st.sampled_from(HYBRID + OWN), max_size=5)),
}
ALWAYS = {
    **{"NemotronHForCausalLM": "*", "NemotronHPuzzleForCausalLM": "EE{ffn=32}*"},
    **{"DeciLMForCausalLM": "*-*{kv=1}-", "NemoExtBlocksForCausalLM": "MM{heads=4}*-"},
}
"""What a pattern ends with so that no earlier format can express it."""
RULES = st.lists(
    st.sampled_from(
        [
            *("* bf16", "M>* bf16", "-<* fp8", "first 2 bf16", "last 1 bf16", "0 bf16", "0 fp8", "head bf16"),
            *("head fp8", ".router fp32", "M.in_proj bf16", ".fc1 fp8", "E.shared_fc1 bf16", "E>M fp8", ".conv1d fp32"),
            *("E.fc2 bf16", "*.qkv bf16", ".out_proj fp8", "- fp32", "E.latent_fc1 fp8", ".latent_fc2 fp8"),
        ]
    ).map(Rule.parse),
    max_size=4,
)
PLANS = st.builds(
    Plan,
    default=st.sampled_from(["fp8", "bf16"]),
    recipe=st.sampled_from(list(RECIPES)),
    kv_cache=st.sampled_from(["fp8", "bf16"]),
    rules=RULES.map(tuple),
)


def part_of(quantizer: str, kinds: list[str], dense: bool) -> tuple[int | None, str]:
    """Block and part of a quantizer, told from its name alone."""
    module = re.sub(r"[._](weight|input)_quantizers?(\.\d+)?$", "", quantizer)
    if module == "lm_head":
        return None, "head"
    number, inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module).groups()  # type: ignore[union-attr]
    leaf = inside.rpartition(".")[2]
    part = next(LEAVES[end] for end in (".".join(inside.split(".")[-2:]), leaf) if end in LEAVES)
    if not dense:
        return int(number), part
    # An attention block and the MLP after it share a layer, any other block has its own.
    layer, attention = -1, inside.startswith("self_attn")
    for block, kind in enumerate(kinds):
        joins = kind == "-" and block > 0 and kinds[block - 1] == "*"
        layer += not joins
        if layer == int(number) and (kind == "*") == attention:
            return block, part
    raise AssertionError(quantizer)


def enabled(model: torch.nn.Module) -> set[str]:
    from modelopt.torch.quantization.nn import TensorQuantizer

    return {name for name, module in model.named_modules() if isinstance(module, TensorQuantizer) and module.is_enabled}


def converted(model: Any, plan: Plan, description: Any, found: Any) -> dict[str, Any]:
    """ModelOpt's own conversion, without calibration."""
    from modelopt.torch.quantization.conversion import replace_quant_module, set_quantizer_by_cfg

    listed = matrices(plan, description, found)
    config = quantize_config(plan, listed, parameters(model, [matrix.tensor for matrix in listed]))
    if not any("quantizer" in name for name, _ in model.named_modules()):
        replace_quant_module(model)
    set_quantizer_by_cfg(model, config["quant_cfg"])
    return config


@pytest.mark.parametrize("architecture", list(FORMATS))
def test_exactly_the_planned_quantizers_are_on(architecture: str, model_of: Callable[..., Any]) -> None:
    name, patterns = PATTERNS[architecture]
    built: dict[str, Any] = {}

    @settings(
        max_examples=12,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(patterns.map("".join), PLANS)
    def matches(beginning: str, plan: Plan) -> None:
        pattern = beginning + ALWAYS.get(architecture, "")
        if pattern not in built:
            built[pattern] = model_of(name, pattern)
        model, description, found = built[pattern]
        assert found.architecture == architecture

        config = converted(model, plan, description, found)

        check_quantizers(model, config)
        kinds = [block.kind for block in parse(pattern).blocks]
        dense = "NemotronH" not in architecture and architecture != "NemoExtBlocksForCausalLM"
        on = enabled(model)
        caches = {quantizer for quantizer in on if "bmm_quantizer" in quantizer}
        weights = {quantizer for quantizer in on if "weight_quantizer" in quantizer}
        inputs = on - caches - weights
        planned = {
            (each.weight.block, each.weight.part)
            for each in assigned(plan, description.architecture)
            if each.precision == "fp8"
        }
        assert {part_of(quantizer, kinds, dense) for quantizer in weights} == planned
        assert {part_of(quantizer, kinds, dense) for quantizer in inputs} == (
            set() if plan.recipe == "blockwise" else planned
        )
        attention = sum(
            kind == "*" and "{linear}" not in str(block)
            for kind, block in zip(kinds, parse(pattern).blocks, strict=True)
        )
        assert {quantizer.rpartition(".")[2] for quantizer in caches} <= {"k_bmm_quantizer", "v_bmm_quantizer"}
        assert len(caches) == (2 * attention if plan.kv_cache == "fp8" else 0)

    matches()


def test_every_expert_and_all_of_q_k_v_have_quantizers(model_of: Callable[..., Any]) -> None:
    model, description, found = model_of("nemotron3_nano_tiny", "E*")

    converted(model, Plan(default="fp8"), description, found)

    on = enabled(model)
    assert {f"model.layers.0.mixer.experts.up_proj_weight_quantizers.{expert}" for expert in range(8)} <= on
    assert {f"model.layers.1.mixer.{name}_proj.weight_quantizer" for name in "qkvo"} <= on


def test_a_scaling_is_what_the_plan_says(model_of: Callable[..., Any]) -> None:
    model, description, found = model_of("domyn_small_tiny", "*-")
    linear = "model.layers.0.mlp.up_proj"
    seen = {}

    for recipe in SCALINGS:
        converted(model, Plan(default="fp8", recipe=recipe), description, found)
        quantizer = model.get_submodule(f"{linear}.weight_quantizer")
        assert quantizer.num_bits == (4, 3)
        seen[recipe] = (quantizer.axis, quantizer.block_sizes and {k: v for k, v in quantizer.block_sizes.items()})

    assert seen["tensorwise"] == seen["delayed"] == (None, None)
    assert seen["blockwise"] == (None, {-1: 128, -2: 128})
    assert seen["mxfp8"] == (None, {-1: 32, "type": "dynamic", "scale_bits": (8, 0)})
    assert set(SCALINGS) == set(RECIPES)


def test_quantizers_that_are_missing_or_too_many_are_found(model_of: Callable[..., Any]) -> None:
    model, description, found = model_of("nemotron3_nano_tiny", "E*")
    config = converted(model, Plan(default="fp8"), description, found)

    model.get_submodule("model.layers.0.mixer.experts.up_proj_weight_quantizers.3").disable()
    with pytest.raises(
        RuntimeError, match=r"no quantizer model\.layers\.0\.mixer\.experts\.up_proj_weight_quantizer in"
    ):
        check_quantizers(model, config)

    config = converted(model, Plan(default="bf16"), description, found)
    model.get_submodule("lm_head.weight_quantizer").enable()
    with pytest.raises(RuntimeError, match=r"quantises lm_head\.weight_quantizer too"):
        check_quantizers(model, config)


def test_a_quantizer_without_a_scale_is_refused(model_of: Callable[..., Any]) -> None:
    model, description, found = model_of("domyn_small_tiny", "*-")
    converted(model, Plan(default="fp8"), description, found)

    with pytest.raises(ValueError, match=r"no sample reached .*model\.layers\.0.*calibration\.samples"):
        check_calibrated(model)


def test_excluded_modules_have_the_names_of_the_checkpoint(described: Callable[..., Any]) -> None:
    description, found, _ = described("nemotron3_nano_tiny", "ME{latent=48}*")
    plan = Plan(default="fp8", rules=tuple(map(Rule.parse, ("E.fc1 bf16", "E.fc2 bf16", "M.in_proj fp32"))))

    assert excluded(matrices(plan, description, found), "lm_head") == [
        "backbone.embeddings",
        "backbone.layers.0.mixer.in_proj",
        "backbone.layers.0.mixer.conv1d",
        "backbone.layers.1.mixer.gate",
        "backbone.layers.1.mixer.fc1_latent_proj",
        "backbone.layers.1.mixer.fc2_latent_proj",
        "backbone.layers.1.mixer.experts*",
    ]


def test_a_tied_output_layer_is_excluded_though_it_has_no_matrix(described: Callable[..., Any]) -> None:
    description, found, _ = described("olmo1_tiny", "*-")
    listed = matrices(Plan(default="fp8"), description, found)

    assert excluded(listed, found.outside["head"]) == ["model.embed_tokens", "lm_head"]


def test_selectors_of_the_plan_reach_the_checkpoint(described: Callable[..., Any], tmp_path: Path) -> None:
    """Nemotron 3 Nano's choice: attention and the Mamba blocks before it stay."""
    description, found, _ = described("nemotron3_nano_tiny", "MEM*EME-")
    plan = Plan(default="fp8", rules=tuple(map(Rule.parse, ("* bf16", "M>* bf16", "head bf16", ".router fp32"))))

    low = {matrix.module for matrix in matrices(plan, description, found) if matrix.precision == "fp8"}

    assert Selector.parse("M>*").before == "*"
    assert {name.split(".")[2] for name in low} == {"0", "1", "4", "5", "6", "7"}
    assert not any(name.endswith(("gate", "conv1d")) for name in low)


@given(
    *(st.integers(0, 999), st.integers(1, 20), st.integers(1, 4)),
    *(st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([None, 0.3, 2.0])),
)
def test_nvfp4_values_are_modelopts_bit_for_bit(
    seed: int, rows: int, blocks: int, dtype: torch.dtype, share: float | None
) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-9, 9, (rows, blocks, 1), generator=random).float())
    matrix = (sizes * torch.randn(rows, blocks, 16, generator=random)).view(rows, -1).to(dtype)
    matrix[:, 3::5] = 0
    amax = None if share is None else matrix.float().abs().amax() * share
    double = None if amax is None else amax / 2688

    made = quantise_nvfp4(matrix, amax=amax)
    theirs, scale, double = NVFP4QTensor.quantize(matrix.clone(), 16, weights_scaling_factor_2=double)
    numbers = theirs.dequantize(dtype, scale=scale, double_scale=double, block_sizes={-1: 16})

    assert torch.equal(made.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(made.double_scale, double)
    # A negative number that is rounded to zero has a sign in ModelOpt's code, and none in its numbers.
    signless = theirs._quantized_data.clone()
    for low in (0x0F, 0xF0):
        signless[signless & low == 0x88 & low] &= ~low & 0xFF
    assert torch.equal(packed(made.values), signless)
    assert torch.equal(fake_nvfp4(matrix, amax), numbers)
