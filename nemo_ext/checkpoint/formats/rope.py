"""Rotary embedding settings in config.json: `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`.

Both forms are read. The older one is written, as transformers 4 and 5 and vLLM all support it.
Key names: transformers, modeling_rope_utils.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_ext.checkpoint.description import Rope, yarn_concentration
from nemo_ext.checkpoint.formats.format import Keys

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's constants; Megatron supports no others (rotary_pos_embedding.py, _apply_scaling)."""
DEFAULT_BASE = 10000
_KINDS = {"rope_type": (str, "a name"), "type": (str, "a name"), "truncate": (bool, "true or false")}


def write_rope(rope: Rope) -> dict[str, Any]:
    """The keys `rope_theta`, `rope_scaling` and, if only part of each head is rotated, `partial_rotary_factor`."""
    keys: dict[str, Any] = {"rope_theta": float(rope.base), "rope_scaling": _scaling(rope)}
    if rope.percent != 1.0:
        keys["partial_rotary_factor"] = rope.percent
    return keys


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """The mapping `rope_parameters` of transformers 5, which includes `rope_type` and `rope_theta`."""
    parameters = {"rope_theta": float(rope.base), "rope_type": "default", **(_scaling(rope) or {})}
    return parameters | ({"partial_rotary_factor": rope.percent} if rope.percent != 1.0 else {})


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= LLAMA3
    if rope.scaling == "yarn":
        scaling |= {
            "original_max_position_embeddings": rope.original_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
        }
        if not rope.truncate:
            scaling["truncate"] = False
    return scaling


def read_rope(keys: Keys, *, percent: float | None = None, default_base: int = DEFAULT_BASE) -> Rope:
    """Read the rotary embedding from a config.json with transformers 5's precedence (RotaryEmbeddingConfigMixin).

    `rope_scaling` replaces `rope_parameters`, unless it is empty. Its `rope_theta` and `partial_rotary_factor` take
    precedence over those at the top level of config.json, but its `original_max_position_embeddings` does not.

    Args:
        percent: default of `partial_rotary_factor`; None for a class that always rotates whole heads.
        default_base: default of `rope_theta`.

    Raises:
        ValueError: the scaling or a constant is missing or not supported by Megatron.
    """
    both = {name: keys.get(name, {}) for name in ("rope_parameters", "rope_scaling")}
    for name, value in both.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"config.json: {name}={value!r}: expected a mapping")
    parameters = present(both["rope_scaling"] or both["rope_parameters"])
    outer = {"rope_theta": keys.get("rope_theta", default_base)}
    outer["partial_rotary_factor"] = keys.get("partial_rotary_factor", 1.0 if percent is None else percent)
    original = keys.get("original_max_position_embeddings")
    rope = read_parameters(
        outer | parameters | ({} if original is None else {"original_max_position_embeddings": original}), keys
    )
    if percent is not None or rope.percent == 1.0:
        return rope
    if rope.scaling == "none":
        return replace(rope, percent=1.0)  # transformers ignores the key in these classes
    raise ValueError(
        f"config.json: partial_rotary_factor={rope.percent} with rope_type={rope.scaling!r} is not supported: remove "
        "partial_rotary_factor, as this class rotates whole heads and transformers fails on the key"
    )


def present(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE settings without nulls, which count as absent, except that `truncate: null` means false.

    `finetuned` (Yarn-Llama-2) is dropped, as it does not affect the embedding.
    """
    values = {name: value for name, value in parameters.items() if value is not None and name != "finetuned"}
    return values | ({"truncate": False} if parameters.get("truncate", True) is None else {})


def read_parameters(parameters: Mapping[str, Any], keys: Keys) -> Rope:
    """Read a `rope_parameters` mapping with transformers' defaults (modeling_rope_utils.py).

    Args:
        parameters: content of `rope_parameters`.
        keys: the config.json, used only for the default of YaRN's original context length.

    Raises:
        ValueError: the scaling or a constant is missing or not supported by Megatron.
    """
    values = present(parameters)
    for name, value in values.items():
        kind, expected = _KINDS.get(name, ((int, float), "a number"))
        if not isinstance(value, kind) or (name != "truncate" and isinstance(value, bool)):
            raise ValueError(f"config.json: RoPE's {name}={value!r}: expected {expected}")
    base = values.pop("rope_theta", DEFAULT_BASE)
    if base != int(base):
        raise ValueError(
            f"config.json: rope_theta={base} is not a whole number, which Megatron's rotary_base requires: this "
            "checkpoint cannot be converted; choose another"
        )
    older = values.pop("type", "default")
    rope_type = values.pop("rope_type", older)
    plain = Rope(base=int(base), percent=float(values.pop("partial_rotary_factor", 1.0)))
    if rope_type == "default":
        return plain

    def required(name: str) -> float:
        if name not in values:
            raise ValueError(
                f"config.json: rope_type={rope_type!r} without {name}: add the value that the model was trained with"
            )
        return float(values.pop(name))

    if rope_type == "linear":
        rope = replace(plain, scaling="linear", factor=required("factor"))
    elif rope_type == "llama3":
        for name, known in LLAMA3.items():
            if (value := required(name)) != known:
                raise ValueError(
                    f"config.json: rope_scaling.{name}={value:g} differs from {known:g}, the only value that Megatron "
                    "supports: this checkpoint cannot be converted; choose another"
                )
        rope = replace(plain, scaling="llama3", factor=required("factor"))
    elif rope_type == "yarn":
        factor = required("factor")
        scale, scale_all = values.pop("mscale", None), values.pop("mscale_all_dim", None)
        attention = values.pop("attention_factor", None)
        if attention is None:
            attention = yarn_concentration(factor)
            if scale and scale_all:
                attention = yarn_concentration(factor, scale) / yarn_concentration(factor, scale_all)
        rope = replace(
            plain,
            scaling="yarn",
            factor=factor,
            original_positions=int(
                values.pop("original_max_position_embeddings", keys.get("max_position_embeddings", 0))
            ),
            beta_fast=float(values.pop("beta_fast", 0) or 32.0),
            beta_slow=float(values.pop("beta_slow", 0) or 1.0),
            attention_factor=float(attention),
            truncate=values.pop("truncate", True),
        )
    else:
        raise ValueError(
            f"config.json: rope_type={rope_type!r} is not supported: expected default, linear, llama3 or yarn"
        )
    if values:
        raise ValueError(
            f"config.json: unknown RoPE settings for rope_type={rope_type!r}: {', '.join(sorted(values))}; remove them "
            "only if they have no effect"
        )
    return rope
