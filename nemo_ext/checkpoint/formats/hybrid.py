"""Hybrid models of Mamba-2, attention, MLP and MoE blocks: `NemotronHForCausalLM` (Nemotron 3, Nemotron-H)."""

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import CONV_KERNEL
from nemo_ext.architecture.pattern import MAX_BLOCKS, Pattern, parse
from nemo_ext.checkpoint.description import Description, Router
from nemo_ext.checkpoint.formats.format import (
    Format,
    Keys,
    check_layers,
    common_facts,
    common_value,
    described,
    one_layer_a_block,
    own_bias,
    refuse,
)

GATED_NORM_EPSILON = 1e-5
"""Norm epsilon of Mamba-2 mixers: Megatron hard-codes it (ssm/mamba_mixer.py), transformers uses the model's."""

NO_LIMIT = ((0.0, inf), (0.0, "Infinity"), (0.0, {"__float__": "Infinity"}))
"""Spellings of Mamba's `time_step_limit` of 0 to infinity that Python's json and transformers 5 write."""
ATTENTION = {name: f"mixer.{name}_proj" for name in "qkvo"}
MLP = {name: f"mixer.{name}_proj" for name in ("gate", "up", "down")}
MAMBA = {"in_proj": "mixer.in_proj", "conv1d": "mixer.conv1d", "mamba": "mixer", "gated_norm": "mixer.norm"}
MAMBA |= {"out_proj": "mixer.out_proj"}
MOE = {
    "router": "mixer.gate",
    "latent_down": "mixer.fc1_latent_proj",
    "latent_up": "mixer.fc2_latent_proj",
    "experts.up": "mixer.experts.{expert}.up_proj",
    "experts.down": "mixer.experts.{expert}.down_proj",
    "shared_up": "mixer.shared_experts.up_proj",
    "shared_down": "mixer.shared_experts.down_proj",
}
SIZES: dict[str, dict[str, tuple[str, int]]] = {
    "*": {"num_attention_heads": ("heads", 32), "num_key_value_heads": ("kv", 8), "head_dim": ("head_dim", 128)},
    "-": {"intermediate_size": ("ffn", 21504)},
    "M": {
        "mamba_num_heads": ("heads", 128),
        "mamba_head_dim": ("head_dim", 64),
        "ssm_state_size": ("state", 128),
        "n_groups": ("groups", 8),
    },
    "E": {
        "n_routed_experts": ("experts", 8),
        "num_experts_per_tok": ("topk", 2),
        "moe_intermediate_size": ("ffn", 7688),
        "moe_shared_expert_intermediate_size": ("shared", 7688),
    },
}
"""Mapping from block kind to its config.json keys, each with our name for the value and transformers' default."""
LATENT = "moe_latent_size"
_DEPTHS, _LETTERS = "num_nextn_predict_layers", "mtp_hybrid_override_pattern"
TYPES = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Mapping from block kind to its name in lists of block types."""
_KINDS = {name: kind for kind, name in TYPES.items()} | {"linear_attention": "M", "full_attention": "*"}
KNOWN = frozenset(
    (
        # implementation choices and initialisation in transformers
        *("chunk_size", "expand", "use_mamba_kernels", "mamba_ssm_cache_dtype", "residual_in_fp32", "norm_eps"),
        *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "moe_shared_expert_overlap"),
        "time_step_rank",  # Mamba 1's
        # no effect: attention has no positions
        *("rope_theta", "partial_rotary_factor", "rope_scaling", "rope_parameters"),
        # not read without multi-token prediction
        *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        # the same as hybrid_override_pattern
        *("layers_block_type", "layer_types"),
        # sizes of kinds of blocks that may not occur in a pattern
        *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_head_dim", "sliding_window"),
        "intermediate_size",
        *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "use_conv_bias"),
        *("mamba_hidden_act", "time_step_limit", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
        *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob"),
        *("n_group", "topk_group"),
    )
)
"""Keys of NemotronHConfig that have no effect, or are not read for models without certain kinds of blocks."""


def router_is_sigmoid(description: Description) -> None:
    """Reject routers that transformers' hybrid models do not support: those without sigmoid scores or an expert bias.

    Raises:
        CannotExpress: the router is not supported; says why.
    """
    router = description.router
    if router is not None:
        refuse(
            (router.score != "sigmoid", f"a router with {router.score} scores"),
            (not router.expert_bias, "a router without expert bias (set megatron.moe_router_enable_expert_bias)"),
        )


def check_normalised(keys: Keys, top_k: set[int]) -> None:
    """Reject router normalisation that differs from Megatron's: division by the sum if k is at least 2, none if k is 1.

    Args:
        top_k: numbers of experts per token that the model's blocks use.

    Raises:
        ValueError: `norm_topk_prob` does not have the value that Megatron implies for one of these numbers.
    """
    normalised = keys.flag("norm_topk_prob", True)
    if any((k > 1) != normalised for k in top_k):
        raise ValueError(
            f"config.json: {keys.where}norm_topk_prob={normalised} with {sorted(top_k)} experts per token is not "
            "supported by Megatron: this checkpoint cannot be converted; choose another"
        )


def _write(description: Description) -> dict[str, Any]:
    return write_hybrid(description, "nemotron_h", "NemotronHForCausalLM")


def write_hybrid(
    description: Description, model_type: str, name: str, by_block: Collection[str] = ()
) -> dict[str, Any]:
    """Return the config.json of a hybrid model.

    Args:
        model_type: `model_type` of config.json.
        name: class name in `architectures`.
        by_block: keys that are omitted because each block has its own value; the others hold for all blocks.

    Raises:
        CannotExpress: the class does not support the model; says why.
    """
    architecture, blocks = description.architecture, (*description.blocks, *description.prediction)
    kinds = {block.kind for block in blocks if not block.is_linear}
    refuse(
        (any(block.is_linear for block in blocks), "a block replaced by a linear map"),
        (
            architecture.normalization != "RMSNorm" or not architecture.norm_affine,
            "norms other than RMSNorm with weights",
        ),
        (description.zero_centred_norm, "zero-centred norm weights"),
        (
            architecture.norm_placement != "input" or architecture.qk_layernorm,
            "norms on outputs or on queries and keys",
        ),
        (architecture.tied_embeddings, "tied embeddings"),
        (architecture.bias or architecture.qkv_bias, "biases"),
        own_bias(blocks),
        (kinds & {"-", "E"} and (description.activation == "silu" or architecture.gated), "a gated FFN"),
        ("*" in kinds and description.rope is not None, "positions in attention"),
        (any(block.kind == "*" and block.get("window") for block in blocks), "sliding windows"),
        ("*" not in kinds, "a model without attention blocks"),
        ("M" in kinds and description.norm_epsilon != GATED_NORM_EPSILON, "a norm epsilon other than Mamba's 1e-5"),
    )
    router_is_sigmoid(description)
    facts = common_facts(description, model_type, name) | {
        "num_hidden_layers": len(description.blocks),
        "hybrid_override_pattern": "".join(block.kind for block in description.blocks),
        "layer_norm_epsilon": description.norm_epsilon,
        "norm_eps": description.norm_epsilon,
        "mlp_hidden_act": description.activation,
        "mlp_bias": False,
        "attention_bias": False,
        "use_bias": False,
        "residual_in_fp32": False,
        "num_nextn_predict_layers": architecture.pattern.depths,
    }
    if depth := architecture.pattern.mtp:
        facts["mtp_hybrid_override_pattern"] = "".join(block.kind for block in depth)
        facts["mtp_layers_block_type"] = [TYPES[block.kind] for block in depth]
    for kind, sizes in SIZES.items():
        if kind in kinds:
            facts |= {key: common_value(blocks, kind, size) for key, (size, _) in sizes.items() if key not in by_block}
    if "*" in kinds:
        facts["sliding_window"] = None
    if "M" in kinds:
        facts |= {
            "conv_kernel": CONV_KERNEL,
            "use_conv_bias": True,
            "mamba_proj_bias": False,
            "mamba_hidden_act": "silu",
            # transformers 5 clamps the time step to this minimum, which is only meant for initialisation.
            "time_step_min": 1e-30,
        }
    if description.router is not None and "E" in kinds:
        moe = [block for block in blocks if block.kind == "E"]
        refuse(
            (any(not block.size("shared") for block in moe), "MoE blocks without a shared expert"),
            (any(block.size("experts") < 2 for block in moe), "MoE blocks with one expert"),
        )
        facts |= {
            "n_shared_experts": 1,
            "routed_scaling_factor": description.router.scaling,
            # Megatron normalises the weights with top-k of two or more.
            "norm_topk_prob": max(block.size("topk") for block in moe) > 1,
            "n_group": 1,
            "topk_group": 1,
            LATENT: None if LATENT in by_block else common_value(blocks, "E", "latent") or None,
        }
    return facts


def _read(keys: Keys) -> Description:
    types = keys.get("layers_block_type") or keys.get("layer_types")
    blocks, prediction = _blocks(keys, "hybrid_override_pattern", types).blocks, _prediction(keys)
    check_layers(keys, len(blocks), "the pattern")
    kinds = {block.kind for block in (*blocks, *prediction[0])}
    return read_hybrid(
        keys,
        blocks,
        prediction,
        router=read_router(keys) if "E" in kinds else None,
        family="nemotron3_nano",
        defaults=read_sizes(keys, kinds),
    )


def read_hybrid(
    keys: Keys,
    blocks: Sequence[Block],
    prediction: tuple[tuple[Block, ...], int],
    *,
    router: Router | None,
    **settings: Any,
) -> Description:
    """Read the settings of a hybrid model that hold for all its blocks.

    Args:
        prediction: blocks of a depth of multi-token prediction, and the number of depths.

    Raises:
        ValueError: Megatron does not support a setting.
    """
    for name in ("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"):
        keys.only(name, False)
    keys.only("mlp_hidden_act", "relu2", "gelu")
    kinds = {block.kind for block in (*blocks, *prediction[0])}
    epsilon = keys.number("layer_norm_epsilon", 1e-5)
    if "M" in kinds and epsilon != GATED_NORM_EPSILON:
        raise ValueError(
            f"config.json: layer_norm_epsilon={epsilon} differs from {GATED_NORM_EPSILON}, which Megatron's Mamba-2 "
            "mixer requires: this checkpoint cannot be converted; choose another"
        )
    keys.only("rms_norm_eps", epsilon)  # transformers reads neither this nor the next
    keys.only("num_query_groups", keys.get("num_key_value_heads"))
    return described(
        keys,
        blocks,
        settings,
        prediction=prediction,
        vocabulary=131072,
        hidden=4096,
        activation=str(keys.get("mlp_hidden_act", "relu2")),
        norm_epsilon=epsilon,
        router=router,
    )


def _prediction(keys: Keys) -> tuple[tuple[Block, ...], int]:
    """Return the blocks of a depth of multi-token prediction, and the number of depths."""
    if not has_depths(keys):
        return (), 0
    default = None if keys.get(_LETTERS) else ["attention", "moe"]  # transformers' default
    blocks = _blocks(keys, _LETTERS, keys.get("mtp_layers_block_type", default)).blocks
    return blocks, read_depths(keys, len(blocks))


def has_depths(keys: Keys) -> bool:
    """Whether the model has multi-token prediction."""
    depths = keys.get(_DEPTHS, 0)
    return isinstance(depths, bool) or depths != 0


def read_depths(keys: Keys, blocks: int) -> int:
    """Read the number of depths of multi-token prediction, each with `blocks` blocks.

    Raises:
        ValueError: the number is invalid, or makes more blocks than are supported.
    """
    depths = keys.integer(_DEPTHS)
    if depths * blocks > MAX_BLOCKS:
        raise ValueError(f"config.json: {_DEPTHS}={depths} makes more than {MAX_BLOCKS} blocks: correct it")
    return depths


def _blocks(keys: Keys, key: str, types: Any) -> Pattern:
    """Read the model's blocks from config.json.

    Args:
        key: name of the key that holds one letter per block, such as `M*E`.
        types: list of block types; None if the config.json has that key only.

    Raises:
        ValueError: a letter or type is unknown, there are no blocks, or letters and types differ.
    """
    text, listed = keys.get(key), key.replace("hybrid_override_pattern", "layers_block_type")
    if text is not None:
        try:
            pattern = parse(str(text))
        except ValueError as error:
            raise ValueError(f"config.json: {key}: {error}") from None
        if pattern.mtp or pattern.cuts:
            raise ValueError(f"config.json: {key}={text!r}: expected only the letters of blocks, without / and |")
        kinds = [block.kind for block in pattern.blocks]
        if isinstance(types, list) and [_KINDS.get(str(name)) for name in types] != kinds:
            raise ValueError(f"config.json: {listed} does not match {key}={text!r}: correct one of them")
        return pattern
    if not isinstance(types, list) or not types or not all(isinstance(kind, str) and kind in _KINDS for kind in types):
        raise ValueError(f"config.json: {listed}={types!r}: expected a list of {', '.join(_KINDS)}")
    return Pattern(tuple(Block.from_values(_KINDS[kind]) for kind in types))


def read_sizes(keys: Keys, kinds: set[str]) -> tuple[Block, ...]:
    """Read the sizes of blocks, as one block with all values for each of the `kinds`.

    Raises:
        ValueError: a size is invalid, or Megatron does not support a setting of these kinds of blocks.
    """
    full: dict[str, dict[str, int | None]] = {}
    if "*" in kinds:
        keys.only("sliding_window", None)
        head_dim = keys.integer("head_dim", keys.integer("attention_head_dim", 128))  # Nemotron-H uses the latter
        keys.only("attention_head_dim", head_dim)
        full["*"] = {"window": None, "head_dim": head_dim}
    if "E" in kinds:
        full["E"] = {"latent": None if keys.get(LATENT) is None else keys.integer(LATENT)}
    if "M" in kinds:
        keys.only("mamba_hidden_act", "silu")
        keys.only("use_conv_bias", True)
        keys.only("conv_kernel", CONV_KERNEL)
        limit = keys.get("time_step_limit", list(NO_LIMIT[0]))
        if limit not in [list(known) for known in NO_LIMIT]:
            raise ValueError(
                f"config.json: {keys.where}time_step_limit={limit!r} differs from 0 to infinity, which Megatron's "
                "Mamba-2 mixer requires: this checkpoint cannot be converted; choose another"
            )
    return tuple(
        Block.from_values(
            kind, **{name: keys.integer(key, usual) for key, (name, usual) in sizes.items()} | full.get(kind, {})
        )
        for kind, sizes in SIZES.items()
        if kind in kinds
    )


def read_router(keys: Keys) -> Router:
    """Read the expert routing; raises ValueError if Megatron does not support a setting."""
    for name in ("n_group", "topk_group", "n_shared_experts"):
        keys.only(name, 1)
    check_normalised(keys, {keys.integer("num_experts_per_tok", 2)})
    return Router(score="sigmoid", scaling=keys.number("routed_scaling_factor", 1.0), expert_bias=True)


NEMOTRON_H = Format(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    write=_write,
    read=_read,
    outside={"embedding": "backbone.embeddings", "final_norm": "backbone.norm_f", "head": "lm_head"},
    layer="backbone.layers.{layer}.",
    prediction="mtp.layers.{layer}.",
    modules={"*": ATTENTION, "-": MLP, "M": MAMBA, "E": MOE},
    norms=dict.fromkeys("*-ME", "norm"),
    layers=one_layer_a_block,
    known=KNOWN,
    prefixes=("backbone.", "model."),
)
