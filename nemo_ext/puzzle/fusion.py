"""FFN Fusion (arXiv:2503.18908): a run of consecutive FFN blocks becomes one wide block.

Blocks of a run compute x + FFN_j(norm_j(x)), one after the other. Put side by side, on the same x, they are
x + sum_j FFN_j(norm_j(x)), which one FFN computes exactly: each norm's weight is folded into the columns of its block's
first linear (a LayerNorm's bias into a bias of it), first linears are stacked along the width, second ones along their
input. What fusion costs is the difference between one after the other and side by side, so runs are fused where blocks
depend on each other least.

Whole checkpoints are rewritten (`fuse`), tensor by tensor; they are whole whatever the tensor parallel size of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.widths import has_bias
from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.parameters import Piece, rows
from nemo_ext.checkpoint.writing import Slot, Work

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_ext.checkpoint.torch_dist import TorchDistReader

Dependency = Sequence[Sequence[float]]
"""`[i][j]`, 0-based block numbers: how much block j's output changes when block i is left out (cosine distance)."""


@dataclass(frozen=True)
class Group:
    """Consecutive FFN blocks that become one.

    Attributes:
        first: 0-based number of the first.
        last: 0-based number of the last.
    """

    first: int
    last: int

    @property
    def blocks(self) -> range:
        """Their numbers."""
        return range(self.first, self.last + 1)


def runs(description: Description) -> list[Group]:
    """Maximal runs of two or more consecutive FFN blocks; a linear-replaced block ends a run."""
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
    max_blocks: int | None = None,
) -> list[Group]:
    """Which blocks to fuse, the groups that lose least first.

    Args:
        description: the model.
        dependency: measured on calibration data; without it groups come in the order of the model.
        largest_dependency: leave groups alone whose blocks depend on each other more than this, on the mean.
        keep_last: leave the last FFN of every run as it is: it is the most sensitive one (paper, section 3).
        max_width: largest width of a fused block; longer runs are cut into groups of about equal length.
        max_blocks: most blocks in a group.

    Raises:
        ValueError: norms on outputs, which no fusion can fold; limits that leave nothing to fuse.
    """
    if description.architecture.norm_placement != "input":
        raise ValueError(
            "model.norm_placement=output: a norm after an FFN cannot be folded into it, so nothing can be fused"
        )
    if max_blocks is not None and max_blocks < 2:
        raise ValueError(f"max_blocks={max_blocks}: fusing takes two blocks or more")
    groups = []
    for run in runs(description):
        last = run.last - 1 if keep_last else run.last
        groups += _cut(description, Group(run.first, last), max_width=max_width, max_blocks=max_blocks)
    if dependency is None:
        return groups
    cost = {group: mean_dependency(dependency, group) for group in groups}
    kept = [group for group in groups if largest_dependency is None or cost[group] <= largest_dependency]
    return sorted(kept, key=lambda group: cost[group])


def _cut(description: Description, run: Group, *, max_width: int | None, max_blocks: int | None) -> list[Group]:
    """The fewest groups of at least two blocks that keep to the limits, of lengths as equal as can be."""
    length = len(run.blocks)
    widths = [description.blocks[number].size("ffn") for number in run.blocks]
    for count in range(1, length // 2 + 1):
        bounds = [round(part * length / count) for part in range(count + 1)]
        parts = list(pairwise(bounds))
        wide = max_width is not None and any(sum(widths[a:b]) > max_width for a, b in parts)
        long = max_blocks is not None and any(b - a > max_blocks for a, b in parts)
        if not (wide or long):
            return [Group(run.first + a, run.first + b - 1) for a, b in parts if b - a > 1]
    return []


def mean_dependency(dependency: Dependency, group: Group) -> float:
    """The mean over all pairs i < j of a group."""
    pairs = [dependency[i][j] for i in group.blocks for j in group.blocks if i < j]
    return sum(pairs) / len(pairs)


def fused(description: Description, groups: Sequence[Group]) -> Description:
    """The model after fusion.

    Raises:
        ValueError: groups that overlap or hold anything but FFN blocks.
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
    own = description.architecture
    folds_bias = own.norm_affine and own.normalization == "LayerNorm"
    some = any(has_bias(own, description.blocks[number]) for number in group.blocks)
    return Block.of("-", ffn=width, bias=(folds_bias or some) and not own.bias)


def fuse(reader: TorchDistReader, description: Description, groups: Sequence[Group]) -> list[Work]:
    """The work that rewrites a Megatron checkpoint of `description` as one of `fused(description, groups)`.

    Args:
        reader: the checkpoint.
        description: the model before.
        groups: what is fused, in any order.
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
    """All tensors of a fused block at once: each of its parts is read once."""
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
    """The weights of one FFN block that computes the sum of several on the same input.

    Args:
        parts: each block's tensors by their names in Megatron's checkpoint after `mlp.`: `linear_fc1.weight`
            `[ffn or 2 x ffn, hidden]`, `linear_fc2.weight` `[hidden, ffn]`, `linear_fc1.layer_norm_weight` ...; folding
            is computed in fp64.
        description: for the norm, the gate and the biases.

    Returns:
        The fused block's tensors by the same names, of the parts' type.
    """
    import torch

    own = description.architecture
    folded = [_folded(part, description) for part in parts]
    halves = 2 if own.gated else 1
    stacked = [torch.cat(each) for each in zip(*(weight.chunk(halves) for weight, _ in folded), strict=True)]
    first = parts[0]["linear_fc1.weight"]
    whole = {
        "linear_fc1.weight": torch.cat(stacked),
        "linear_fc2.weight": torch.cat([part["linear_fc2.weight"].double() for part in parts], dim=1),
    }
    biases = [bias for _, bias in folded]
    if any(bias is not None for bias in biases):
        widths = [weight.shape[0] for weight, _ in folded]
        given = [
            b if b is not None else torch.zeros(w, dtype=torch.double) for b, w in zip(biases, widths, strict=True)
        ]
        whole["linear_fc1.bias"] = torch.cat(
            [torch.cat(each) for each in zip(*(b.chunk(halves) for b in given), strict=True)]
        )
        zero = torch.zeros(first.shape[1], dtype=torch.double)
        seconds = [part["linear_fc2.bias"].double() if "linear_fc2.bias" in part else zero for part in parts]
        whole["linear_fc2.bias"] = torch.stack(seconds).sum(0)
    if own.norm_affine:
        neutral = torch.zeros if description.zero_centred_norm else torch.ones
        whole["linear_fc1.layer_norm_weight"] = neutral(first.shape[1], dtype=torch.double)
        if own.normalization == "LayerNorm":
            whole["linear_fc1.layer_norm_bias"] = torch.zeros(first.shape[1], dtype=torch.double)
    return {name: tensor.to(first.dtype) for name, tensor in whole.items()}


def _folded(part: Mapping[str, Tensor], description: Description) -> tuple[Tensor, Tensor | None]:
    """A block's first linear with its norm folded in: weight and bias, in fp64."""
    weight = part["linear_fc1.weight"].double()
    bias = part["linear_fc1.bias"].double() if "linear_fc1.bias" in part else None
    if not description.architecture.norm_affine:
        return weight, bias
    scale = part["linear_fc1.layer_norm_weight"].double() + (1.0 if description.zero_centred_norm else 0.0)
    if "linear_fc1.layer_norm_bias" in part:
        shift = weight @ part["linear_fc1.layer_norm_bias"].double()
        bias = shift if bias is None else bias + shift
    return weight * scale, bias
