"""Architecture of a model: its blocks and every size that its cost depends on, read from a run's config.

The `megatron` section of a config holds Megatron's own command-line flags in snake_case; a missing flag has
Megatron's default (`megatron/training/arguments.py`, `megatron/core/transformer/transformer_config.py`, 0.19).
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

from nemo_ext.architecture.blocks import FLAGS, VALUES, Block
from nemo_ext.architecture.pattern import Pattern, parse

CONV_KERNEL = 4
"""Width of Mamba-2's causal convolution (`d_conv` of Megatron's MambaMixer, for which there is no flag)."""

# TransformerConfig fields whose command line flag has another name.
_FLAG = {"num_moe_experts": "num_experts"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Architecture of a model: its blocks, the sizes that they inherit, and the layers around them.

    Attributes:
        pattern: Blocks and pipeline cuts.
        hidden_size: Width of the residual stream.
        vocab_size: Number of embedding rows, including padding.
        defaults: One block per kind, with the model-wide values.
        name: Display name of the model.
        family: Model family, used for display and by converters, such as `nemotron3` or `olmo3`.
        seq_length: Training sequence length, the default for all costs that depend on it.
        tied_embeddings: Whether the output layer shares the embedding's weight.
        learned_positions: Number of rows of the learned position embedding, 0 if there is none.
        rotary: Share of each head that RoPE rotates, 0 without RoPE.
        rotary_per_block: Whether each attention block has its own table of RoPE's angles, instead of the model's.
        normalization: Kind of norm, `RMSNorm` or `LayerNorm`.
        norm_affine: Whether norms have weights.
        norm_placement: Position of norms, `input` (pre-norm) or `output` (on each sub-layer's output).
        qk_layernorm: Whether queries and keys are normalized.
        qk_norm_scope: Scope of QK norm, `head` (a weight of head_dim, shared by all heads) or `width` (one weight
            over all heads together).
        gated: Whether MLPs and experts have a gate (SwiGLU): three matrices instead of two.
        bias: Whether linears have biases.
        qkv_bias: Whether the query, key and value projection has a bias even where `bias` is False.
        attention_output_gate: Whether attention has an output gate as wide as its queries.
        moe_shared_expert_gate: Whether the shared expert has a gate.
        mtp_repeated: Whether all depths of multi-token prediction share one set of weights.
        window_attn_skip_freq: Megatron's flag that selects the blocks with full attention in a windowed model: every
            N-th block, or those with 0 in a list with one number per block; None for no such block.

    Raises:
        ValueError: The sizes of a block are inconsistent (the message gives its 1-based number), or a name is unknown.
    """

    pattern: Pattern
    hidden_size: int
    vocab_size: int
    defaults: tuple[Block, ...] = ()
    name: str = "model"
    family: str = ""
    seq_length: int | None = None
    tied_embeddings: bool = False
    learned_positions: int = 0
    rotary: float = 0.0
    rotary_per_block: bool = False
    normalization: str = "RMSNorm"
    norm_affine: bool = True
    norm_placement: str = "input"
    qk_layernorm: bool = False
    qk_norm_scope: str = "head"
    gated: bool = False
    bias: bool = False
    qkv_bias: bool = False
    attention_output_gate: bool = False
    moe_shared_expert_gate: bool = False
    mtp_repeated: bool = False
    window_attn_skip_freq: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _one_of("megatron.normalization", self.normalization, ("RMSNorm", "LayerNorm"))
        _one_of("model.norm_placement", self.norm_placement, ("input", "output"))
        _one_of("model.qk_norm_scope", self.qk_norm_scope, ("head", "width"))
        _ = self.sizes  # Raises here rather than in the middle of a cost report if a block is invalid.
        if self.pattern.mtp:
            try:
                _ = self.depth.sizes
            except ValueError as error:
                raise ValueError(f"multi-token prediction: {error}") from None

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "Architecture":
        """Read an architecture from a config's sections `model` (name, family, pattern, ...) and `megatron` (flags).

        Keys that do not affect the cost are ignored; other modules check them.

        Raises:
            ValueError: A key is missing, or Megatron does not accept its value.
        """
        model, flags = section(config, "model"), Flags(section(config, "megatron"))
        pattern = model.get("pattern")
        if isinstance(pattern, str):
            pattern = parse(pattern)
        if not isinstance(pattern, Pattern):
            raise ValueError(f"model.pattern: expected a pattern such as '(*-)x40', got {pattern!r}")
        if flags.text("softmax_type", "vanilla") == "learnable":
            raise ValueError(
                "megatron.softmax_type=learnable: the cost model does not count its parameters yet, so set it to "
                "vanilla"
            )
        if flags.flag("swiglu") and flags.flag("squared_relu"):
            raise ValueError("megatron.swiglu and megatron.squared_relu are both set: choose one activation")
        hidden_size = flags.required("hidden_size", "the width of the residual stream")
        positions = flags.text("position_embedding_type", "learned_absolute")
        return cls(
            pattern=pattern,
            hidden_size=hidden_size,
            vocab_size=padded_vocab_size(flags),
            defaults=_defaults(flags, hidden_size),
            name=str(model.get("name", "model")),
            family=str(model.get("family", "")),
            seq_length=flags.integer("seq_length"),
            tied_embeddings=not flags.flag("untie_embeddings_and_output_weights"),
            learned_positions=_learned_positions(flags),
            rotary=flags.number("rotary_percent", 1.0) if positions in ("rope", "yarn") else 0.0,
            # Blocks that do not use HybridModel's embedding have their own (nemo_ext.megatron.model).
            rotary_per_block=flags.flag("use_rope_scaling") or model.get("yarn_on_windowed") is False,
            normalization=flags.text("normalization", "LayerNorm"),
            norm_affine=_boolean("model.norm_affine", model.get("norm_affine", True)),
            norm_placement=str(model.get("norm_placement") or "input"),
            qk_layernorm=flags.flag("qk_layernorm"),
            qk_norm_scope=str(model.get("qk_norm_scope") or "head"),
            gated=flags.flag("swiglu") or flags.flag("quick_geglu"),
            bias=not flags.flag("disable_bias_linear"),
            qkv_bias=flags.flag("add_qkv_bias"),
            attention_output_gate=flags.flag("attention_output_gate"),
            moe_shared_expert_gate=flags.flag("moe_shared_expert_gate"),
            mtp_repeated=flags.flag("mtp_use_repeated_layer"),
            window_attn_skip_freq=_skip_frequency(flags.values.get("window_attn_skip_freq")),
        )

    def with_pattern(self, pattern: Pattern | str) -> "Architecture":
        """Return a copy of the model with another pattern."""
        return replace(self, pattern=parse(pattern) if isinstance(pattern, str) else pattern)

    @property
    def depth(self) -> "Architecture":
        """Model that consists only of the blocks of one depth of multi-token prediction, numbered from 1."""
        return replace(self, pattern=Pattern(self.pattern.mtp))

    def resolved(self, block: Block, *, layer: int | None = None) -> Block:
        """Return a copy of a block with all values of its kind set, taking missing ones from the model.

        `window` 0 means full attention, `shared` 0 no shared expert, `latent` 0 routed experts of the hidden size. A
        linear-replaced block is returned unchanged.

        Args:
            block: Block to resolve.
            layer: 1-based number of the block, required only if the model has `window_attn_skip_freq`.

        Raises:
            ValueError: A size is missing (the message names its flag), or does not divide another.
        """
        if block.is_linear or not VALUES[block.kind]:
            return block
        inherited = next((default for default in self.defaults if default.kind == block.kind), Block(block.kind))
        values = {**dict(inherited.values), **dict(block.values)}
        if block.kind == "M" and "heads" not in values and "head_dim" in values:
            # Megatron without mamba_num_heads: the inner width is twice the hidden size.
            values["heads"] = _divided(2 * self.hidden_size, values["head_dim"], "2 x hidden_size", "mamba_head_dim")
        if block.kind == "*" and block.get("window") is None and self._skips_window(layer, values):
            values["window"] = 0
        for name, field in VALUES[block.kind].items():
            if name not in values and name not in FLAGS:
                flag = _FLAG.get(field, field)
                raise ValueError(
                    f"megatron.{flag} is missing: set it, or write {block.kind}{{{name}=...}} in model.pattern"
                )
        resolved = Block(block.kind, tuple(values.items()))
        _check(resolved)
        return resolved

    def _skips_window(self, layer: int | None, values: Mapping[str, int | bool]) -> bool:
        frequency = self.window_attn_skip_freq
        if not values.get("window") or frequency is None:
            return False
        if layer is None:
            raise ValueError(
                "megatron.window_attn_skip_freq depends on the block's number: pass layer=NUMBER, counted from 1"
            )
        if isinstance(frequency, int):
            return layer % frequency == 0
        if layer > len(frequency):
            raise ValueError(
                f"megatron.window_attn_skip_freq has {len(frequency)} entries for {len(self.pattern.blocks)} blocks: "
                "give one per block"
            )
        return not frequency[layer - 1]

    @cached_property
    def sizes(self) -> tuple[Block, ...]:
        """All blocks of the pattern, resolved, in order."""
        sizes = []
        for number, block in enumerate(self.pattern.blocks, start=1):
            try:
                sizes.append(self.resolved(block, layer=number))
            except ValueError as error:
                raise ValueError(f"block {number} ({block}): {error}") from None
        return tuple(sizes)

    def sequence_length(self, seq_length: int | None = None) -> int:
        """Return `seq_length`, or the model's own sequence length if it is None.

        Raises:
            ValueError: Neither is known, or the length is not positive.
        """
        length = self.seq_length if seq_length is None else seq_length
        if length is None or length < 1:
            raise ValueError(
                f"expected a positive sequence length, got {length}: pass seq_length, or set megatron.seq_length"
            )
        return length


