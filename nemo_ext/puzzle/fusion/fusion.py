"""FFN Fusion (arXiv:2503.18908): merges a run of consecutive FFN blocks into one wide block.

The blocks of a run compute x + FFN_j(norm_j(x)) in sequence. In parallel, on the same x, they compute
x + sum_j FFN_j(norm_j(x)), which one FFN computes exactly: each norm's weight is folded into the columns of its block's
first linear (a LayerNorm's bias into its bias), first linears are stacked along the width, and second linears along
their input. The error of fusion is the difference between sequential and parallel blocks, so runs are fused where
blocks depend least on each other.

Whole checkpoints are rewritten (`fuse`), tensor by tensor, for any tensor-parallel size.
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
"""`[i][j]`, with 0-based block numbers i < j: change in block j's contribution without block i, as a cosine distance
(from `nemo_ext.puzzle.fusion.dependency`)."""


@dataclass(frozen=True)
class Group:
    """Consecutive FFN blocks to be merged into one.

    Attributes:
        first: 0-based number of the first block.
        last: 0-based number of the last block.

    Raises:
        ValueError: the group has fewer than two blocks.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise ValueError(f"{self} must have 0 <= first < last, as fusion needs at least two blocks")

    @property
    def blocks(self) -> range:
        """0-based numbers of the blocks."""
        return range(self.first, self.last + 1)


def runs(description: Description) -> list[Group]:
    """List the maximal runs of two or more consecutive FFN blocks; a linear block ends a run."""
    groups: list[Group] = []
    start: int | None = None
    for number, block in enumerate((*description.blocks, None)):
        is_ffn = block is not None and block.kind == "-" and not block.is_linear
        if is_ffn and start is None:
            start = number
        if not is_ffn and start is not None:
            if number - start > 1:
                groups.append(Group(start, number - 1))
            start = None
    return groups


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
    """Select the groups of blocks to fuse, the least dependent first, in a model whose norms are on inputs.

    Every run is divided into the fewest groups that satisfy all limits. With a measured `dependency`, groups are then
    sorted by mean dependency, and `largest_dependency` and `max_groups` select the first ones; so a larger
    `max_groups` only adds groups.

    Args:
        dependency: dependency measured on calibration data; without it, groups are in model order.
        largest_dependency: maximum mean dependency over a group's pairs; groups above it are neither fused nor divided
            further (`max_blocks` does that). It requires `dependency`.
        max_width: maximum FFN width of a fused block.
        max_blocks: maximum number of blocks in a group.
        max_groups: maximum number of groups.
        keep_last: True to keep the last FFN of every run unfused, as it is the most sensitive one (paper, section 3).
        max_bytes: maximum bytes of a fused block's weights and norm, summed over tensor-parallel ranks.
        precision: precision of the weights for `max_bytes`, for example `bf16` or `fp8`.

    Returns:
        Disjoint groups; empty if the limits exclude all.

    Raises:
        ValueError: the dependency belongs to another model, or a pair of a group was not measured.
    """
    if max_bytes is not None:
        width = width_of_bytes(description, max_bytes, precision)
        max_width = width if max_width is None else min(width, max_width)
    groups = []
    for run in runs(description):
        numbers = run.blocks[:-1] if keep_last else run.blocks
        groups += _cut(description, numbers, max_width=max_width, max_blocks=max_blocks)
    if dependency is not None:
        groups = _ordered(groups, dependency, len(description.blocks), largest_dependency)
    return groups[:max_groups]


def _ordered(groups: Sequence[Group], dependency: Dependency, blocks: int, largest: float | None) -> list[Group]:
    """Return the groups with a mean dependency of at most `largest` (None: all), the least dependent first.

    `blocks` is the number of blocks in the model.
    """
    if any(len(row) != blocks for row in [dependency, *dependency]):
        raise ValueError(
            f"the dependency matrix has {len(dependency)} rows, but the model has {blocks} blocks: measure it again"
        )
    mean = {group: mean_dependency(dependency, group) for group in groups}
    kept = [group for group in groups if largest is None or mean[group] <= largest]
    return sorted(kept, key=lambda group: mean[group])


