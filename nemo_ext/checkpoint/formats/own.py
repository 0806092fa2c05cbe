"""Format of nemo_ext's own model class, for block sequences that no published format can express."""

from dataclasses import replace
from typing import Any

from nemo_ext.architecture.blocks import BIAS, Block
from nemo_ext.checkpoint.description import Description, Rope, Router
from nemo_ext.checkpoint.formats.decilm import DECILM
from nemo_ext.checkpoint.formats.dense import OUTSIDE, biases, read_biases
from nemo_ext.checkpoint.formats.format import (
    CannotExpress,
    Format,
    Keys,
    check_layers,
    common_facts,
    described,
    one_layer_a_block,
    refuse,
)
from nemo_ext.checkpoint.formats.hybrid import ATTENTION, MAMBA, MLP, MOE, check_normalised, router_is_sigmoid
from nemo_ext.checkpoint.formats.hybrid_puzzle import NEMOTRON_H_PUZZLE
from nemo_ext.checkpoint.formats.rope import read_parameters, rope_parameters

KINDS = {"*": "attention", "-": "mlp", "M": "mamba", "E": "moe"}
SIZES = {
    "*": {
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv",
        "head_dim": "head_dim",
        "sliding_window": "window",
    },
    "-": {"intermediate_size": "ffn"},
    "M": {"num_heads": "heads", "head_dim": "head_dim", "state_size": "state", "n_groups": "groups"},
    "E": {
        "n_routed_experts": "experts",
        "num_experts_per_tok": "topk",
        "intermediate_size": "ffn",
        "shared_intermediate_size": "shared",
        "latent_size": "latent",
    },
}
"""Mapping from block kind to the block's config.json keys, each with our name for the value."""
NORM_TYPES = {"rms_norm": ("RMSNorm", False), "layer_norm": ("LayerNorm", False), "layer_norm_1p": ("LayerNorm", True)}


def _write(description: Description) -> dict[str, Any]:
    architecture = description.architecture
    norm = (architecture.normalization, description.zero_centred_norm)
    names = {value: key for key, value in NORM_TYPES.items()}
    top_k = {block.size("topk") for block in description.blocks if block.kind == "E" and not block.is_linear}
    refuse(
        (norm not in names, "RMSNorm with zero-centred weights"),
        (_other_head_norm(description), "QK norm per head other than RMSNorm with weights"),
        (architecture.qkv_bias and not architecture.bias, "biases on q, k and v only"),
        (top_k and (architecture.gated or architecture.bias), "experts with gates or biases"),
        (1 in top_k and len(top_k) > 1, "MoE blocks with top-1 routing next to blocks with top-k"),
    )
    router_is_sigmoid(description)
    rope = description.rope
    return (
        common_facts(description, "nemo_ext_blocks", "NemoExtBlocksForCausalLM")
        | biases(description)
        | {
            "auto_map": {
                "AutoConfig": "configuration_nemo_ext_blocks.NemoExtBlocksConfig",
                "AutoModelForCausalLM": "modeling_nemo_ext_blocks.NemoExtBlocksForCausalLM",
            },
            "num_hidden_layers": len(description.blocks),
            "blocks": [_block(block) for block in description.blocks],
            "hidden_act": description.activation,
            "gated_mlp": architecture.gated,
            "norm_type": names[norm],
            "norm_eps": description.norm_epsilon,
            "norm_affine": architecture.norm_affine,
            "norm_placement": architecture.norm_placement,
            "qk_norm": architecture.qk_norm_scope if architecture.qk_layernorm else None,
            "rope_parameters": None if rope is None else rope_parameters(rope),
            "rope_scaling_on_windowed": rope is None or rope.on_windowed,
            "routed_scaling_factor": description.router.scaling if description.router else 1.0,
            "norm_topk_prob": 1 not in top_k,
        }
    )


def _other_head_norm(description: Description) -> bool:
    """True if the model has a per-head QK norm other than RMSNorm with weights, the only kind this format supports."""
    model = description.architecture
    plain = model.normalization == "RMSNorm" and model.norm_affine and not description.zero_centred_norm
    return model.qk_layernorm and model.qk_norm_scope == "head" and not plain


