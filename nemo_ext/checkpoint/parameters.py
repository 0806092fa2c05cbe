"""A model's parameters in Megatron checkpoints, and their roles in Hugging Face checkpoints.

A role is a pair (module, parameter): ("q", "weight"), ("experts.3.up", "weight"), ("mamba", "A_log"). A Hugging Face
format only names its modules (`nemo_ext.checkpoint.formats`); the rest of the mapping is shared and defined here.

Keys: Megatron-Core 0.19 (`sharded_state_dict` of HybridModel), identical for the local and the Transformer Engine back
ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import CONV_KERNEL
from nemo_ext.architecture.widths import attention_widths, expert_width, first_width, has_bias, mamba_widths
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.rules import QKV, Rows, Rule, Shape, Vocabulary

Role = tuple[str, str]


@dataclass(frozen=True)
class Piece:
    """Tensor in a Megatron checkpoint, or a slice of one; most pieces are a whole tensor.

    Attributes:
        key: key of the whole tensor.
        offset: offset of the piece in the whole tensor.
        whole: shape of the whole tensor.
    """

    key: str
    shape: Shape
    offset: Shape
    whole: Shape

    @classmethod
    def from_shape(cls, key: str, *shape: int) -> "Piece":
        """Create the piece that is a whole tensor."""
        return cls(key, shape, (0,) * len(shape), shape)


@dataclass(frozen=True)
class Row:
    """Row of the tensor mapping: Megatron pieces and the Hugging Face tensors that hold the same values.

    Attributes:
        block: 0-based index of the block, where blocks of multi-token prediction follow those of the model; None for
            parameters outside the blocks.
        pieces: Megatron's tensors, or slices of them.
        roles: roles of the Hugging Face tensors.
        shapes: shapes of the Hugging Face tensors.
        rule: rule that converts between Megatron's and Hugging Face's tensors.
        fp32: whether the parameter stays fp32 when a checkpoint is cast to another dtype.
    """

    block: int | None
    pieces: tuple[Piece, ...]
    roles: tuple[Role, ...]
    shapes: tuple[Shape, ...]
    rule: Rule = field(default_factory=Rows)
    fp32: bool = False


def rows(description: Description, *, stacked_experts: bool = False) -> Iterator[Row]:
    """Yield all rows of a model's tensor mapping, in model order.

    Args:
        stacked_experts: whether the Hugging Face side stacks a block's experts in one tensor `[experts, ...]`.

    Raises:
        ValueError: a block has no Hugging Face mapping.
    """
    architecture = description.architecture
    hidden, padded, vocabulary = architecture.hidden_size, architecture.vocab_size, description.vocab_size

    def table(key: str, role: str) -> Row:
        pieces = (Piece.from_shape(key, padded, hidden),)
        return Row(None, pieces, ((role, "weight"),), ((vocabulary, hidden),), Vocabulary())

    yield table("embedding.word_embeddings.weight", "embedding")
    for number, block in enumerate(description.blocks):
        yield from _block(description, number, block, f"decoder.layers.{number}.", stacked_experts)
    yield from _norm(description, None, "decoder.final_norm.", "final_norm")
    if not architecture.tied_embeddings:
        yield table("output_layer.weight", "head")
    yield from _prediction(description, stacked_experts)


def _prediction(description: Description, stacked_experts: bool) -> Iterator[Row]:
    """Yield the rows of all depths of multi-token prediction.

    A depth's input norms and projection count as parameters of its first block, its final norm as a parameter of its
    last block.
    """
    hidden, length = description.architecture.hidden_size, len(description.architecture.pattern.mtp)
    for place, block in enumerate(description.prediction):
        depth, inner = divmod(place, length)
        number, at = len(description.blocks) + place, f"mtp.layers.{depth}."
        if inner == 0:
            yield from _norm(description, number, f"{at}enorm.", "enorm")
            yield from _norm(description, number, f"{at}hnorm.", "hnorm")
            yield _same(number, f"{at}eh_proj.weight", ("eh_proj", "weight"), hidden, 2 * hidden)
        yield from _block(description, number, block, f"{at}mtp_model_layer.layers.{inner}.", stacked_experts)
        if inner == length - 1:
            yield from _norm(description, number, f"{at}final_layernorm.", "final_layernorm")


def _block(description: Description, number: int, block: Block, at: str, stacked_experts: bool) -> Iterator[Row]:
    if block.is_linear:
        norm, linear = {"*": ("input_layernorm", "self_attention"), "M": ("norm", "mixer")}.get(
            block.kind, ("pre_mlp_layernorm", "mlp")
        )
        hidden = description.architecture.hidden_size
        yield from _norm(description, number, f"{at}{norm}.", "norm")
        yield _same(number, f"{at}{linear}.weight", ("linear", "weight"), hidden, hidden)
    elif block.kind == "*":
        yield from _attention(description, number, block, f"{at}self_attention.")
    elif block.kind == "-":
        yield from _mlp(description, number, block, f"{at}mlp.")
    elif block.kind == "M":
        yield from _mamba(description, number, block, f"{at}mixer.")
    elif block.kind == "E":
        yield from _moe(description, number, block, at, stacked_experts)
    else:
        raise ValueError(
            f"block {number + 1} ({block}): {block.name} has no Hugging Face mapping, so this model cannot be "
            "converted; replace the block in model.pattern before training"
        )


def _same(number: int | None, key: str, role: Role, *shape: int, fp32: bool = False) -> Row:
    return Row(number, (Piece.from_shape(key, *shape),), (role,), (shape,), fp32=fp32)


def _norm(description: Description, number: int | None, at: str, module: str) -> Iterator[Row]:
    """Yield the rows of a norm: its weight, and for LayerNorm its bias; none for norms without weights.

    Args:
        number: 0-based index of the norm's block; None outside the blocks.
        at: prefix of Megatron's keys, including the final `.`, or `layer_norm_` if fused with a linear layer.
        module: name of the norm in the roles.
    """
    architecture = description.architecture
    if not architecture.norm_affine:
        return
    yield _same(number, f"{at}weight", (module, "weight"), architecture.hidden_size)
    if architecture.normalization == "LayerNorm":
        yield _same(number, f"{at}bias", (module, "bias"), architecture.hidden_size)


def _block_norm(description: Description, number: int, first: str, last: str) -> Iterator[Row]:
    """Yield the rows of a block's norm, which Megatron stores in the block's first linear layer or, if post-norm, last.

    Args:
        number: 0-based index of the block.
        first: key of the first linear layer in Megatron's checkpoint.
        last: key of the last linear layer.
    """
    before = description.architecture.norm_placement == "input"
    yield from _norm(description, number, f"{first}.layer_norm_" if before else f"{last}.output_norm.", "norm")


def _attention(description: Description, number: int, block: Block, at: str) -> Iterator[Row]:
    architecture = description.architecture
    hidden = architecture.hidden_size
    heads, groups, head_dim = (block.size(name) for name in ("heads", "kv", "head_dim"))
    query, key, fused = attention_widths(architecture, block)
    rule = QKV(heads, groups, head_dim)
    yield from _block_norm(description, number, f"{at}linear_qkv", f"{at}linear_proj")

    def projections(parameter: str, *inner: int) -> Row:
        pieces = (Piece.from_shape(f"{at}linear_qkv.{parameter}", fused, *inner),)
        shapes = tuple((width, *inner) for width in (query, key, key))
        return Row(number, pieces, tuple((name, parameter) for name in "qkv"), shapes, rule)

    yield projections("weight", hidden)
    if architecture.bias or architecture.qkv_bias:
        yield projections("bias")
    if architecture.qk_layernorm:
        widths = (query, key) if architecture.qk_norm_scope == "width" else (head_dim, head_dim)
        for name, width in zip("qk", widths, strict=True):
            yield _same(number, f"{at}{name}_layernorm.weight", (f"{name}_norm", "weight"), width)
    yield _same(number, f"{at}linear_proj.weight", ("o", "weight"), hidden, query)
    if architecture.bias:
        yield _same(number, f"{at}linear_proj.bias", ("o", "bias"), hidden)


def _mlp(description: Description, number: int, block: Block, at: str) -> Iterator[Row]:
    architecture = description.architecture
    hidden, ffn = architecture.hidden_size, block.size("ffn")
    yield from _block_norm(description, number, f"{at}linear_fc1", f"{at}linear_fc2")
    names = ("gate", "up") if architecture.gated else ("up",)
    bias = has_bias(architecture, block)
    for parameter, inner in (("weight", (hidden,)), ("bias", ())) if bias else (("weight", (hidden,)),):
        pieces = (Piece.from_shape(f"{at}linear_fc1.{parameter}", first_width(architecture, ffn), *inner),)
        yield Row(number, pieces, tuple((name, parameter) for name in names), ((ffn, *inner),) * len(names))
    yield _same(number, f"{at}linear_fc2.weight", ("down", "weight"), hidden, ffn)
    if bias:
        yield _same(number, f"{at}linear_fc2.bias", ("down", "bias"), hidden)


def _mamba(description: Description, number: int, block: Block, at: str) -> Iterator[Row]:
    hidden = description.architecture.hidden_size
    heads = block.size("heads")
    inner, channels, projected = mamba_widths(block)
    group_state = block.size("groups") * block.size("state")
    convolved = {"x": inner, "B": group_state, "C": group_state}
    yield from _block_norm(description, number, f"{at}in_proj", f"{at}out_proj")

    def parted(module: str, parameter: str, parts: dict[str, int], whole: int, *rest: int) -> Row:
        key = f"{at}{module}.{parameter}"
        pieces = tuple(Piece.from_shape(f"{key}.{part}", width, *rest) for part, width in parts.items())
        return Row(number, pieces, ((module, parameter),), ((whole, *rest),))

    yield parted("in_proj", "weight", {"z": inner, **convolved, "dt": heads}, projected, hidden)
    yield parted("conv1d", "weight", convolved, channels, 1, CONV_KERNEL)
    yield parted("conv1d", "bias", convolved, channels)
    for name in ("dt_bias", "A_log", "D"):
        yield _same(number, f"{at}{name}", ("mamba", name), heads, fp32=True)
    yield _same(number, f"{at}norm.weight", ("gated_norm", "weight"), inner)
    yield _same(number, f"{at}out_proj.weight", ("out_proj", "weight"), hidden, inner)


def _moe(description: Description, number: int, block: Block, at: str, stacked: bool) -> Iterator[Row]:
    architecture, router = description.architecture, description.router
    assert router is not None
    if architecture.gated or architecture.bias:
        raise ValueError(
            f"block {number + 1} ({block}): experts with gates or biases have no Hugging Face mapping, so this model "
            "cannot be converted; before training, set megatron.swiglu=false and megatron.disable_bias_linear=true"
        )
    hidden, ffn, shared, experts = (
        architecture.hidden_size,
        block.size("ffn"),
        block.size("shared"),
        block.size("experts"),
    )
    yield from _norm(description, number, f"{at}pre_mlp_layernorm.", "norm")
    yield _same(number, f"{at}mlp.router.weight", ("router", "weight"), experts, hidden)
    if router.expert_bias:
        bias = ("router", "e_score_correction_bias")
        yield _same(number, f"{at}mlp.router.expert_bias", bias, experts, fp32=True)
    width = expert_width(architecture, block)
    if block.size("latent"):
        yield _same(number, f"{at}mlp.fc1_latent_proj.weight", ("latent_down", "weight"), width, hidden)
        yield _same(number, f"{at}mlp.fc2_latent_proj.weight", ("latent_up", "weight"), hidden, width)
    for name, linear, shape in (("up", "linear_fc1", (ffn, width)), ("down", "linear_fc2", (width, ffn))):
        key, whole = f"{at}mlp.experts.experts.{linear}.weight", (experts, *shape)
        if stacked:
            yield _same(number, key, ("experts", f"{name}_proj"), *whole)
            continue
        for expert in range(experts):
            piece = Piece(key, (1, *shape), (expert, 0, 0), whole)
            yield Row(number, (piece,), ((f"experts.{expert}.{name}", "weight"),), (shape,))
    if shared:
        yield _same(number, f"{at}mlp.shared_experts.linear_fc1.weight", ("shared_up", "weight"), shared, hidden)
        yield _same(number, f"{at}mlp.shared_experts.linear_fc2.weight", ("shared_down", "weight"), hidden, shared)