def _check(block: Block) -> None:
    """Reject sizes that Megatron does not support, with messages in terms of the pattern notation."""
    if block.kind == "*" and block.size("heads") % block.size("kv"):
        raise ValueError(
            f"{block.size('heads')} attention heads are not divisible by {block.size('kv')} KV heads: set kv "
            "(megatron.num_query_groups) to a divisor of heads"
        )
    if block.kind == "M" and block.size("heads") % block.size("groups"):
        raise ValueError(
            f"{block.size('heads')} Mamba heads are not divisible by {block.size('groups')} groups: set groups "
            "(megatron.mamba_num_groups) to a divisor of heads"
        )
    if block.kind == "E" and block.size("topk") > block.size("experts"):
        raise ValueError(
            f"topk={block.size('topk')} is more than the {block.size('experts')} experts: lower topk "
            "(megatron.moe_router_topk)"
        )


@dataclass(frozen=True)
class Flags:
    """Megatron's flags, with values read from a command line or YAML."""

    values: Mapping[str, object]

    def integer(self, key: str) -> int | None:
        """Return a flag's value as a positive integer, or None if the flag is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"megatron.{key}: expected a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a flag's value as a finite number, or `default` if the flag is absent."""
        value = self.values.get(key)
        if value is None:
            return default
        with contextlib.suppress(ValueError):
            if isinstance(value, int | float | str) and not isinstance(value, bool) and isfinite(float(value)):
                return float(value)
        raise ValueError(f"megatron.{key}: expected a number, got {value!r}")

    def required(self, key: str, what: str) -> int:
        """Return a required flag's value as a positive integer; `what` describes it in the error message."""
        value = self.integer(key)
        if value is None:
            raise ValueError(f"megatron.{key} is missing: set it to {what}")
        return value

    def flag(self, key: str) -> bool:
        """Return whether a switch is on; an absent switch is off."""
        return _boolean(f"megatron.{key}", self.values.get(key, False))

    def text(self, key: str, default: str) -> str:
        """Return a flag's value as a string, or `default` if the flag is absent."""
        value = self.values.get(key)
        return default if value is None else str(value)


