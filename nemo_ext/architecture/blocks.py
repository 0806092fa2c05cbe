"""Residual block of a model: its kind, and the values that override the model's.

The kinds are Megatron-Core's hybrid symbols (`megatron/core/models/hybrid/hybrid_layer_allocation.py`). The
value names are our own; each value sets one field of Megatron's `TransformerConfig` for that block only.
"""

from dataclasses import dataclass
from difflib import get_close_matches

NAMES: dict[str, str] = {
    "M": "Mamba-2",
    "*": "attention",
    "E": "MoE",
    "-": "MLP",
    "G": "gated delta net",
    "D": "DeepSeek sparse attention",
    "+": "MLA",
}
"""Mapping from block kinds to their display names."""

LINEAR = "linear"
"""Flag of a block whose sub-layer is a norm and one hidden x hidden linear map (Puzzle's linear-replaced block)."""
BIAS = "bias"
"""Flag of an MLP with biases in a model without them, from folding a LayerNorm's bias into the first linear layer."""

VALUES: dict[str, dict[str, str]] = {
    "*": {
        "heads": "num_attention_heads",
        "kv": "num_query_groups",
        "head_dim": "kv_channels",
        "window": "window_size",
        LINEAR: LINEAR,
    },
    "-": {"ffn": "ffn_hidden_size", BIAS: "add_bias_linear", LINEAR: LINEAR},
    "M": {
        "heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state": "mamba_state_dim",
        "groups": "mamba_num_groups",
        LINEAR: LINEAR,
    },
    "E": {
        "experts": "num_moe_experts",
        "topk": "moe_router_topk",
        "ffn": "moe_ffn_hidden_size",
        "shared": "moe_shared_expert_intermediate_size",
        "latent": "moe_latent_size",
        LINEAR: LINEAR,
    },
    "G": {},
    "D": {},
    "+": {},
}
"""Value names of each block kind, in the order of writing, each with the `TransformerConfig` field that it sets."""

FLAGS = frozenset({LINEAR, BIAS})
NONE_ALLOWED = frozenset({("*", "window"), ("E", "shared"), ("E", "latent")})
"""Values that may be `none`, stored as 0: a window (full attention), the shared expert's width (no such expert) and the
latent width of routed experts (no latent projections)."""
MAX_VALUE = 2**31 - 1
"""Largest allowed size, as Megatron's kernels cannot index a longer tensor dimension."""


def unknown_value(kind: str, name: str) -> str:
    """Return the error message for a value name that `kind` does not have, with the nearest match."""
    known = VALUES[kind]
    if not known:
        return f"a {NAMES[kind]} block ({kind!r}) takes no values, so {name!r} cannot be set: remove it"
    by_field = {field: value for value, field in known.items()}
    guess = by_field.get(name) or next(iter(get_close_matches(name, known, n=1, cutoff=0.5)), None)
    hint = f"; did you mean {guess!r}?" if guess else ""
    return f"unknown value {name!r} for {kind!r} ({NAMES[kind]}): expected one of {', '.join(known)}{hint}"


@dataclass(frozen=True)
class Block:
    """Residual block of a model.

    Attributes:
        kind: Kind of the block, a key of `NAMES`.
        values: (name, value) pairs that override the model's values, sorted by name. 0 means "none" for the values
            in `NONE_ALLOWED`.

    Raises:
        ValueError: The kind or a value name is unknown, a size is not a positive integer, or `linear` is combined
            with other values.
    """

    kind: str
    values: tuple[tuple[str, int | bool], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in NAMES:
            raise ValueError(f"unknown block kind {self.kind!r}: expected one of {' '.join(NAMES)}")
        kept: dict[str, int | bool] = {}
        for name, value in self.values:
            if name in kept:
                raise ValueError(f"value {name!r} of {self.kind!r} is given twice: remove one")
            kept[name] = self._checked(name, value)
        if kept.get(LINEAR) and len(kept) > 1:
            others = ", ".join(name for name in kept if name != LINEAR)
            raise ValueError(f"a linear-replaced {self.kind!r} block cannot have other values: remove {others}")
        # Sorted so that equal blocks compare and hash equal whatever order they were written in.
        object.__setattr__(self, "values", tuple(sorted(kept.items())))

    def _checked(self, name: str, value: int | bool) -> int | bool:
        if name not in VALUES[self.kind]:
            raise ValueError(unknown_value(self.kind, name))
        if name in FLAGS:
            if value is not True:
                raise ValueError(f"{name!r} of {self.kind!r} is a flag: pass True or omit it, not {value!r}")
            return True
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"value {name!r} of {self.kind!r} must be an integer, got {value!r}")
        if value < 0 or (value == 0 and (self.kind, name) not in NONE_ALLOWED):
            raise ValueError(f"value {name!r} of {self.kind!r} must be a positive integer, got {value}")
        if value > MAX_VALUE:
            raise ValueError(f"value {name!r} of {self.kind!r} must be at most {MAX_VALUE}, got {value}")
        return value

    @classmethod
    def from_values(cls, kind: str, **values: int | bool | None) -> "Block":
        """Create a block from keyword values. None means "none" (`window=None`); flags set to False are ignored."""
        kept: dict[str, int | bool] = {}
        for name, value in values.items():
            if name in FLAGS and value is False:
                continue
            if value is None and (kind, name) not in NONE_ALLOWED:
                raise ValueError(f"value {name!r} of {kind!r} cannot be none: pass an integer or omit it")
            kept[name] = 0 if value is None else value
        return cls(kind, tuple(kept.items()))

    def get(self, name: str, default: int | None = None) -> int | bool | None:
        """Return the block's value, or `default` if the block does not set it."""
        return dict(self.values).get(name, default)

    def size(self, name: str) -> int:
        """Return a value as an integer. The block must set it; a resolved block sets all values of its kind."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"block {self} has no value {name!r}: fill in its values with Architecture.resolved first")
        return int(value)

    @property
    def name(self) -> str:
        """Display name of the block's kind."""
        return NAMES[self.kind]

    @property
    def is_linear(self) -> bool:
        """Whether the sub-layer is replaced by one hidden x hidden linear map."""
        return self.get(LINEAR) is True

    def __str__(self) -> str:
        """Write the block in pattern notation, for example `*{heads=16,kv=4}`."""
        own = dict(self.values)
        words = [self._written(name, own[name]) for name in VALUES[self.kind] if name in own]
        return f"{self.kind}{{{','.join(words)}}}" if words else self.kind

    def _written(self, name: str, value: int | bool) -> str:
        if name in FLAGS:
            return name
        return f"{name}={value or 'none'}"
