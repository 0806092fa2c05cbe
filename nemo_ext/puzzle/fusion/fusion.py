"""FFN Fusion (arXiv:2503.18908): merge a run of consecutive FFN blocks into one wide block.

The blocks of a run compute x + FFN_j(norm_j(x)), one after the other. In parallel, on the same x, they compute
x + sum_j FFN_j(norm_j(x)), which one FFN computes exactly: each norm's weight is folded into the columns of its block's
first linear (a LayerNorm's bias into its bias), first linears are stacked along the width, second ones along their
input. The error of fusion is the difference between sequential and parallel blocks, so runs are fused where blocks
depend on each other least.

Whole checkpoints are rewritten (`fuse`), tensor by tensor, independent of the run's tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isnan
from typing import TYPE_CHECKING

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.cost import block_parameters
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.precision import bytes_per_number
from nemo_ext.architecture.widths import has_bias
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.parameters import Piece, rows
from nemo_ext.checkpoint.writing import Slot, Work

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_ext.architecture.model import Architecture
    from nemo_ext.checkpoint.torch_dist import TorchDistReader

Dependency = Sequence[Sequence[float]]
"""`[i][j]`, i < j, 0-based block numbers: change of block j's contribution when block i is left out (cosine distance,
see `nemo_ext.puzzle.fusion.dependency`)."""


@dataclass(frozen=True)
class Group:
    """Consecutive FFN blocks that are merged into one.

    Attributes:
        first: 0-based number of the first block.
        last: 0-based number of the last block.

    Raises:
        ValueError: there are fewer than two blocks.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"{self}: fusing takes two blocks or more, the last after the first, counted from 0")

    @property
    def blocks(self) -> range:
        """Numbers of the blocks."""
        return range(self.first, self.last + 1)


def runs(description: Description) -> list[Group]:
    """Maximal runs of two or more consecutive FFN blocks; a linear block ends a run."""
    found: list[Group] = []
    start: int | None = None
    for number, block in enumerate((*description.blocks, None)):
        is_ffn = block is not None and block.kind == "-" and not block.is_linear
        if is_ffn and start is None:
            start = number
        if not is_ffn and start is not None:
            if number - start > 1:
                found.append(Group(start, number - 1))
            start = None
    return found


def plan(
    description: Description,
    *,
    dependency: Dependency | None = None,
    largest_dependency: float | None = None,
    keep_last: bool = True,
    max_width: int | None = None,
    max_bytes: float | None = None,
    precision: str = "bf16",
    max_blocks: int | None = None,
    max_groups: int | None = None,
) -> list[Group]:
    """Groups of blocks to fuse, the least dependent group first.

    Every run is cut into the fewest groups that meet all limits together. With a measured `dependency`, groups are then
    sorted by mean dependency, and `largest_dependency` and `max_groups` select among them in this order; so fusing one
    step further adds one group to those of the step before.

    Args:
        description: the model.
        dependency: dependency measured on calibration data; without it, groups are in model order.
        largest_dependency: groups with a higher mean over their pairs of blocks are not fused at all; they are not cut
            further, so `max_blocks` may let parts of them pass.
        keep_last: keep the last FFN of every run as it is: it is the most sensitive one (paper, section 3).
        max_width: largest width of a fused block.
        max_bytes: most bytes of a fused block's weights and norm, over all tensor-parallel ranks.
        precision: precision of the weights that `max_bytes` counts, for example `bf16` or `fp8`.
        max_blocks: most blocks in a group.
        max_groups: most groups.

    Returns:
        Groups that do not overlap; empty if the limits leave no two neighbours together.

    Raises:
        ValueError: norms are on outputs, which fusion cannot fold; a limit is invalid; the dependency is not of this
            model or lacks pairs of a group.
    """
    if description.architecture.norm_placement != "input":
        raise ValueError(
            "model.norm_placement=output: a norm after an FFN cannot be folded into it, so nothing can be fused"
        )
    if max_blocks is not None and max_blocks < 2:
        raise ValueError(f"max_blocks={max_blocks}: fusing takes two blocks or more")
    for name, limit in {"max_width": max_width, "max_bytes": max_bytes, "max_groups": max_groups}.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}={limit}: expected a positive number, or none for no limit")
    if dependency is None and largest_dependency is not None:
        raise ValueError(f"largest_dependency={largest_dependency} needs a measured dependency")
    if max_bytes is not None:
        own = width_of_bytes(description, max_bytes, precision)
        max_width = own if max_width is None else min(own, max_width)
    groups = []
    for run in runs(description):
        numbers = run.blocks[:-1] if keep_last else run.blocks
        groups += _cut(description, numbers, max_width=max_width, max_blocks=max_blocks)
    if dependency is not None:
        groups = _ordered(groups, dependency, len(description.blocks), largest_dependency)
    return groups[:max_groups]


