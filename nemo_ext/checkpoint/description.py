"""Description of a checkpoint's model: its blocks, and every setting that affects its outputs.

Our configs and all Hugging Face formats are read into this form. Two descriptions are equal if and only if the same
weights compute the same function under both, so checkpoints and model configs are compared by their descriptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from math import log
from typing import Any

from nemo_ext.architecture.blocks import FLAGS, VALUES, Block
from nemo_ext.architecture.model import Architecture, Flags, section
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.pattern import compile as compile_pattern
from nemo_ext.architecture.pattern import format as format_pattern

UNSUPPORTED = (
    *("activation_func_clamp_value", "apply_residual_connection_post_layernorm", "attention_output_gate"),
    *("experimental_attention_variant", "glu_linear_offset", "moe_apply_probs_on_input", "moe_expert_capacity_factor"),
    *("moe_router_group_topk", "moe_router_num_groups", "moe_router_pre_softmax"),
    *("moe_shared_expert_gate", "mtp_num_layers", "multi_latent_attention", "no_rope_freq", "openai_gelu"),
    *("qk_l2_norm", "quick_geglu", "rotary_interleaved", "use_mup"),
)
"""Megatron flags that change the model's outputs and that no supported format can express."""


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Settings of the rotary position embedding.

    Attributes:
        base: base of the rotation frequencies (theta).
        percent: share of each head that is rotated.
        scaling: kind of scaling: `none`, `linear`, `llama3` (low 1, high 4, 8192 original positions, the only values
            that Megatron supports) or `yarn`.
        factor: scaling factor.
        original_positions: for YaRN, the context length before extension.
        beta_fast: for YaRN, rotations above which frequencies are unchanged.
        beta_slow: for YaRN, rotations below which frequencies are interpolated.
        attention_factor: for YaRN, factor by which cosines and sines are multiplied.
        truncate: for YaRN, whether the range of interpolated frequencies is rounded to whole dimensions.
        on_windowed: whether scaling also applies to blocks with a sliding window.
    """

    base: int
    percent: float = 1.0
    scaling: str = "none"
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    on_windowed: bool = True


@dataclass(frozen=True, kw_only=True)
class Router:
    """Expert routing of MoE blocks.

    Attributes:
        score: score function, `sigmoid` or `softmax`.
        scaling: factor by which the weights of the chosen experts are multiplied.
        expert_bias: whether the checkpoint has a bias that affects only the selection of experts.
    """

    score: str
    scaling: float
    expert_bias: bool


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a checkpoint's model.

    Attributes:
        architecture: blocks without pipeline cuts, and model-level sizes; its `vocab_size` includes Megatron's padding.
        vocab_size: number of embedding rows that belong to tokens, without Megatron's padding.
        activation: activation function, `silu`, `relu2` or `gelu` (exact).
        norm_epsilon: epsilon that every norm adds to the variance.
        zero_centred_norm: whether norm weights are stored minus one.
        rope: rotary embedding; None for a model without position embeddings.
        router: expert routing; None for a model without MoE blocks.
        max_positions: maximum sequence length the model is meant for; `differences` ignores it.
        hf_layers: for each block, the Hugging Face layer it belongs to, if this differs from the format's default
            numbering (a Puzzle child whose published layers have gaps); None otherwise.
        hf_layer_count: number of Hugging Face layers; None if `hf_layers` is None.
    """

    architecture: Architecture
    vocab_size: int
    activation: str
    norm_epsilon: float = 1e-5
    zero_centred_norm: bool = False
    rope: Rope | None = None
    router: Router | None = None
    max_positions: int | None = None
    hf_layers: tuple[int, ...] | None = None
    hf_layer_count: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.vocab_size <= self.architecture.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.vocab_size}: expected 1 to "
                f"megatron.padded_vocab_size={self.architecture.vocab_size}"
            )
        if self.rope is not None and not self.rope.on_windowed:
            # Equal models have equal descriptions, so a setting that makes no difference gets a fixed value.
            windows = [bool(block.get("window")) for block in self.blocks if block.kind == "*" and not block.is_linear]
            rope = Rope(base=self.rope.base, percent=self.rope.percent) if all(windows) else self.rope
            object.__setattr__(self, "rope", replace(rope, on_windowed=rope.scaling == "none" or not any(windows)))
        if self.hf_layers is not None:
            _check_layers(self.hf_layers, self.hf_layer_count, self.blocks)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, with inherited values filled in."""
        return self.architecture.sizes

    @property
    def prediction(self) -> tuple[Block, ...]:
        """Blocks of multi-token prediction, depth after depth, with inherited values filled in."""
        pattern = self.architecture.pattern
        return self.architecture.depth.sizes * pattern.depths if pattern.mtp else ()

    def without_prediction(self) -> "Description":
        """Return the same model without multi-token prediction."""
        architecture = replace(self.architecture, pattern=Pattern(self.architecture.pattern.blocks))
        return replace(self, architecture=architecture, router=self.router if "E" in self.kinds else None)

    @property
    def kinds(self) -> set[str]:
        """Kinds of blocks in the model, without blocks that are replaced by a linear map."""
        return {block.kind for block in self.blocks if not block.is_linear}


def _check_layers(layers: tuple[int, ...], count: int | None, blocks: tuple[Block, ...]) -> None:
    """Reject Hugging Face layer numbers (0-based, one per block) that do not suit the blocks or the layer count."""
    if len(layers) != len(blocks):
        raise ValueError(
            f"model.hf_layers has {len(layers)} numbers for {len(blocks)} blocks: give one number per block"
        )
    if count is None:
        raise ValueError("model.hf_layers requires model.hf_layer_count: set it to the number of layers")
    before = (-1, "-")
    for number, (layer, block) in enumerate(zip(layers, blocks, strict=True), start=1):
        shares = layer == before[0] and (before[1], block.kind) == ("*", "-")
        if not (before[0] < layer or shares) or layer >= count:
            raise ValueError(
                f"model.hf_layers: block {number} ({block}) cannot be in layer {layer} of {count}: numbers must "
                "increase from 0, and only attention and the MLP after it may share one; remove hf_layers to renumber"
            )
        before = (layer, block.kind)


def from_config(config: Mapping[str, Any]) -> Description:
    """Read a model's description from a composed config.

    Raises:
        ValueError: no checkpoint format can express a setting, or a size is missing.
    """
    model: Mapping[str, Any] = section(config, "model")
    flags = Flags(section(config, "megatron"))
    for name in UNSUPPORTED:
        if flags.values.get(name):
            raise ValueError(
                f"megatron.{name}={flags.values[name]!r} is not supported by any Hugging Face format: unset it"
            )
    if flags.text("softmax_type", "vanilla") != "vanilla":
        raise ValueError(
            f"megatron.softmax_type={flags.values['softmax_type']!r} is not supported by any Hugging Face format: set "
            "it to vanilla"
        )
    architecture = Architecture.from_config(config)
    if architecture.learned_positions:
        raise ValueError(
            "megatron.position_embedding_type=learned_absolute (the default) is not supported by any Hugging Face "
            "format: set it to rope, yarn or none"
        )
    pattern = replace(architecture.pattern, cuts=())
    if architecture.mtp_repeated and pattern.mtp:  # a checkpoint has one set of weights for all depths
        pattern = replace(pattern, depths=1)
    architecture = replace(architecture, pattern=pattern, mtp_repeated=False)
    blocks = (*architecture.sizes, *(architecture.depth.sizes if pattern.mtp else ()))
    moe = any(block.kind == "E" and not block.is_linear for block in blocks)
    layers = model.get("hf_layers")
    return Description(
        architecture=architecture,
        vocab_size=int(model.get("vocab_size") or architecture.vocab_size),
        activation="silu" if flags.flag("swiglu") else "relu2" if flags.flag("squared_relu") else "gelu",
        norm_epsilon=flags.number("norm_epsilon", 1e-5),
        zero_centred_norm=flags.flag("apply_layernorm_1p"),
        rope=_rope(model, flags),
        router=_router(flags) if moe else None,
        max_positions=flags.integer("max_position_embeddings") or flags.integer("seq_length"),
        hf_layers=None if layers is None else tuple(int(layer) for layer in layers),
        hf_layer_count=model.get("hf_layer_count"),
    )


def _rope(model: Mapping[str, Any], flags: Flags) -> Rope | None:
    kind = flags.text("position_embedding_type", "learned_absolute")
    if kind == "none":
        return None
    if kind not in ("rope", "yarn"):
        raise ValueError(f"megatron.position_embedding_type={kind!r}: expected rope, yarn or none")
    base = flags.integer("rotary_base") or 10000
    plain = Rope(base=base, percent=flags.number("rotary_percent", 1.0))
    if kind == "yarn":
        factor = flags.number("rotary_scaling_factor", 1.0)
        return replace(
            plain,
            scaling="yarn",
            factor=factor,
            original_positions=flags.integer("yarn_original_max_position_embeddings") or 4096,
            beta_fast=flags.number("yarn_beta_fast", 32.0),
            beta_slow=flags.number("yarn_beta_slow", 1.0),
            attention_factor=yarn_concentration(factor, flags.number("mscale", 1.0))
            / yarn_concentration(factor, flags.number("mscale_all_dim", 0.0)),
            truncate=not flags.flag("no_yarn_correction_range_round_to_int"),
            on_windowed=model.get("yarn_on_windowed", True),
        )
    if flags.flag("use_rope_scaling"):
        return replace(plain, scaling="llama3", factor=flags.number("rope_scaling_factor", 8.0))
    if flags.values.get("rotary_seq_len_interpolation_factor"):
        return replace(plain, scaling="linear", factor=flags.number("rotary_seq_len_interpolation_factor", 1.0))
    return plain


def yarn_concentration(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor for cosines and sines, 0.1 x scale x ln(factor) + 1 (arXiv:2309.00071 eq. 22); 1 if factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


def _router(flags: Flags) -> Router:
    return Router(
        score=flags.text("moe_router_score_function", "softmax"),
        scaling=flags.number("moe_router_topk_scaling_factor", 1.0),
        expert_bias=flags.flag("moe_router_enable_expert_bias"),
    )


def to_config(description: Description) -> dict[str, dict[str, Any]]:
    """Write a description as the config sections `model` and `megatron`, which make up a model file."""
    architecture = description.architecture
    pattern, inherited = _compact(description)
    model: dict[str, Any] = {
        "name": architecture.name,
        "family": architecture.family,
        "pattern": format_pattern(pattern),
        "backend": "auto",
    }
    megatron: dict[str, Any] = {
        "hidden_size": architecture.hidden_size,
        "disable_bias_linear": not architecture.bias,
        "normalization": architecture.normalization,
        "norm_epsilon": description.norm_epsilon,
        "untie_embeddings_and_output_weights": not architecture.tied_embeddings,
        "padded_vocab_size": architecture.vocab_size,
    }
    if description.vocab_size != architecture.vocab_size:
        model["vocab_size"] = description.vocab_size
    if not architecture.norm_affine:
        model["norm_affine"] = False
    if architecture.norm_placement != "input":
        model["norm_placement"] = architecture.norm_placement
    if architecture.qk_layernorm:
        megatron["qk_layernorm"] = True
        model["qk_norm_scope"] = architecture.qk_norm_scope
    if description.zero_centred_norm:
        megatron["apply_layernorm_1p"] = True
    if architecture.qkv_bias:
        megatron["add_qkv_bias"] = True
    megatron |= _activation_flags(description)
    if description.hf_layers is not None:
        model["hf_layers"] = list(description.hf_layers)
        model["hf_layer_count"] = description.hf_layer_count
    megatron |= _sizes(inherited) | _rope_flags(description.rope, model) | _router_flags(description.router)
    if description.max_positions is not None:
        megatron["max_position_embeddings"] = description.max_positions
    return {"model": model, "megatron": megatron}


def _activation_flags(description: Description) -> dict[str, Any]:
    known = {("silu", True): {"swiglu": True}, ("relu2", False): {"squared_relu": True}, ("gelu", False): {}}
    flags = known.get((description.activation, description.architecture.gated))
    if flags is None:
        gate = "with" if description.architecture.gated else "without"
        raise ValueError(
            f"activation {description.activation!r} {gate} a gate is not supported by Megatron's FFN: this model "
            "cannot be converted; choose another"
        )
    return flags


def _compact(description: Description) -> tuple[Pattern, dict[str, Block]]:
    """Shorten a model's pattern: each block keeps only the values that differ from the first block of its kind.

    Returns:
        The pattern, without pipeline cuts, and a mapping from each kind to its first block.
    """
    inherited: dict[str, Block] = {}
    pattern = description.architecture.pattern
    blocks = []
    for block in (*description.blocks, *description.prediction[: len(pattern.mtp)]):
        if block.is_linear:
            blocks.append(block)
            continue
        first = inherited.setdefault(block.kind, block)
        changed = {name: block.get(name) for name in VALUES[block.kind] if block.get(name) != first.get(name)}
        sizes = {name: value or None for name, value in changed.items() if name not in FLAGS}
        flags = {name: True for name in FLAGS if block.get(name)}  # flags are not inherited
        blocks.append(Block.from_values(block.kind, **sizes, **flags))
    main = len(description.blocks)
    return Pattern(tuple(blocks[:main]), (), tuple(blocks[main:]), pattern.depths), inherited


def _sizes(inherited: Mapping[str, Block]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for kind, block in inherited.items():
        for name, field in VALUES[kind].items():
            size = block.get(name)
            if size and name not in FLAGS:
                flags["num_experts" if field == "num_moe_experts" else field] = size
    if "num_query_groups" in flags:
        flags["group_query_attention"] = True
    if "window_size" in flags:
        flags["window_size"] = [flags["window_size"] - 1, 0]
    flags.setdefault("num_attention_heads", 1)  # Megatron requires a number even for a model without attention
    return flags


def _rope_flags(rope: Rope | None, model: dict[str, Any]) -> dict[str, Any]:
    if rope is None:
        return {"position_embedding_type": "none"}
    flags: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": rope.base}
    if rope.percent != 1.0:
        flags["rotary_percent"] = rope.percent
    if rope.scaling == "llama3":
        flags |= {"use_rope_scaling": True, "rope_scaling_factor": rope.factor}
    elif rope.scaling == "linear":
        flags["rotary_seq_len_interpolation_factor"] = _whole("linear RoPE factor", rope.factor)
    elif rope.scaling == "yarn":
        flags |= {
            "position_embedding_type": "yarn",
            "rotary_scaling_factor": rope.factor,
            "yarn_original_max_position_embeddings": rope.original_positions,
            "yarn_beta_fast": rope.beta_fast,
            "yarn_beta_slow": rope.beta_slow,
        }
        if not rope.truncate:
            flags["no_yarn_correction_range_round_to_int"] = True
        if abs(rope.attention_factor - yarn_concentration(rope.factor)) > 1e-9:
            if rope.factor <= 1:
                raise ValueError(
                    f"YaRN with factor={rope.factor} and attention_factor={rope.attention_factor}: Megatron supports "
                    "only attention_factor=1 for this factor, so the model cannot be converted; choose another"
                )
            flags["mscale"] = (rope.attention_factor - 1.0) / (yarn_concentration(rope.factor) - 1.0)
        if not rope.on_windowed:
            model["yarn_on_windowed"] = False
    return flags


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise ValueError(
            f"{name} {value} is not a whole number, which Megatron requires: this model cannot be converted; choose "
            "another"
        )
    return int(value)


def _router_flags(router: Router | None) -> dict[str, Any]:
    if router is None:
        return {}
    flags: dict[str, Any] = {
        "moe_router_score_function": router.score,
        "moe_router_topk_scaling_factor": router.scaling,
        "moe_router_dtype": "fp32",
    }
    if router.expert_bias:
        flags["moe_router_enable_expert_bias"] = True
    return flags


def megatron_arguments(architecture: Architecture) -> dict[str, Any]:
    """Arguments to save in a checkpoint for Megatron's loader, which reads the model's layout from them."""
    blocks = architecture.sizes
    heads = next((block.get("heads") for block in blocks if block.kind == "*" and not block.is_linear), 1)
    return {
        "hybrid_layer_pattern": compile_pattern(architecture.pattern).hybrid_layer_pattern,
        "num_layers": len(blocks),
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": heads,
    }


# Key of our config under which a difference is reported.
_KEYS = {
    "vocab_size": "model.vocab_size (megatron.padded_vocab_size without it)",
    "activation": "megatron.swiglu / squared_relu",
    "norm_epsilon": "megatron.norm_epsilon",
    "zero_centred_norm": "megatron.apply_layernorm_1p",
    "hidden_size": "megatron.hidden_size",
    "tied_embeddings": "not megatron.untie_embeddings_and_output_weights",
    "normalization": "megatron.normalization",
    "norm_affine": "model.norm_affine",
    "norm_placement": "model.norm_placement",
    "qk_layernorm": "megatron.qk_layernorm",
    "qk_norm_scope": "model.qk_norm_scope",
    "gated": "megatron.swiglu",
    "bias": "not megatron.disable_bias_linear",
    "qkv_bias": "megatron.add_qkv_bias",
    "depths": "prediction depths in model.pattern",
    "rope": "megatron.position_embedding_type",
    "router": "megatron.moe_router_*",
    "rope.base": "megatron.rotary_base",
    "rope.percent": "megatron.rotary_percent",
    "rope.scaling": "megatron.position_embedding_type=yarn / use_rope_scaling",
    "rope.factor": "megatron.rotary_scaling_factor / rope_scaling_factor",
    "rope.original_positions": "megatron.yarn_original_max_position_embeddings",
    "rope.beta_fast": "megatron.yarn_beta_fast",
    "rope.beta_slow": "megatron.yarn_beta_slow",
    "rope.attention_factor": "megatron.mscale",
    "rope.truncate": "megatron.no_yarn_correction_range_round_to_int",
    "rope.on_windowed": "model.yarn_on_windowed",
    "router.score": "megatron.moe_router_score_function",
    "router.scaling": "megatron.moe_router_topk_scaling_factor",
    "router.expert_bias": "megatron.moe_router_enable_expert_bias",
}
_SHOWN = 8


def differences(checkpoint: Description, model: Description) -> dict[str, str]:
    """Compare two models' descriptions, and return one line for the user per setting that differs.

    Lines name the config key, and are keyed by a short name of the setting. The short names of rotary embedding
    settings, on which no weight depends, start with `rope.`.
    """
    different: dict[str, str] = {}

    def compare(name: str, ours: object, theirs: object) -> None:
        close = isinstance(ours, float) and isinstance(theirs, float | int) and abs(ours - theirs) <= 1e-6 * abs(theirs)
        if ours != theirs and not close:
            different[name] = f"{_KEYS[name]}: {theirs} in the checkpoint, {ours} in the model config"

    for name in ("vocab_size", "activation", "norm_epsilon", "zero_centred_norm"):
        compare(name, getattr(model, name), getattr(checkpoint, name))
    first, second = model.architecture, checkpoint.architecture
    for name in ("hidden_size", "tied_embeddings", "normalization", "norm_affine", "norm_placement", "qk_layernorm"):
        compare(name, getattr(first, name), getattr(second, name))
    for name in ("gated", "bias", "qkv_bias") + (("qk_norm_scope",) if first.qk_layernorm else ()):
        compare(name, getattr(first, name), getattr(second, name))
    for part in ("rope", "router"):
        ours, theirs = getattr(model, part), getattr(checkpoint, part)
        if ours is None or theirs is None:
            compare(part, *("none" if value is None else "some" for value in (ours, theirs)))
            continue
        for field in fields(ours):
            compare(f"{part}.{field.name}", getattr(ours, field.name), getattr(theirs, field.name))
    compare("depths", first.pattern.depths, second.pattern.depths)
    theirs_and_ours = zip_longest(*((*side.blocks, *side.prediction) for side in (checkpoint, model)))
    differing = [
        (number, theirs, ours) for number, (theirs, ours) in enumerate(theirs_and_ours, start=1) if theirs != ours
    ]
    if differing:
        lines = [f"block {n}: {a or 'none'} in the checkpoint, {b or 'none'} in the model" for n, a, b in differing]
        more = f" and {len(lines) - _SHOWN} more blocks" if len(lines) > _SHOWN else ""
        different["pattern"] = "model.pattern and block sizes: " + "; ".join(lines[:_SHOWN]) + more
    return different