def width_of_bytes(description: Description, size: float, precision: str) -> int:
    """Return the maximum width of a fused block whose weights, biases and norm take at most `size` bytes; may be 0.

    Raises:
        ValueError: the precision is unknown.
    """
    one, two = (block_parameters(_alone(description, width), 1).total for width in (1, 2))
    return max(0, int((size / bytes_per_number(precision) - (2 * one - two)) // (two - one)))


def _alone(description: Description, width: int) -> Architecture:
    """Return a model of one FFN block of this width, with biases if fusing any of the model's FFN blocks adds them."""
    bias = _creates_bias(description, range(len(description.blocks)))
    return description.architecture.with_pattern(Pattern((Block.from_values("-", ffn=width, bias=bias),)))


def _cut(
    description: Description, numbers: Sequence[int], *, max_width: int | None, max_blocks: int | None
) -> list[Group]:
    """Divide a run of FFN blocks into groups, so that the fewest blocks remain, with lengths as equal as possible.

    Blocks that fit in no group are omitted.

    Args:
        numbers: 0-based numbers of the run's blocks, in order.
        max_width: maximum width of a fused block; None for no limit.
        max_blocks: maximum number of blocks in a group; None for no limit.
    """
    widths = [description.blocks[number].size("ffn") for number in numbers]
    # For the first n blocks: number of resulting blocks, sum of squared lengths, lengths.
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
    """Mean dependency over all pairs i < j of a group; raises ValueError if a pair was not measured (NaN)."""
    pairs = {(i, j): dependency[i][j] for i in group.blocks for j in group.blocks if i < j}
    missing = next((pair for pair, distance in pairs.items() if isnan(distance)), None)
    if missing is not None:
        raise ValueError(
            f"the dependency of block {missing[1] + 1} on block {missing[0] + 1} was not measured: measure all pairs "
            "of adjacent FFN blocks"
        )
    return sum(pairs.values()) / len(pairs)


def fused(description: Description, groups: Sequence[Group]) -> Description:
    """Return the description of the model after fusion.

    Raises:
        ValueError: groups overlap or contain blocks other than FFNs.
    """
    blocks: list[Block] = []
    starts = _by_first(description, groups)
    inside = {number for group in groups for number in group.blocks}
    for number, block in enumerate(description.architecture.pattern.blocks):
        if number in starts:
            numbers = starts[number].blocks
            width = sum(description.blocks[n].size("ffn") for n in numbers)
            blocks.append(Block.from_values("-", ffn=width, bias=_creates_bias(description, numbers)))
        elif number not in inside:
            blocks.append(block)
    pattern = replace(description.architecture.pattern, blocks=tuple(blocks), cuts=())
    architecture = description.architecture.with_pattern(pattern)
    return replace(description, architecture=architecture, hf_layers=None, hf_layer_count=None)


def _by_first(description: Description, groups: Sequence[Group]) -> dict[int, Group]:
    taken: set[int] = set()
    for group in groups:
        for number in group.blocks:
            block = description.blocks[number] if number < len(description.blocks) else None
            if block is None or block.kind != "-" or block.is_linear:
                raise ValueError(f"block {number + 1} ({block}) is not an FFN: only adjacent FFN blocks can be fused")
            if number in taken:
                raise ValueError(f"block {number + 1} is in two groups; remove it from one, as groups must not overlap")
            taken.add(number)
    return {group.first: group for group in groups}


def _creates_bias(description: Description, numbers: Sequence[int]) -> bool:
    """Return whether fusing these blocks creates biases that the model's linears do not have."""
    architecture = description.architecture
    folded = architecture.norm_affine and architecture.normalization == "LayerNorm"
    some = any(
        has_bias(architecture, block)
        for block in (description.blocks[number] for number in numbers)
        if block.kind == "-"
    )
    return (folded or some) and not architecture.bias


def fuse(reader: TorchDistReader, description: Description, groups: Sequence[Group]) -> list[Work]:
    """Return work items that write the checkpoint of the fused model, given a reader of the original checkpoint."""
    target = fused(description, groups)
    starts = _by_first(description, groups)
    inside = {number for group in groups for number in group.blocks}
    origins = [n for n in range(len(description.blocks)) if n in starts or n not in inside]
    pieces: dict[int | None, list[Piece]] = {}
    for row in rows(target, stacked_experts=True):
        number = row.block if row.block is not None and row.block < len(origins) else None  # others are of MTP
        pieces.setdefault(number, []).extend(row.pieces)
    work = []
    for number, block_pieces in pieces.items():
        origin = None if number is None else origins[number]
        if origin in starts:
            work.append(_fused_work(reader, description, starts[origin], block_pieces))
        else:
            work += [_copied(reader, piece, number, origin) for piece in block_pieces]
    return work


def _layer(number: int) -> str:
    return f"decoder.layers.{number}."


def _copied(reader: TorchDistReader, piece: Piece, number: int | None, origin: int | None) -> Work:
    source = piece.key
    if number is not None and origin is not None:
        source = _layer(origin) + piece.key.removeprefix(_layer(number))
    return Work((Slot(piece, reader.tensors[source].dtype),), lambda: [reader.read(source)], (source,))


def _fused_work(reader: TorchDistReader, description: Description, group: Group, pieces: Sequence[Piece]) -> Work:
    """Return one work item that computes all tensors of a fused block, so that each source block is read only once.

    The `pieces` are the places of the fused block's tensors in the new checkpoint.
    """
    prefix = f"{_layer(group.first)}mlp."
    dtype = reader.tensors[f"{prefix}linear_fc1.weight"].dtype
    names = [piece.key.split(".mlp.", 1)[1] for piece in pieces]

    def part(number: int) -> dict[str, Tensor]:
        at = f"{_layer(number)}mlp."
        return {key.removeprefix(at): reader.read(key) for key in reader.tensors if key.startswith(at)}

    def make() -> Sequence[Tensor]:
        whole = fuse_weights([part(number) for number in group.blocks], description)
        return [whole[name] for name in names]

    sources = tuple(f"{_layer(number)}mlp" for number in group.blocks)
    return Work(tuple(Slot(piece, dtype) for piece in pieces), make, sources)


def fuse_weights(parts: Sequence[Mapping[str, Tensor]], description: Description) -> dict[str, Tensor]:
    """Merge several FFN blocks' weights into those of one block that computes their sum on the same input.

    Args:
        parts: each block's tensors, keyed by their names after `mlp.` in Megatron's checkpoint: `linear_fc1.weight`
            `[ffn or 2 x ffn, hidden]`, `linear_fc2.weight` `[hidden, ffn]`, `linear_fc1.layer_norm_weight` ... Norms
            are folded in fp64.
        description: the model, for the norm, the gate and the biases.

    Returns:
        The fused block's tensors, keyed by the same names and in the same dtype.
    """
    import torch

    architecture = description.architecture
    folded = [_folded(part, description) for part in parts]
    halves = 2 if architecture.gated else 1
    first = parts[0]["linear_fc1.weight"]
    zeros = partial(torch.zeros, dtype=torch.double, device=first.device)
    whole = {
        "linear_fc1.weight": torch.cat([weight.chunk(halves)[half] for half in range(halves) for weight, _ in folded]),
        "linear_fc2.weight": torch.cat([part["linear_fc2.weight"] for part in parts], dim=1),
    }
    biases = [bias for _, bias in folded]
    if any(bias is not None for bias in biases):
        widths = [weight.shape[0] for weight, _ in folded]
        first_biases = [b if b is not None else zeros(w) for b, w in zip(biases, widths, strict=True)]
        whole["linear_fc1.bias"] = torch.cat([b.chunk(halves)[half] for half in range(halves) for b in first_biases])
        zero = zeros(first.shape[1])
        seconds = [part["linear_fc2.bias"].double() if "linear_fc2.bias" in part else zero for part in parts]
        whole["linear_fc2.bias"] = torch.stack(seconds).sum(0)
    if architecture.norm_affine:
        whole["linear_fc1.layer_norm_weight"] = zeros(first.shape[1]) + (0.0 if description.zero_centred_norm else 1.0)
        if architecture.normalization == "LayerNorm":
            whole["linear_fc1.layer_norm_bias"] = zeros(first.shape[1])
    return {name: tensor.to(first.dtype) for name, tensor in whole.items()}


def _folded(part: Mapping[str, Tensor], description: Description) -> tuple[Tensor, Tensor | None]:
    """Return a block's first linear with its norm folded in: weight in its original dtype, bias (or None) in fp64.

    `part` holds the block's tensors, named as in `fuse_weights`.
    """
    original = part["linear_fc1.weight"]
    weight = original.double()
    bias = part["linear_fc1.bias"].double() if "linear_fc1.bias" in part else None
    if not description.architecture.norm_affine:
        return original, bias
    scale = part["linear_fc1.layer_norm_weight"].double() + (1.0 if description.zero_centred_norm else 0.0)
    if "linear_fc1.layer_norm_bias" in part:
        shift = weight @ part["linear_fc1.layer_norm_bias"].double()
        bias = shift if bias is None else bias + shift
    # Cast back immediately, so that only one block at a time is in fp64.
    return (weight * scale).to(original.dtype), bias
