"""Published models as the small configurations that the cost model reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.architecture.block_configs import from_block_configs
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import format as format_pattern

BLOCK_CONFIGS = Path(__file__).parents[2] / "hydra_conf" / "model" / "block_configs"

LLAMA = {
    "group_query_attention": True,
    "num_query_groups": 8,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "seq_length": 8192,
}
OLMO = {"swiglu": True, "disable_bias_linear": True, "position_embedding_type": "rope", "seq_length": 2048}
OLMO3 = {
    **OLMO,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 100278,
    "seq_length": 8192,
}
OLMO3_MODEL = {"norm_placement": "output", "qk_norm_scope": "width"}

CONFIGS: dict[str, dict[str, dict[str, Any]]] = {
    "nemotron3_nano": {
        "model": {"pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
        "megatron": {
            "hidden_size": 2688,
            "num_attention_heads": 32,
            "group_query_attention": True,
            "num_query_groups": 2,
            "kv_channels": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "mamba_state_dim": 128,
            "mamba_num_groups": 8,
            "num_experts": 128,
            "moe_router_topk": 6,
            "moe_ffn_hidden_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "moe_router_enable_expert_bias": True,
            "squared_relu": True,
            "normalization": "RMSNorm",
            "disable_bias_linear": True,
            "position_embedding_type": "none",
            "untie_embeddings_and_output_weights": True,
            "vocab_size": 131072,
            "seq_length": 8192,
        },
    },
    "domyn_small": {
        "model": {"pattern": "(*-)x40"},
        "megatron": {
            "hidden_size": 4096,
            "ffn_hidden_size": 16384,
            "num_attention_heads": 48,
            "kv_channels": 128,
            "group_query_attention": True,
            "num_query_groups": 8,
            "squared_relu": True,
            "normalization": "LayerNorm",
            "disable_bias_linear": True,
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": True,
            "vocab_size": 256000,
            "seq_length": 4096,
        },
    },
    "olmo1_1b": {
        "model": {"pattern": "(*-)x16", "norm_affine": False},
        "megatron": {
            **OLMO,
            "hidden_size": 2048,
            "ffn_hidden_size": 8192,
            "num_attention_heads": 16,
            "vocab_size": 50304,
        },
    },
    "olmo1_7b": {
        "model": {"pattern": "(*-)x32", "norm_affine": False},
        "megatron": {
            **OLMO,
            "hidden_size": 4096,
            "ffn_hidden_size": 11008,
            "num_attention_heads": 32,
            "untie_embeddings_and_output_weights": True,
            "vocab_size": 50304,
        },
    },
    "olmo3_7b": {
        "model": {"pattern": "((*{window=4096}-)x3*-)x8", **OLMO3_MODEL},
        "megatron": {**OLMO3, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32},
    },
    "olmo3_32b": {
        "model": {"pattern": "((*{window=4096}-)x3*-)x16", **OLMO3_MODEL},
        "megatron": {
            **OLMO3,
            "hidden_size": 5120,
            "ffn_hidden_size": 27648,
            "num_attention_heads": 40,
            "group_query_attention": True,
            "num_query_groups": 8,
        },
    },
    "tiny_hybrid": {
        "model": {"pattern": "ME*-M*{kv=1}E{experts=4}-{ffn=48}"},
        "megatron": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "group_query_attention": True,
            "num_query_groups": 2,
            "ffn_hidden_size": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "mamba_state_dim": 16,
            "mamba_num_groups": 4,
            "num_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "squared_relu": True,
            "normalization": "RMSNorm",
            "disable_bias_linear": True,
            "position_embedding_type": "none",
            "untie_embeddings_and_output_weights": True,
            "vocab_size": 256,
            "seq_length": 64,
        },
    },
}
PARENTS = {
    "llama_nemotron_super_49b": {"num_attention_heads": 64, "ffn_hidden_size": 28672},
    "llama_nemotron_ultra_253b": {"num_attention_heads": 128, "ffn_hidden_size": 53248},
}


def block_configs(name: str) -> dict[str, Any]:
    """The shipped Puzzle JSON of one Llama-Nemotron model."""
    loaded: dict[str, Any] = json.loads((BLOCK_CONFIGS / f"{name}.json").read_text())
    return loaded


def config(name: str) -> dict[str, dict[str, Any]]:
    """A configuration by name; the Llama-Nemotron patterns come from their block_configs."""
    if name in CONFIGS:
        return {part: dict(values) for part, values in CONFIGS[name].items()}
    puzzle, parent = block_configs(name), PARENTS[name]
    pattern = from_block_configs(puzzle, num_query_groups=8, ffn_hidden_size=parent["ffn_hidden_size"])
    sizes = {"hidden_size": puzzle["hidden_size"], "vocab_size": puzzle["vocab_size"]}
    return {"model": {"pattern": format_pattern(pattern)}, "megatron": {**LLAMA, **parent, **sizes}}


@pytest.fixture
def config_of() -> Callable[[str], dict[str, dict[str, Any]]]:
    """Configurations by name."""
    return config


@pytest.fixture
def puzzle_json() -> Callable[[str], dict[str, Any]]:
    """Shipped Puzzle JSON by name."""
    return block_configs


@pytest.fixture
def architecture_of() -> Callable[..., Architecture]:
    """Architectures by name; keywords replace or add Megatron flags, `model` entries of the model section."""

    def build(name: str, *, model: dict[str, Any] | None = None, **flags: Any) -> Architecture:
        made = config(name)
        return Architecture.from_config(
            {"model": {**made["model"], **(model or {})}, "megatron": {**made["megatron"], **flags}}
        )

    return build
