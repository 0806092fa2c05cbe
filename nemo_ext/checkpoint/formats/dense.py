"""Dense model families whose layers consist of attention and an MLP: Nemotron (Domyn-Small), Llama, OLMo 1 and 3."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_ext.architecture.blocks import Block
from nemo_ext.checkpoint.description import Description, Rope
from nemo_ext.checkpoint.formats.format import (
    Format,
    Keys,
    attention_with_mlp,
    common_facts,
    common_value,
    described,
    own_bias,
    refuse,
)
from nemo_ext.checkpoint.formats.rope import present, read_parameters, read_rope, rope_parameters, write_rope

OUTSIDE = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
LAYER = "model.layers.{layer}."
ATTENTION = {name: f"self_attn.{name}_proj" for name in "qkvo"}
QK_NORM = {name: f"self_attn.{name}" for name in ("q_norm", "k_norm")}
MLP = {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")}
NORMS = {"*": "input_layernorm", "-": "post_attention_layernorm"}
OLMO1_EPSILON = 1e-5
"""Norm epsilon that is hard-coded in transformers' OlmoLayerNorm."""
OLMO3_BASE = 500000
"""Default rope_theta of Olmo3Config, to which its loader falls back for windowed layers."""


def dense_facts(description: Description, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the config.json keys shared by all dense families.

    Raises:
        CannotExpress: the blocks do not alternate between attention and MLP blocks of equal sizes, or a feature is not
            supported.
    """
    blocks = description.blocks
    pairs = [block.kind for block in blocks] == ["*", "-"] * (len(blocks) // 2) and len(blocks) > 0
    refuse(
        (not pairs, "blocks that do not alternate attention and MLP"),
        (any(block.is_linear for block in blocks), "a block replaced by a linear map"),
        own_bias(blocks),
        (description.rope is None, "attention without positions"),
        (description.architecture.qkv_bias and not description.architecture.bias, "biases on q, k and v only"),
        (description.hf_layers is not None, "layers without blocks"),
    )
    return common_facts(description, model_type, architecture) | {
        "num_hidden_layers": len(blocks) // 2,
        "num_attention_heads": common_value(blocks, "*", "heads"),
        "num_key_value_heads": common_value(blocks, "*", "kv"),
        "head_dim": common_value(blocks, "*", "head_dim"),
        "intermediate_size": common_value(blocks, "-", "ffn"),
    }


def dense_description(
    keys: Keys, *, blocks: Sequence[Block] | None = None, settings: Mapping[str, Any], **own: Any
) -> Description:
    """Build a description from the keys shared by all dense families.

    Without `blocks`, the model has alternating attention and MLP blocks of equal sizes. `settings` are further fields
    of `Architecture`, and `own` of `Description`.
    """
    if blocks is None:
        layer = [*equal_attention(keys), Block.from_values("-", ffn=keys.integer("intermediate_size"))]
        blocks = layer * keys.integer("num_hidden_layers")
    return described(keys, blocks, settings, **own)


def equal_attention(keys: Keys, *, window: int | None = None) -> list[Block]:
    """Read the sizes that all attention blocks of a model share.

    Args:
        window: sliding window to give the block, in tokens; None for full attention.

    Returns:
        A list with one attention block.
    """
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    return [
        Block.from_values(
            "*",
            heads=heads,
            kv=keys.integer("num_key_value_heads", heads),
            head_dim=keys.integer("head_dim", hidden // heads),
            window=window,
        )
    ]


def biases(description: Description) -> dict[str, bool]:
    """The config.json keys `attention_bias` and `mlp_bias`, for formats that have both."""
    return {"attention_bias": description.architecture.bias, "mlp_bias": description.architecture.bias}


def read_biases(keys: Keys) -> bool:
    """True if linear layers have biases; `attention_bias` and `mlp_bias` must agree, as Megatron has only one flag."""
    attention, mlp = keys.flag("attention_bias"), keys.flag("mlp_bias")
    if attention != mlp:
        raise ValueError(
            f"config.json: attention_bias={attention} with mlp_bias={mlp} is not supported, as Megatron has one flag "
            "for both: this checkpoint cannot be converted; choose another"
        )
    return attention


def _no_windows(description: Description) -> tuple[bool, str]:
    return any(block.kind == "*" and block.get("window") for block in description.blocks), "sliding windows"


def _write_nemotron(description: Description) -> dict[str, Any]:
    architecture = description.architecture
    refuse(
        (description.activation != "relu2" or architecture.gated, "an activation other than squared ReLU"),
        (
            architecture.normalization != "LayerNorm" or not description.zero_centred_norm,
            "norms other than LayerNorm1P",
        ),
        (not architecture.norm_affine or architecture.norm_placement != "input", "norms without weights or on outputs"),
        (architecture.qk_layernorm, "QK norm"),
        _no_windows(description),
    )
    facts = dense_facts(description, "nemotron", "NemotronForCausalLM")
    assert description.rope is not None
    partial = {"partial_rotary_factor": description.rope.percent}  # 0.5 is the default
    return (
        facts
        | write_rope(description.rope)
        | partial
        | biases(description)
        | {"hidden_act": "relu2", "norm_eps": description.norm_epsilon}
    )


def _read_nemotron(keys: Keys) -> Description:
    keys.only("hidden_act", "relu2")
    rope = read_rope(keys, percent=0.5)
    keys.only("rope_percent", rope.percent)  # transformers reads neither this nor the next
    (attention,) = equal_attention(keys)
    keys.only("kv_channels", attention.size("head_dim"))
    return dense_description(
        keys,
        settings={"normalization": "LayerNorm", "bias": read_biases(keys), "family": "domyn_small"},
        activation="relu2",
        zero_centred_norm=True,
        norm_epsilon=keys.number("norm_eps", 1e-5),
        rope=rope,
    )


def rms_settings(description: Description) -> None:
    """Reject a model unless it has SwiGLU and RMSNorm (not zero-centred), which formats with Llama's blocks require.

    Raises:
        CannotExpress: the model differs; names the feature.
    """
    architecture = description.architecture
    refuse(
        (description.activation != "silu" or not architecture.gated, "an FFN other than SwiGLU"),
        (
            architecture.normalization != "RMSNorm" or not architecture.norm_affine,
            "norms other than RMSNorm with weights",
        ),
        (description.zero_centred_norm, "zero-centred norm weights"),
    )


def _write_llama(description: Description) -> dict[str, Any]:
    rms_settings(description)
    refuse(
        (description.architecture.norm_placement != "input", "norms on outputs"),
        (description.architecture.qk_layernorm, "QK norm"),
        _no_windows(description),
    )
    facts = dense_facts(description, "llama", "LlamaForCausalLM")
    assert description.rope is not None
    refuse((description.rope.percent != 1.0, "partial rotary embedding"))
    refuse((facts["hidden_size"] % facts["num_attention_heads"], "a hidden size that the heads do not divide"))
    return (
        facts
        | write_rope(description.rope)
        | biases(description)
        | {"hidden_act": "silu", "rms_norm_eps": description.norm_epsilon}
    )


def read_llama(keys: Keys, *, blocks: Sequence[Block] | None = None, **own: Any) -> Description:
    """Build a description from a config.json with Llama's keys.

    Without `blocks`, the model has alternating attention and MLP blocks of equal sizes. `own` are further fields of
    `Description`.
    """
    keys.only("hidden_act", "silu")
    return dense_description(
        keys,
        blocks=blocks,
        settings={"gated": True, "bias": read_biases(keys), "family": "llama_nemotron"},
        activation="silu",
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        rope=read_rope(keys),
        **own,
    )


def _write_olmo(description: Description) -> dict[str, Any]:
    architecture = description.architecture
    refuse(
        (description.activation != "silu" or not architecture.gated, "an FFN other than SwiGLU"),
        (
            architecture.normalization != "LayerNorm" or architecture.norm_affine,
            "norms other than LayerNorm without weights",
        ),
        (
            architecture.norm_placement != "input" or architecture.qk_layernorm,
            "norms on outputs or on queries and keys",
        ),
        (description.norm_epsilon != OLMO1_EPSILON, f"a norm epsilon other than {OLMO1_EPSILON}"),
        (architecture.bias, "biases"),
        _no_windows(description),
    )
    facts = dense_facts(description, "olmo", "OlmoForCausalLM")
    assert description.rope is not None
    refuse((description.rope.percent != 1.0, "partial rotary embedding"), _wide_heads(facts))
    del facts["head_dim"]
    return facts | write_rope(description.rope) | {"hidden_act": "silu", "attention_bias": False, "clip_qkv": None}


def _wide_heads(facts: Mapping[str, Any]) -> tuple[bool, str]:
    wide = facts["head_dim"] * facts["num_attention_heads"] != facts["hidden_size"]
    return wide, "heads whose total width differs from the hidden size"


def _read_olmo(keys: Keys) -> Description:
    keys.only("hidden_act", "silu")
    keys.only("clip_qkv", None)
    keys.only("attention_bias", False)
    return dense_description(
        keys,
        settings={"gated": True, "normalization": "LayerNorm", "norm_affine": False, "family": "olmo1"},
        activation="silu",
        norm_epsilon=OLMO1_EPSILON,
        rope=read_rope(keys),
    )


def _write_olmo3(description: Description) -> dict[str, Any]:
    architecture, rope = description.architecture, description.rope
    rms_settings(description)
    refuse(
        (architecture.norm_placement != "output", "norms on inputs"),
        (
            not architecture.qk_layernorm or architecture.qk_norm_scope != "width",
            "a model without QK norm over the full width",
        ),
        (architecture.bias, "biases"),
    )
    facts = dense_facts(description, "olmo3", "Olmo3ForCausalLM")
    assert rope is not None
    windows = [block.get("window") for block in description.blocks if block.kind == "*"]
    sizes = {window for window in windows if window}
    refuse(
        (rope.percent != 1.0, "partial rotary embedding"),
        (not rope.truncate, "YaRN's truncate=false, which transformers ignores in OLMo 3"),
        _wide_heads(facts),
        (len(sizes) > 1, "windows of different sizes"),
        (rope.on_windowed and rope.scaling != "none" and sizes, "RoPE scaling in blocks with a window"),
    )
    del facts["head_dim"]
    keys = (
        facts
        | write_rope(rope)
        | {
            "hidden_act": "silu",
            "rms_norm_eps": description.norm_epsilon,
            "attention_bias": False,
            "sliding_window": max(sizes, default=4096),  # transformers requires one even if no layer uses it
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        }
    )
    if rope.base != OLMO3_BASE:
        # transformers 5 loses rope_theta of windowed layers in the older keys (configuration_olmo3.py).
        plain = {"rope_type": "default", "rope_theta": float(rope.base)}
        keys["rope_parameters"] = {"sliding_attention": plain, "full_attention": rope_parameters(rope)}
    return keys


def _read_olmo3(keys: Keys) -> Description:
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    count = keys.integer("num_hidden_layers")
    types = keys.get("layer_types") or [
        "full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(count)
    ]
    if len(types) != count or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"config.json: layer_types: expected {count} entries of sliding_attention or full_attention, not {types!r}"
        )
    window = keys.integer("sliding_window", 4096) if "sliding_attention" in types else None
    mlp = Block.from_values("-", ffn=keys.integer("intermediate_size"))
    attention = {"sliding_attention": equal_attention(keys, window=window), "full_attention": equal_attention(keys)}
    return dense_description(
        keys,
        blocks=[block for kind in types for block in (*attention[kind], mlp)],
        settings={
            "gated": True,
            "norm_placement": "output",
            "qk_layernorm": True,
            "qk_norm_scope": "width",
            "family": "olmo3",
        },
        activation="silu",
        norm_epsilon=keys.number("rms_norm_eps", 1e-5),
        rope=replace(_olmo3_rope(keys, types), on_windowed=False),
    )


def _olmo3_rope(keys: Keys, types: Sequence[str]) -> Rope:
    """Read the RoPE settings of OLMo 3's full-attention blocks or, if there are none, of its windowed blocks.

    Each layer's type is `full_attention` or `sliding_attention`.
    """
    parameters = keys.get("rope_parameters", {})
    if not isinstance(parameters, Mapping) or not {"full_attention", "sliding_attention"} & parameters.keys():
        rope = read_rope(keys, default_base=OLMO3_BASE)  # a single mapping in early versions of transformers 5
    else:
        base = {"rope_theta": keys.get("rope_theta", OLMO3_BASE)}
        scaling = {"full_attention": present(keys.get("rope_scaling", {}))}
        by_type = {
            kind: read_parameters(base | present(parameters.get(kind) or {}) | scaling.get(kind, {}), keys)
            for kind in dict.fromkeys(types)
        }
        windowed, full = by_type.get("sliding_attention"), by_type.get("full_attention")
        if windowed and full and (windowed.scaling != "none" or windowed.base != full.base):
            raise ValueError(
                "config.json: rope_parameters.sliding_attention: expected rope_type=default and the same rope_theta "
                "as full_attention, the only values that Megatron supports"
            )
        rope = full or by_type["sliding_attention"]
    if not rope.truncate:
        raise ValueError(
            "config.json: RoPE's truncate=false is ignored by transformers in OLMo 3, but not by vLLM: remove truncate"
        )
    return rope


dense_format = partial(
    Format, outside=OUTSIDE, layer=LAYER, modules={"*": ATTENTION, "-": MLP}, norms=NORMS, layers=attention_with_mlp
)
"""Constructor of a format with Llama's module names, unless a family overrides them."""
NEMOTRON = dense_format(
    architecture="NemotronForCausalLM", model_type="nemotron", write=_write_nemotron, read=_read_nemotron
)
LLAMA = dense_format(architecture="LlamaForCausalLM", model_type="llama", write=_write_llama, read=read_llama)
OLMO = dense_format(architecture="OlmoForCausalLM", model_type="olmo", write=_write_olmo, read=_read_olmo, norms={})
OLMO3 = dense_format(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    write=_write_olmo3,
    read=_read_olmo3,
    modules={"*": ATTENTION | QK_NORM, "-": MLP},
    norms={"*": "post_attention_layernorm", "-": "post_feedforward_layernorm"},
    known=frozenset(("sliding_window", "rope_theta", "rope_scaling")),  # without windows; next to rope_parameters
)