def _ordered(groups: Sequence[Group], dependency: Dependency, blocks: int, largest: float | None) -> list[Group]:
    """Groups up to the largest mean dependency, the least dependent first."""
    if any(len(row) != blocks for row in [dependency, *dependency]):
        raise ValueError(
            f"the dependency matrix is of {len(dependency)} blocks, the model has {blocks}: measure it on this model"
        )
    mean = {group: mean_dependency(dependency, group) for group in groups}
    kept = [group for group in groups if largest is None or mean[group] <= largest]
    return sorted(kept, key=lambda group: mean[group])


def width_of_bytes(description: Description, size: float, precision: str) -> int:
    """Largest width of a fused block whose weights, biases and norm take at most `size` bytes; 0 if none does.

    Raises:
        ValueError: the precision is unknown.
    """
    one, two = (block_parameters(_alone(description, width), 1).total for width in (1, 2))
    return max(0, int((size / bytes_per_number(precision) - (2 * one - two)) // (two - one)))


def _alone(description: Description, width: int) -> Architecture:
    """A model of one fused block; it has biases if any FFN block of the description brings some."""
    bias = _brings_bias(description, range(len(description.blocks)))
    return description.architecture.with_pattern(Pattern((Block.from_values("-", ffn=width, bias=bias),)))


def _cut(
    description: Description, numbers: Sequence[int], *, max_width: int | None, max_blocks: int | None
) -> list[Group]:
    """Groups that leave the fewest blocks within the limits, with lengths as equal as possible.

    A block that fits in no group stays alone.
    """
    widths = [description.blocks[number].size("ffn") for number in numbers]
    # For the first n blocks: how many blocks they become, the sum of squared lengths, and the lengths.
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for end in range(1, len(numbers) + 1):
        options = []
        for length in range(1, end + 1):
            wide = max_width is not None and sum(widths[end - length : end]) > max_width
            long = max_blocks is not None and length > max_blocks
            if length > 1 and (wide or long):
                break
            count, squares, lengths = best[end - length]
            options.append((count + 1, squares + length * length, (*lengths, length)))
        best.append(min(options))
    groups, start = [], 0
    for length in best[-1][2]:
        if length > 1:
            groups.append(Group(numbers[start], numbers[start + length - 1]))
        start += length
    return groups


def mean_dependency(dependency: Dependency, group: Group) -> float:
    """Mean dependency over all pairs i < j of a group.

    Raises:
        ValueError: a pair was not measured (NaN).
    """
    pairs = {(i, j): dependency[i][j] for i in group.blocks for j in group.blocks if i < j}
    missing = next((pair for pair, distance in pairs.items() if isnan(distance)), None)
    if missing is not None:
        raise ValueError(
            f"the dependency of block {missing[1] + 1} on block {missing[0] + 1} was not measured: measure all pairs "
            "of a run"
        )
    return sum(pairs.values()) / len(pairs)


def fused(description: Description, groups: Sequence[Group]) -> Description:
    """Description of the model after fusion.

    Raises:
        ValueError: groups overlap or hold anything but FFN blocks.
    """
    blocks: list[Block] = []
    starts = _by_first(description, groups)
    inside = {number for group in groups for number in group.blocks}
    for number, block in enumerate(description.architecture.pattern.blocks):
        if number in starts:
            blocks.append(_fused_block(description, starts[number]))
        elif number not in inside:
            blocks.append(block)
    architecture = description.architecture.with_pattern(Pattern(tuple(blocks)))
    return replace(description, architecture=architecture, hf_layers=None, hf_layer_count=None)


def _by_first(description: Description, groups: Sequence[Group]) -> dict[int, Group]:
    taken: set[int] = set()
    for group in groups:
        for number in group.blocks:
            block = description.blocks[number] if number < len(description.blocks) else None
            if block is None or block.kind != "-" or block.is_linear:
                raise ValueError(f"block {number + 1} ({block}) is not an FFN: only runs of FFN blocks can be fused")
            if number in taken:
                raise ValueError(f"block {number + 1} is in two groups")
            taken.add(number)
    return {group.first: group for group in groups}


def _fused_block(description: Description, group: Group) -> Block:
    width = sum(description.blocks[number].size("ffn") for number in group.blocks)
    return Block.from_values("-", ffn=width, bias=_brings_bias(description, group.blocks))


def _brings_bias(description: Description, numbers: Sequence[int]) -> bool:
    """True if these blocks, fused, have biases that the model's linears do not have anyway."""
    own = description.architecture
    folded = own.norm_affine and own.normalization == "LayerNorm"
    some = any(
        has_bias(own, block) for block in (description.blocks[number] for number in numbers) if block.kind == "-"
    )
    return (folded or some) and not own.bias


def fuse(reader: TorchDistReader, description: Description, groups: Sequence[Group]) -> list[Work]:
    """Work that rewrites a Megatron checkpoint of `description` as one of `fused(description, groups)`.

    Args:
        reader: the checkpoint.
        description: the model before fusion.
        groups: groups to fuse, in any order.
    """
    target = fused(description, groups)
    starts = _by_first(description, groups)
    inside = {number for group in groups for number in group.blocks}
    origins = [n for n in range(len(description.blocks)) if n in starts or n not in inside]
    pieces: dict[int | None, list[Piece]] = {}
    for row in rows(target, stacked_experts=True):
        pieces.setdefault(row.block, []).extend(row.pieces)
    work = []
    for number, made in pieces.items():
        origin = None if number is None else origins[number]
        if origin in starts:
            work.append(_fused_work(reader, description, starts[origin], made))
        else:
            work += [_copied(reader, piece, number, origin) for piece in made]
    return work


def _layer(number: int) -> str:
    return f"decoder.layers.{number}."


def _copied(reader: TorchDistReader, piece: Piece, number: int | None, origin: int | None) -> Work:
    source = piece.key
    if number is not None and origin is not None:
        source = _layer(origin) + piece.key.removeprefix(_layer(number))
    return Work((Slot(piece, reader.tensors[source].dtype),), lambda: [reader.read(source)], (source,))


def _fused_work(reader: TorchDistReader, description: Description, group: Group, made: Sequence[Piece]) -> Work:
    """Work for all tensors of a fused block at once, so that each part is read once."""
    prefix = f"{_layer(group.first)}mlp."
    dtype = reader.tensors[f"{prefix}linear_fc1.weight"].dtype
    names = [piece.key.split(".mlp.", 1)[1] for piece in made]

    def part(number: int) -> dict[str, Tensor]:
        at = f"{_layer(number)}mlp."
        return {key.removeprefix(at): reader.read(key) for key in reader.tensors if key.startswith(at)}

    def make() -> Sequence[Tensor]:
        whole = fuse_weights([part(number) for number in group.blocks], description)
        return [whole[name] for name in names]

    sources = tuple(f"{_layer(number)}mlp" for number in group.blocks)
    return Work(tuple(Slot(piece, dtype) for piece in made), make, sources)


def fuse_weights(parts: Sequence[Mapping[str, Tensor]], description: Description) -> dict[str, Tensor]:
    """Weights of one FFN block that computes the sum of several on the same input.

    Args:
        parts: each block's tensors by their names in Megatron's checkpoint after `mlp.`: `linear_fc1.weight`
            `[ffn or 2 x ffn, hidden]`, `linear_fc2.weight` `[hidden, ffn]`, `linear_fc1.layer_norm_weight` ...; folding
            is computed in fp64.
        description: the model, for the norm, the gate and the biases.

    Returns:
        Tensors of the fused block by the same names, in the parts' dtype.
    """
    import torch

    own = description.architecture
    folded = [_folded(part, description) for part in parts]
    halves = 2 if own.gated else 1
    first = parts[0]["linear_fc1.weight"]
    zeros = partial(torch.zeros, dtype=torch.double, device=first.device)
    whole = {
        "linear_fc1.weight": torch.cat([weight.chunk(halves)[half] for half in range(halves) for weight, _ in folded]),
        "linear_fc2.weight": torch.cat([part["linear_fc2.weight"] for part in parts], dim=1),
    }
    biases = [bias for _, bias in folded]
    if any(bias is not None for bias in biases):
        widths = [weight.shape[0] for weight, _ in folded]
        given = [b if b is not None else zeros(w) for b, w in zip(biases, widths, strict=True)]
        whole["linear_fc1.bias"] = torch.cat([b.chunk(halves)[half] for half in range(halves) for b in given])
        zero = zeros(first.shape[1])
        seconds = [part["linear_fc2.bias"].double() if "linear_fc2.bias" in part else zero for part in parts]
        whole["linear_fc2.bias"] = torch.stack(seconds).sum(0)
    if own.norm_affine:
        whole["linear_fc1.layer_norm_weight"] = zeros(first.shape[1]) + (0.0 if description.zero_centred_norm else 1.0)
        if own.normalization == "LayerNorm":
            whole["linear_fc1.layer_norm_bias"] = zeros(first.shape[1])
    return {name: tensor.to(first.dtype) for name, tensor in whole.items()}


def _folded(part: Mapping[str, Tensor], description: Description) -> tuple[Tensor, Tensor | None]:
    """First linear of a block with its norm folded in: the weight in its own dtype, the bias in fp64."""
    given = part["linear_fc1.weight"]
    weight = given.double()
    bias = part["linear_fc1.bias"].double() if "linear_fc1.bias" in part else None
    if not description.architecture.norm_affine:
        return given, bias
    scale = part["linear_fc1.layer_norm_weight"].double() + (1.0 if description.zero_centred_norm else 0.0)
    if "linear_fc1.layer_norm_bias" in part:
        shift = weight @ part["linear_fc1.layer_norm_bias"].double()
        bias = shift if bias is None else bias + shift
    # Cast back at once: a fused block is large, and only one part at a time needs to be held in fp64.
    return (weight * scale).to(given.dtype), bias