def _block(block: Block) -> dict[str, Any]:
    if block.is_linear:
        return {"kind": KINDS[block.kind], "linear": True}
    bias = {"bias": True} if block.get(BIAS) else {}
    sizes = {key: block.size(name) or None for key, name in SIZES[block.kind].items()}
    return {"kind": KINDS[block.kind], **sizes, **bias}


def _read(keys: Keys) -> Description:
    blocks = [_read_block(number, block) for number, block in enumerate(keys.get("blocks", []), start=1)]
    check_layers(keys, len(blocks), "blocks")
    keys.only("norm_type", *NORM_TYPES)
    normalization, zero_centred = NORM_TYPES[keys.get("norm_type", "rms_norm")]
    moe = any(block.kind == "E" and not block.is_linear for block in blocks)
    keys.only("hidden_act", "silu", "relu2", "gelu")
    check_normalised(keys, {block.size("topk") for block in blocks if block.kind == "E" and not block.is_linear})
    qk_norm = keys.get("qk_norm")
    settings = {
        "normalization": normalization,
        "norm_affine": keys.flag("norm_affine", True),
        "norm_placement": str(keys.get("norm_placement", "input")),
        "qk_layernorm": qk_norm is not None,
        "qk_norm_scope": str(qk_norm or "head"),
        "gated": keys.flag("gated_mlp"),
        "bias": read_biases(keys),
        "family": "nemo_ext_blocks",
    }
    router = Router(score="sigmoid", scaling=keys.number("routed_scaling_factor", 1.0), expert_bias=True)
    return described(
        keys,
        blocks,
        settings,
        activation=str(keys.get("hidden_act", "silu")),
        norm_epsilon=keys.number("norm_eps", 1e-5),
        zero_centred_norm=zero_centred,
        rope=_rope(keys),
        router=router if moe else None,
    )


def _read_block(number: int, values: dict[str, Any]) -> Block:
    kinds = {name: kind for kind, name in KINDS.items()}
    kind = kinds.get(str(values.get("kind")))
    if kind is None:
        raise ValueError(
            f"config.json: block {number} has kind={values.get('kind')!r}: expected one of {', '.join(kinds)}"
        )
    unknown = sorted(values.keys() - {"kind", "linear", BIAS, *SIZES[kind]})
    if unknown:
        raise ValueError(f"config.json: block {number} ({KINDS[kind]}): remove the unknown keys {', '.join(unknown)}")
    if values.get("linear"):
        return Block.from_values(kind, linear=True)
    flags = {BIAS: True} if values.get("bias") else {}
    return Block.from_values(kind, **{name: values.get(key) for key, name in SIZES[kind].items()}, **flags)


def _rope(keys: Keys) -> Rope | None:
    parameters = keys.get("rope_parameters")
    if parameters is None:
        return None
    return replace(read_parameters(parameters, keys), on_windowed=keys.flag("rope_scaling_on_windowed", True))


def _remarks(description: Description) -> list[str]:
    published = NEMOTRON_H_PUZZLE if {block.kind for block in description.blocks} & {"M", "E"} else DECILM
    try:
        published.config_json(description)
        why = "as requested"
    except CannotExpress as reason:
        why = f"as {published.architecture}, which vLLM serves without nemo_ext, does not support {reason}"
    return [
        f"written in NemoExtBlocksForCausalLM, nemo_ext's own class, {why}: transformers requires "
        "trust_remote_code=True for it, and vLLM requires nemo_ext to be installed"
    ]


BLOCKS = Format(
    architecture="NemoExtBlocksForCausalLM",
    model_type="nemo_ext_blocks",
    write=_write,
    read=_read,
    outside=OUTSIDE,
    layer="model.layers.{layer}.",
    modules={
        "*": ATTENTION | {"q_norm": "mixer.q_norm", "k_norm": "mixer.k_norm"},
        "-": MLP,
        "M": MAMBA,
        "E": MOE | {"experts": "mixer.experts"},
    },
    norms=dict.fromkeys("*-ME", "norm"),
    linear=dict.fromkeys("*-ME", "mixer"),
    layers=one_layer_a_block,
    known=frozenset(("routed_scaling_factor", "norm_topk_prob", "rope_scaling_on_windowed")),
    stacked_experts=True,
    code=("configuration_nemo_ext_blocks.py", "modeling_nemo_ext_blocks.py"),
    remarks=_remarks,
)