def section(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a section of a config.

    Raises:
        ValueError: The section is missing or not a mapping.
    """
    value = config.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"config section {name}: expected a mapping, got {value!r}")
    return value


def padded_vocab_size(flags: Flags) -> int:
    """Return the number of embedding rows: `padded_vocab_size`, or `vocab_size` with Megatron's padding.

    Megatron pads to a multiple of make_vocab_size_divisible_by (128 by default) times the tensor parallel size
    (`megatron/training/vocab_utils.py`).
    """
    padded = flags.integer("padded_vocab_size")
    if padded is not None:
        return padded
    vocab_size = flags.required("vocab_size", "the tokenizer's size (or set padded_vocab_size)")
    multiple = (flags.integer("make_vocab_size_divisible_by") or 128) * (
        flags.integer("tensor_model_parallel_size") or 1
    )
    return -(-vocab_size // multiple) * multiple


def _defaults(flags: Flags, hidden_size: int) -> tuple[Block, ...]:
    """Return one block per kind with the model-wide values, using Megatron's defaults for missing flags."""
    ffn = flags.integer("ffn_hidden_size")
    if ffn is None:
        ffn = int((4 * hidden_size * 2 / 3) / 64) * 64 if flags.flag("swiglu") else 4 * hidden_size
    heads = flags.integer("num_attention_heads")
    attention: dict[str, int | None] = {"window": _window(flags.values.get("window_size"))}
    if heads is not None:
        attention["heads"] = heads
        grouped = flags.flag("group_query_attention")
        attention["kv"] = (flags.integer("num_query_groups") or 1) if grouped else heads
        head_dim = flags.integer("kv_channels")
        if head_dim is None and hidden_size % heads == 0:
            head_dim = hidden_size // heads
        if head_dim is not None:
            attention["head_dim"] = head_dim
    mamba = {
        "heads": flags.integer("mamba_num_heads"),
        "head_dim": flags.integer("mamba_head_dim") or 64,
        "state": flags.integer("mamba_state_dim") or 128,
        "groups": flags.integer("mamba_num_groups") or 8,
    }
    experts: dict[str, int | None] = {
        "topk": flags.integer("moe_router_topk") or 2,
        "ffn": flags.integer("moe_ffn_hidden_size") or ffn,
        "shared": flags.integer("moe_shared_expert_intermediate_size"),
        "latent": flags.integer("moe_latent_size"),
    }
    count = flags.integer("num_experts")
    if count is not None:
        experts["experts"] = count
    return (
        Block.from_values("*", **attention),
        Block.from_values("-", ffn=ffn),
        Block.from_values("M", **{name: value for name, value in mamba.items() if value is not None}),
        Block.from_values("E", **experts),
    )


def _learned_positions(flags: Flags) -> int:
    # Megatron's default is a learned embedding with max_position_embeddings rows.
    if flags.text("position_embedding_type", "learned_absolute") != "learned_absolute":
        return 0
    return flags.required(
        "max_position_embeddings",
        "the rows of the learned positions (Megatron's default), or set position_embedding_type: rope, none",
    )


def _window(value: object) -> int | None:
    """Convert Megatron's window_size (left, right) to the number of tokens that a query attends to; None if all."""
    if value is None:
        return None
    numbers: list[str] = []
    if isinstance(value, str):
        numbers = re.sub(r"^\s*[\[(]|[\])]\s*$", "", value).split(",")
    elif isinstance(value, Sequence):
        numbers = [str(number) for number in value]
    try:
        left, right = (int(number) for number in numbers)
    except ValueError:
        raise ValueError(f"megatron.window_size: expected two integers such as [4095,0], got {value!r}") from None
    if left < -1 or right != 0:
        raise ValueError(
            f"megatron.window_size: {value!r} is not causal: expected [tokens before, 0], or [-1, 0] for full attention"
        )
    return None if left == -1 else left + 1


def _skip_frequency(value: object) -> int | tuple[int, ...] | None:
    """Parse Megatron's window_attn_skip_freq, an integer or a list of 0 and 1; reject Python expressions.

    Returns:
        N if every N-th layer has full attention; one number per layer, 1 for a windowed one; or None if not set.
    """
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*\[[\s01,]*\]\s*", value):
        value = [int(number) for number in re.findall(r"[01]", value)]
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and all(number in (0, 1) for number in value):
        return tuple(int(number) for number in value)
    raise ValueError(
        f"megatron.window_attn_skip_freq: expected a positive integer or a list of 0 and 1, got {value!r}; "
        "alternatively, write the windows into model.pattern, such as ((*{window=4096}-)x3*-)x8"
    )


def _divided(value: int, divisor: int, what: str, by: str) -> int:
    if value % divisor:
        raise ValueError(f"{what} = {value} is not divisible by {by} = {divisor}: change one of them")
    return value // divisor


def _boolean(key: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"{key}: expected true or false, got {value!r}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
