"""What vLLM answers with our model classes, and with its own for what we export, is what transformers answers."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (tests/vllm/requirements.txt)"),
]

LLAMA = [
    "model=llama_nemotron_tiny",
    "megatron.kv_channels=32",
    "megatron.num_attention_heads=4",
    "megatron.num_query_groups=2",
]
HYBRID = ["model=nemotron3_nano_tiny"]
OLMO = ["model=olmo3_tiny", "megatron.position_embedding_type=yarn", "megatron.rotary_scaling_factor=4"]
OLMO += ["megatron.yarn_original_max_position_embeddings=32", "+model.yarn_on_windowed=false"]

OURS = "nemo_ext.vllm.model"
CASES = {
    # name: words of the config, the class that the export is in, the module of vLLM's model
    "puzzle": (
        [
            *LLAMA,
            "model.pattern='-{ffn=96} *{kv=4} - *{linear} - *{kv=1,window=24} -{linear} *{heads=8,kv=2} -{ffn=300}'",
        ],
        "NemoExtBlocksForCausalLM",
        OURS,
    ),
    "fused": (
        [*LLAMA, "model.pattern='*- *- -{ffn=1536} *{kv=1}-'"],
        "DeciLMForCausalLM",
        "vllm.model_executor.models.nemotron_nas",
    ),
    "deci_no_op_first": ([*LLAMA, "model.pattern='- *{kv=1}-{ffn=256} *- *{linear}-'"], "DeciLMForCausalLM", OURS),
    "deci_windows": ([*LLAMA, "model.pattern='*{window=16}- *{kv=1}-{linear} *-'"], "DeciLMForCausalLM", OURS),
    "hybrid": (
        [*HYBRID, "model.pattern='M-M*{kv=2} -{ffn=96} M -{ffn=100} M{linear} *{kv=6} -{ffn=40}'"],
        "NemoExtBlocksForCausalLM",
        OURS,
    ),
    "olmo": (
        [
            *OLMO,
            "model.pattern='*{window=24}- *- -{ffn=96} *{window=40} -'",
            "megatron.untie_embeddings_and_output_weights=false",
        ],
        "NemoExtBlocksForCausalLM",
        OURS,
    ),
    "experts": (
        [*HYBRID, "model.pattern='ME{experts=4,topk=1} *{kv=2} E{ffn=96,topk=1,shared=none} -'"],
        "NemoExtBlocksForCausalLM",
        OURS,
    ),
    "experts_of_several": (
        [*HYBRID, "model.pattern='M E{experts=6,topk=3} M{heads=4} * E{shared=64}'"],
        "NemoExtBlocksForCausalLM",
        OURS,
    ),
    "latent_experts": (
        [
            *HYBRID,
            "++megatron.moe_latent_size=64",
            "model.pattern='M E{topk=1} * E{latent=32,topk=1,ffn=96} E{latent=none,topk=1}'",
        ],
        "NemoExtBlocksForCausalLM",
        OURS,
    ),
    "nemotron_h_experts": (
        [*HYBRID, "model.pattern='MEM*E'"],
        "NemotronHForCausalLM",
        "vllm.model_executor.models.nemotron_h",
    ),
    "nemotron_h": ([*HYBRID, "model.pattern='M-M*-'"], "NemotronHForCausalLM", "vllm.model_executor.models.nemotron_h"),
    "nemotron": (["model=domyn_small_tiny"], "NemotronForCausalLM", "vllm.model_executor.models.nemotron"),
    "olmo3": (["model=olmo3_tiny"], "Olmo3ForCausalLM", "vllm.model_executor.models.transformers"),
}


def same(found: dict[str, Any], reference: Any) -> None:
    """The same tokens, and log-probabilities within 1e-4."""
    assert found["tokens"] == reference.tokens
    for kind in ("prompt", "new"):
        for ours, theirs in zip(found[kind], getattr(reference, kind), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_log_probabilities_are_those_of_transformers(
    case: str, reference: Callable[..., Any], in_vllm: Callable[..., Any]
) -> None:
    words, architecture, module = CASES[case]
    made = reference(words, architecture)

    found = in_vllm(made)

    assert found["model"].startswith(module)
    same(found, made)
