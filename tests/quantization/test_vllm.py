"""vLLM's own classes on what we tell it: which modules are in FP8, and where scales of the cache go. Needs no GPU."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_ext.architecture.precision_plan import LOW, Plan, Rule
from nemo_ext.job.config import compose
from nemo_ext.megatron.nvfp4 import fake_nvfp4, packed, quantise_nvfp4
from nemo_ext.quantization.generation import online_arguments
from nemo_ext.quantization.modelopt import Matrix, excluded, layer_algorithms, matrices

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (tests/vllm/requirements.txt)"),
]

VLLM = "vllm.model_executor.models."
CASES = {
    "NemotronHForCausalLM": (
        f"{VLLM}nemotron_h",
        "nemotron3_nano_30b",
        "",
        ["* bf16", "M>* bf16", "1 bf16", "head bf16"],
    ),
    "NemotronForCausalLM": (f"{VLLM}nemotron", "domyn_small_10b", "", ["first 3 bf16", "6.qkv bf16", "head bf16"]),
    "DeciLMForCausalLM": (
        f"{VLLM}nemotron_nas",
        "llama_nemotron_tiny",
        "*-*{kv=2}-*-",
        ["1.fc1 bf16", "2 bf16", "head bf16"],
    ),
    "NemoExtBlocksForCausalLM": (
        "nemo_ext.vllm.model",
        "nemotron3_nano_tiny",
        "MEM{heads=4}*E-",
        ["1 bf16", "5.fc1 bf16", "head bf16"],
    ),
    "NemoExtHybridBlocksForCausalLM": (
        "nemo_ext.vllm.model",
        "nemotron3_nano_tiny",
        "MEM{heads=4}*E*{linear}",
        ["2.in_proj bf16", "3.qkv bf16", "head bf16"],
    ),
}


def served(matrix: Matrix, packed: dict[str, list[str]]) -> str:
    """What vLLM calls the module of a matrix: its own first word, a block's experts as one, q, k and v as one."""
    name = re.sub(r"\.experts\..*", ".experts", matrix.module).replace("backbone.", "model.")
    above, dot, leaf = name.rpartition(".")
    return above + dot + next((whole for whole, parts in packed.items() if leaf in parts), leaf)


@pytest.mark.parametrize("architecture", CASES)
def test_vllm_has_in_fp8_what_the_plan_has(architecture: str, described: Callable[..., Any]) -> None:
    from importlib import import_module

    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    module, name, pattern, rules = CASES[architecture]
    served_by = getattr(import_module(module), architecture)
    packed = getattr(served_by, "packed_modules_mapping", {})
    description, found, _ = described(name, pattern)
    plan = Plan(default="fp8", kv_cache="fp8", rules=tuple(map(Rule.parse, rules)))
    listed = matrices(plan, description, found)
    there = {matrix.module.rpartition(".")[2] for matrix in listed}
    packed = {whole: parts for whole, parts in packed.items() if there.issuperset(parts)}

    cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    told = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_scheme": cache,
        "ignore": excluded(listed, "lm_head"),
    }
    config = ModelOptFp8Config.from_config(told)
    if getattr(served_by, "hf_to_vllm_mapper", None):
        config.apply_vllm_mapper(served_by.hf_to_vllm_mapper)
    config.packed_modules_mapping = packed
    ignored = online_arguments(plan, listed)["quantization_config"]["ignore"]

    assert config.kv_cache_quant_method == "FP8"
    for matrix in listed:
        if matrix.weight.part == "embedding":
            continue
        high = matrix.precision != "fp8"
        assert config.is_layer_excluded(served(matrix, packed)) == high, matrix.module
        if matrix.weight.part not in ("head", "router", "conv1d", "linear"):  # never vLLM's to quantise
            assert should_ignore_layer(served(matrix, packed), ignore=ignored, fused_mapping=packed) == high


def test_scales_of_the_cache_go_to_the_attention(described: Callable[..., Any]) -> None:
    from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

    for inside in ("layers.3.mixer", "layers.3.self_attn"):
        for what in "kv":
            wanted = f"model.{inside}.attn.{what}_scale"
            assert maybe_remap_kv_scale_name(f"model.{inside}.{what}_proj.{what}_scale", {wanted: None}) == wanted

    from nemo_ext.vllm.model import NemoExtBlocksForCausalLM, places

    for name, pattern, layer in (
        ("llama_nemotron_tiny", "-*-", "1.self_attn"),
        ("nemotron3_nano_tiny", "MM{heads=4}*", "2.mixer"),
    ):
        description, found, _ = described(name, pattern)
        model = SimpleNamespace(places=places(found, description))
        for what in "kv":
            place = NemoExtBlocksForCausalLM._place(model, f"model.layers.{layer}.{what}_proj.{what}_scale")
            assert place == (f"model.layers.{2 if 'mixer' in layer else 1}.mixer.attn", None, f"{what}_scale")


def test_nvfp4_values_are_those_of_vllms_reference() -> None:
    import torch
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    torch.manual_seed(0)
    matrix = (torch.randn(8, 64) * torch.exp2(torch.randint(-9, 9, (8, 1)).float())).bfloat16()
    made = quantise_nvfp4(matrix)

    theirs = dequantize_to_dtype(
        packed(made.values), made.scale, made.double_scale, torch.bfloat16, block_size=16, swizzle=False
    )
    assert torch.equal(theirs, fake_nvfp4(matrix))


def test_vllm_has_the_algorithm_of_the_plan_in_every_layer(described: Callable[..., Any]) -> None:
    """NVFP4, FP8 and BF16 in one checkpoint of Nemotron-H, as `quantized_layers` tell vLLM."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

    description, found, _ = described("nemotron3_nano_30b", "")
    plan = Plan.from_config(compose("quantize", ["from=a", "to=b", "precision=nvfp4_experts"])["precision_plan"])
    listed = matrices(plan, description, found)
    low = [(matrix.module, matrix.precision) for matrix in listed if matrix.precision in LOW]
    told = {
        **{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": excluded(listed, "lm_head")},
        "quantized_layers": layer_algorithms(plan, low),
    }

    assert ModelOptMixedPrecisionConfig.override_quantization_method(told, None) == "modelopt_mixed"
    config = ModelOptMixedPrecisionConfig.from_config(told)
    config.apply_vllm_mapper(NemotronHForCausalLM.hf_to_vllm_mapper)
    config.packed_modules_mapping = NemotronHForCausalLM.packed_modules_mapping
    algorithms = {"nvfp4": "NVFP4", "fp8": "FP8"}
    for matrix in listed:
        prefix = served(matrix, config.packed_modules_mapping)
        assert config._resolve_quant_algo(prefix) == algorithms.get(matrix.precision), matrix.module
        if matrix.weight.part != "embedding":
            assert config.is_layer_excluded(prefix) == (matrix.precision not in LOW), matrix.module
