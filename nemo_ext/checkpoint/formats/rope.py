"""Rotary embeddings in config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` since transformers 5.

The older keys are written, which transformers 4 and 5 and vLLM all read; both are read.
Key names: transformers, modeling_rope_utils.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_ext.checkpoint.description import Rope, yarn_concentration
from nemo_ext.checkpoint.formats.format import Keys

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3's constants, the only ones that Megatron knows (rotary_pos_embedding.py, _apply_scaling)."""
DEFAULT_BASE = 10000


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and, if only a part of each head is rotated, `partial_rotary_factor`."""
    keys: dict[str, Any] = {"rope_theta": float(rope.base), "rope_scaling": _scaling(rope)}
    if rope.percent != 1.0:
        keys["partial_rotary_factor"] = rope.percent
    return keys


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 keeps it: one mapping with `rope_type` and `rope_theta`."""
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


def read_rope(keys: Keys, *, percent: float = 1.0, default_base: int = DEFAULT_BASE) -> Rope:
    """The rotary embedding of a config.json.

    Args:
        keys: the config.
        percent: `partial_rotary_factor` where none is given.
        default_base: `rope_theta` where none is given.

    Raises:
        ValueError: for a scaling or constants that Megatron does not have.
    """
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = keys.get(name, {})
        if not isinstance(given, Mapping):
            raise ValueError(f"config.json: {name}={given!r}: expected a mapping")
        found = dict(given) or found
    base = found.pop("rope_theta", keys.get("rope_theta", default_base))
    share = found.pop("partial_rotary_factor", keys.get("partial_rotary_factor", percent))
    return read_parameters({"rope_theta": base, "partial_rotary_factor": share, **found}, keys)


def read_parameters(parameters: Mapping[str, Any], keys: Keys) -> Rope:
    """The rotary embedding of one `rope_parameters` mapping."""
    values = {name: value for name, value in parameters.items() if value is not None}
    words = {"rope_type", "type", "truncate"}
    for name, value in values.items():
        if name not in words and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"config.json: RoPE's {name}={value!r}: expected a number")
    base = values.pop("rope_theta", DEFAULT_BASE)
    if base != int(base):
        raise ValueError(f"config.json: rope_theta={base}: Megatron's rotary_base is a whole number")
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    plain = Rope(base=int(base), percent=float(values.pop("partial_rotary_factor", 1.0)))
    if kind == "default":
        return plain
    factor = float(values.pop("factor", 1.0))
    if kind == "linear":
        rope = replace(plain, scaling="linear", factor=factor)
    elif kind == "llama3":
        for name, known in LLAMA3.items():
            if values.pop(name, known) != known:
                raise ValueError(f"config.json: rope_scaling.{name}: Megatron knows {known} only")
        rope = replace(plain, scaling="llama3", factor=factor)
    elif kind == "yarn":
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
            beta_fast=float(values.pop("beta_fast", 32.0)),
            beta_slow=float(values.pop("beta_slow", 1.0)),
            attention_factor=float(attention),
            truncate=bool(values.pop("truncate", True)),
        )
    else:
        raise ValueError(f"config.json: rope_type={kind!r} is not supported: expected default, linear, llama3 or yarn")
    if values:
        raise ValueError(f"config.json: unknown RoPE settings {sorted(values)} for rope_type={kind!r}")
    return rope
