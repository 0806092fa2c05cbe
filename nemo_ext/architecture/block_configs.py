"""Conversion between blocks and Puzzle's `block_configs` (the JSON in Llama-Nemotron's `config.json`).

Each entry is one Transformer layer, `{"attention": {...}, "ffn": {...}}`, which here becomes up to two residual
blocks, attention then MLP. A `no_op` sub-layer is an absent block, so a layer with two no-ops disappears.
The reverse conversion pairs blocks into layers: an attention block and the MLP immediately after it share a
layer, and any other block gets its own layer, with a no-op as the other sub-layer. The two descriptions compute
the same function, but an attention-only layer followed by an FFN-only layer is written as one layer.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from nemo_ext.architecture.blocks import BIAS, Block
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.job.settings import nearest

FFN_MULTIPLE = 256
"""Number to a multiple of which Puzzle rounds FFN widths up."""

_KNOWN = {
    "attention": ("n_heads_in_group", "no_op", "replace_with_linear", "window_length"),
    "ffn": ("ffn_mult", "intermediate_size", "no_op", "replace_with_linear"),
}
_REPEATED = {"gated": True, "hidden_act": "silu"}
"""Keys with the same value in all published configs: every block of the format is gated and uses SiLU."""
# Puzzle searches FFN widths as fractions of the parent's; these recover the published ffn_mult exactly.
_SHARES = sorted({Fraction(k, 20) for k in range(1, 21)} | {Fraction(k, 8) for k in range(1, 9)})


def ffn_width(ffn_mult: float, hidden_size: int) -> int:
    """Compute the FFN width for a multiplier: int(2 * ffn_mult * hidden / 3), rounded up to a multiple of 256."""
    return -(-int(2 * ffn_mult * hidden_size / 3) // FFN_MULTIPLE) * FFN_MULTIPLE


def ffn_multiplier(width: int, hidden_size: int, *, ffn_hidden_size: int | None = None) -> float:
    """Return the multiplier that Puzzle would have written for a width; the inverse of `ffn_width`.

    Many multipliers yield the same width. In order of preference, the result is the nearest simple fraction of the
    parent's multiplier (5 % steps or eighths), a multiple of 0.5, or 1.5 * width / hidden.

    Args:
        width: FFN width.
        hidden_size: Model width.
        ffn_hidden_size: The parent's FFN width, if known.

    Raises:
        ValueError: The width is not a multiple of 256, so no multiplier yields it.
    """
    if width % FFN_MULTIPLE:
        raise ValueError(
            f"FFN width {width} is not a multiple of {FFN_MULTIPLE}, so ffn_mult cannot express it: round the width to "
            "a multiple"
        )
    exact = 1.5 * width / hidden_size
    candidates: list[float] = []
    if ffn_hidden_size is not None and width <= ffn_hidden_size:
        parent = 1.5 * ffn_hidden_size / hidden_size
        # Rounded because 4.875 * 0.1 is 0.48750000000000004 in floating point.
        shares = (round(parent * float(share), 10) for share in _SHARES)
        candidates += sorted(shares, key=lambda mult: abs(mult - exact))
        candidates += [round(2 * exact) / 2, int(2 * exact) / 2]
    return next((mult for mult in candidates if mult > 0 and ffn_width(mult, hidden_size) == width), exact)


def from_block_configs(
    config: Mapping[str, object], *, num_query_groups: int | None = None, ffn_hidden_size: int | None = None
) -> Pattern:
    """Read a pattern from Puzzle's JSON.

    Args:
        config: Mapping with `hidden_size`, `num_attention_heads` and `block_configs`; other keys are ignored.
        num_query_groups: The model's number of KV heads; a block with the same number gets no `kv` value.
        ffn_hidden_size: The model's FFN width; a block of the same width gets no `ffn` value.

    Raises:
        ValueError: An entry is invalid; the message gives its path, such as `block_configs[3].attention.foo`.
    """
    hidden_size = _integer(config, "hidden_size")
    heads = _integer(config, "num_attention_heads")
    layers = config.get("block_configs")
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise ValueError(f"block_configs: expected a list with one entry per layer, not {type(layers).__name__}")
    blocks: list[Block] = []
    for index, layer in enumerate(layers):
        path = f"block_configs[{index}]"
        if not isinstance(layer, Mapping):
            raise ValueError(f"{path}: expected a mapping with attention and ffn, got {layer!r}")
        _refuse_unknown(layer, ("attention", "ffn"), path)
        for kind, name in (("*", "attention"), ("-", "ffn")):
            part, place = _part(layer, name, path), f"{path}.{name}"
            if _flag(part, "no_op", place):
                continue
            if _flag(part, "replace_with_linear", place):
                blocks.append(Block.from_values(kind, linear=True))
            elif kind == "*":
                blocks.append(_attention(part, place, heads=heads, default=num_query_groups))
            else:
                blocks.append(_ffn(part, place, hidden_size=hidden_size, default=ffn_hidden_size))
    return Pattern(tuple(blocks))


def _attention(part: Mapping[str, object], path: str, *, heads: int, default: int | None) -> Block:
    group = part.get("n_heads_in_group")
    if not isinstance(group, int) or isinstance(group, bool) or group < 1 or heads % group:
        raise ValueError(
            f"{path}.n_heads_in_group: expected a divisor of the {heads} attention heads, or no_op or "
            f"replace_with_linear instead, got {group!r}"
        )
    values: dict[str, int] = {}
    if heads // group != default:
        values["kv"] = heads // group
    window = part.get("window_length")
    if window is not None:
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise ValueError(f"{path}.window_length: expected a positive integer or null, got {window!r}")
        values["window"] = window
    return Block.from_values("*", **values)


def _ffn(part: Mapping[str, object], path: str, *, hidden_size: int, default: int | None) -> Block:
    mult, width = part.get("ffn_mult"), part.get("intermediate_size")
    if mult is None and isinstance(width, int) and not isinstance(width, bool) and width > 0:
        return Block.from_values("-") if width == default else Block.from_values("-", ffn=width)
    if isinstance(mult, bool) or not isinstance(mult, int | float) or mult <= 0:
        raise ValueError(
            f"{path}.ffn_mult: expected a positive number, or intermediate_size, no_op or replace_with_linear instead, "
            f"got {mult!r}"
        )
    if width not in (None, ffn_width(mult, hidden_size)):
        raise ValueError(
            f"{path}: ffn_mult={mult} means a width of {ffn_width(mult, hidden_size)}, but "
            f"intermediate_size={width!r}: remove one of the two"
        )
    width = ffn_width(mult, hidden_size)
    return Block.from_values("-") if width == default else Block.from_values("-", ffn=width)


def to_block_configs(
    pattern: Pattern,
    *,
    hidden_size: int,
    num_attention_heads: int,
    num_query_groups: int | None = None,
    ffn_hidden_size: int | None = None,
) -> list[dict[str, dict[str, object]]]:
    """Convert a pattern to Puzzle's JSON, with one entry per layer: an attention block and the MLP right after it.

    Pipeline cuts are omitted, as the format does not have them.

    Args:
        pattern: Pattern of attention and MLP blocks only.
        hidden_size: Model width.
        num_attention_heads: Number of query heads of every attention block.
        num_query_groups: Number of KV heads of blocks without a `kv` value.
        ffn_hidden_size: FFN width of blocks without an `ffn` value.

    Raises:
        ValueError: The format cannot express a block; the message gives its 1-based number.
    """
    layers: list[dict[str, dict[str, object]]] = []
    for number, block in enumerate(pattern.blocks, start=1):
        where = f"block {number} ({block})"
        if block.kind == "*":
            attention = _attention_json(block, where, heads=num_attention_heads, default=num_query_groups)
            layers.append({"attention": attention, "ffn": {"no_op": True}})
        elif block.kind == "-":
            ffn = _ffn_json(block, where, hidden_size=hidden_size, default=ffn_hidden_size)
            if number > 1 and pattern.blocks[number - 2].kind == "*":
                layers[-1]["ffn"] = ffn
            else:
                layers.append({"attention": {"no_op": True}, "ffn": ffn})
        else:
            raise ValueError(f"{where}: block_configs supports only attention ('*') and MLP ('-'), not {block.name}")
    return layers


def _attention_json(block: Block, where: str, *, heads: int, default: int | None) -> dict[str, object]:
    if block.is_linear:
        return {"replace_with_linear": True}
    for name in ("heads", "head_dim"):
        if block.get(name) is not None:
            raise ValueError(
                f"{where}: block_configs cannot express {name!r} for a single block: remove it from the block"
            )
    kv = block.get("kv", default)
    if kv is None:
        raise ValueError(f"{where}: the block has no kv value: set kv in the block, or pass num_query_groups")
    if heads % kv:
        raise ValueError(f"{where}: {heads} attention heads are not divisible by {kv} KV heads: set kv to a divisor")
    written: dict[str, object] = {"n_heads_in_group": heads // kv}
    if block.get("window"):
        written["window_length"] = block.get("window")
    return written


def _ffn_json(block: Block, where: str, *, hidden_size: int, default: int | None) -> dict[str, object]:
    if block.is_linear:
        return {"replace_with_linear": True}
    if block.get(BIAS):
        raise ValueError(f"{where}: block_configs cannot express biases in a single block: remove them")
    width = block.get("ffn", default)
    if width is None:
        raise ValueError(f"{where}: the block has no ffn value: set ffn in the block, or pass ffn_hidden_size")
    if width % FFN_MULTIPLE:  # no multiplier yields it; vLLM and our modelling file read the width
        return {"intermediate_size": width}
    return {"ffn_mult": ffn_multiplier(width, hidden_size, ffn_hidden_size=default)}


def _integer(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key}: expected a positive integer next to block_configs, got {value!r}")
    return value


def _part(layer: Mapping[str, object], name: str, path: str) -> Mapping[str, object]:
    part = layer.get(name)
    if not isinstance(part, Mapping):
        raise ValueError(f"{path}.{name}: expected a mapping, got {part!r}")
    for key, only in _REPEATED.items():
        if part.get(key) not in (None, only):
            raise ValueError(f"{path}.{name}.{key}: expected {only!r}, the only supported value, got {part[key]!r}")
    _refuse_unknown(part, (*_KNOWN[name], *_REPEATED), f"{path}.{name}")
    return part


def _refuse_unknown(entry: Mapping[str, object], known: tuple[str, ...], path: str) -> None:
    """Reject settings that are not in `known` (mamba, moe, parallel_blocks, ...), unless they are null, false or empty.

    Args:
        entry: part of an entry of `block_configs`.
        known: supported keys.
        path: path of the part for the message, such as `block_configs[3].attention`.

    Raises:
        ValueError: a key is not supported.
    """
    for key, value in entry.items():
        if key not in known and value:
            raise ValueError(f"{path}.{key}={value!r}: unknown key; {nearest(str(key), known)}")


def _flag(part: Mapping[str, object], key: str, path: str) -> bool:
    value = part.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{path}.{key}: expected true or false, got {value!r}")
    return bool(value)
