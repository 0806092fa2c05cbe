"""Dependency matrix of FFN Fusion (arXiv:2503.18908): dependency of each block on earlier ones.

h_j(x) = f_j(x) - x is the contribution of block j to the residual stream. M[i][j], i < j, is the cosine distance
between h_j in the whole model and h_j without block i, averaged over the tokens of a calibration set. Where it is
small, blocks compute nearly the same in parallel as in sequence.

One pass of the whole model gives every block's input. Row i is measured by running the model from block i + 1 on with
the input of block i. Rows are stored as JSON lines; existing ones are not measured again. The residual stream is in the
model's precision: in bf16, small contributions lose digits that matter in the distance.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nemo_ext.architecture.blocks import NAMES
from nemo_ext.architecture.draw import COLOURS
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent
from nemo_ext.job.files import write_text
from nemo_ext.job.records import read_records
from nemo_ext.job.report import panels, save_figure
from nemo_ext.puzzle.fusion.fusion import Dependency, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNIT = "cosine distance of a block's contribution (1 − cos)"
_SHOWN = {"*": "\N{ASTERISK OPERATOR}", "-": "\N{EN DASH}"}
"""Vertically centred symbols for these kinds of blocks."""
_FUSED: dict[str, Any] = {"fill": False, "edgecolor": "#f2348b", "linewidth": 1.6}
_LABELS = 60
"""Maximum number of labels on an axis."""
TOGETHER = 8
"""Rows measured per pass over the calibration set, and written together."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Change in later blocks' contributions when one block is removed.

    Attributes:
        block: 1-based number of the removed block.
        distances: mapping from a later block's 1-based number to the cosine distance, 0 to 2, averaged over tokens.
        blocks: number of blocks in the model.
        tokens: number of tokens in the calibration set.
        checksum: checksum of the calibration set (`checksum`).
    """

    block: int
    distances: Mapping[int, float]
    blocks: int
    tokens: int
    checksum: int


def measure_dependency(
    parent: Parent, calibration: Sequence[Tensor], file: Path, *, advance: Callable[[int], None] = lambda passes: None
) -> list[list[float]]:
    """Measure the dependency matrix, computing only the rows that `file` does not have yet.

    Args:
        calibration: this rank's tokens `[batch, seq]`.
        advance: called with the number of newly finished passes, one per row and batch; rows already in `file` count
            as finished, so the total is `(blocks - 1) x batches`.

    Returns:
        The matrix, indexed `[i][j]` by 0-based block numbers; NaN where j <= i.

    Raises:
        ValueError: there are no calibration tokens, `file` is from another model or calibration set or has an invalid
            line, or the model produces NaN or infinity.
    """
    count = len(parent.layers)
    if not calibration:
        raise ValueError("the calibration set is empty; raise puzzle.calibration.sequences")
    known = data_parallel.agreed(lambda: {row.block - 1: row for row in read_rows(file)})
    shares = torch.tensor([sum(batch.numel() for batch in calibration), checksum(calibration)])
    tokens, check = data_parallel.summed(shares).tolist()
    identity = (count, tokens, check % 2**32)
    for row in known.values():
        if (row.blocks, row.tokens, row.checksum) != identity:
            raise ValueError(
                f"{file} was measured with {row.blocks} blocks on {row.tokens} tokens (checksum {row.checksum}), but "
                f"this run has {count} blocks and {tokens} tokens (checksum {identity[2]}): remove the file to "
                "measure again"
            )
    todo = [i for i in range(count - 1) if i not in known]
    advance((count - 1 - len(todo)) * len(calibration))
    for start in range(0, len(todo), TOGETHER):
        part = todo[start : start + TOGETHER]
        for i, sums in distance_sums(parent, part, calibration, advance=advance).items():
            means = (data_parallel.summed(sums) / tokens).tolist()
            distances = dict(enumerate(means, start=i + 2))
            broken = next((j for j, mean in distances.items() if not isfinite(mean)), None)
            if broken is not None:
                raise ValueError(
                    f"block {broken} without block {i + 1} gives NaN or infinity: check the model's weights"
                )
            known[i] = Row(block=i + 1, distances=distances, blocks=count, tokens=tokens, checksum=identity[2])
        lines = "".join(json.dumps(asdict(known[number])) + "\n" for number in sorted(known))
        data_parallel.written(partial(write_text, file, lines))
    matrix = [[nan] * count for _ in range(count)]
    for row in known.values():
        for later, distance in row.distances.items():
            matrix[row.block - 1][later - 1] = distance
    return matrix


def checksum(calibration: Iterable[Tensor]) -> int:
    """Checksum of the sequences of a calibration set, independent of their order and batches.

    It is a sum of CRC-32 modulo 2^32, so the checksums of data-parallel ranks add up to the whole set's.
    """
    sequences = (sequence for tokens in calibration for sequence in tokens.to("cpu", torch.int64).contiguous())
    return sum(crc32(sequence.numpy().tobytes()) for sequence in sequences) % 2**32


def distance_sums(
    parent: Parent,
    removed: Sequence[int],
    batches: Iterable[Tensor],
    *,
    advance: Callable[[int], None] = lambda passes: None,
) -> dict[int, Tensor]:
    """Compute the distances of some rows, summed over tokens so that the data-parallel ranks' results can be added.

    Args:
        removed: 0-based numbers of the blocks to remove, one at a time.
        batches: tokens `[batch, seq]`.
        advance: called with 1 for every row and batch.

    Returns:
        Mapping from removed blocks to sums `[later blocks]` in fp64.
    """
    count = len(parent.layers)
    sums = {i: torch.zeros(count - 1 - i, dtype=torch.double) for i in removed}
    with torch.no_grad():
        for batch in batches:
            with parent.recorded() as whole:
                parent.hidden(batch)
            for i in removed:
                with parent.recorded() as changed:
                    parent.hidden_from(i + 1, whole[i][0])
                for at, (before, after) in enumerate(zip(whole[i + 1 :], changed, strict=True)):
                    apart = cosine_distance(_contribution(before), _contribution(after))
                    sums[i][at] += apart.double().sum().cpu()
                advance(1)
    return sums


def cosine_distance(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine distance (1 - cosine) of two tensors along their last dimension, which is reduced.

    It is computed as half the squared distance between unit vectors, to avoid cancellation. The distance between two
    zero vectors is 0, and between a zero and a nonzero vector 0.5.
    """
    return (normalize(first, dim=-1) - normalize(second, dim=-1)).square().sum(-1) / 2


def _contribution(record: tuple[Tensor, Tensor]) -> Tensor:
    """Return a block's output minus its input, in fp32; `record` is the pair (input, output)."""
    hidden, output = record
    return output.float() - hidden.float()


def read_rows(file: Path) -> list[Row]:
    """Read the rows in a file; return an empty list if it does not exist.

    Raises:
        ValueError: a line is not a row.
    """
    return read_records(file, _row, what="a row of a dependency matrix")


def _row(record: dict[str, Any]) -> Row:
    distances = {int(later): float(distance) for later, distance in record.pop("distances").items()}
    return Row(distances=distances, **record)


def draw_dependency(
    matrix: Dependency, path: Path, *, pattern: Pattern, groups: Sequence[Group] = (), title: str = ""
) -> Path:
    """Draw a matrix as a heat map, as PNG or SVG depending on the suffix.

    Colours follow the square root of the distance, to distinguish the small distances of blocks that can be fused.

    Args:
        pattern: the model's blocks; their kinds are drawn on the diagonal.
        groups: fused blocks, drawn with an outline.

    Raises:
        ValueError: matrix and pattern have different numbers of blocks.
    """
    count = len(pattern.blocks)
    if any(len(row) != count for row in [matrix, *matrix]):
        raise ValueError(
            f"the dependency matrix has {len(matrix)} rows, but the model has {count} blocks: measure it again"
        )
    from matplotlib.colors import PowerNorm

    figure, (axis,) = panels(8.6, 7.4)
    largest = max((matrix[i][j] for i in range(count) for j in range(i + 1, count)), default=0.0)
    scale = PowerNorm(0.5, vmin=0, vmax=largest or 1.0)
    image = axis.imshow(matrix, cmap="viridis", norm=scale, interpolation="nearest")
    figure.colorbar(image, ax=axis, label=_UNIT, shrink=0.85, pad=0.02)
    for number, block in enumerate(pattern.blocks):
        _square(axis, number, 1, color=COLOURS[block.kind], linewidth=0)
    for group in groups:
        _square(axis, group.first, len(group.blocks), **_FUSED)
    _add_legend(axis, pattern, fused=bool(groups))
    _label(axis, pattern)
    axis.set_title(title, loc="left", fontsize=11)
    save_figure(figure, path, dpi=150)
    return path


def _square(axis: "Axes", place: int, length: int, **looks: Any) -> None:
    """Outline `length` consecutive blocks, from the 0-based block `place`, as a square on the matrix's diagonal.

    `looks` are matplotlib's patch properties, such as the colour.
    """
    from matplotlib.patches import Rectangle

    axis.add_patch(Rectangle((place - 0.5, place - 0.5), length, length, clip_on=False, **looks))


def _add_legend(axis: "Axes", pattern: Pattern, *, fused: bool) -> None:
    """Draw a legend of the kinds of blocks and, if `fused`, of fused blocks' outlines, in the matrix's empty half."""
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(block.kind for block in pattern.blocks)
    handles = [Patch(color=COLOURS[kind], label=f"{_SHOWN.get(kind, kind)} {NAMES[kind]}") for kind in kinds]
    if fused:
        handles.append(Patch(label="fused", **_FUSED))
    axis.legend(handles=handles, loc="lower left", frameon=False, fontsize=9)


def _label(axis: "Axes", pattern: Pattern) -> None:
    """Label both axes with the blocks' numbers and symbols; if not all fit, only every second, fifth, tenth etc."""
    count = len(pattern.blocks)
    step = next((step for step in (1, 2, 5, 10, 20, 50) if count / step <= _LABELS), 100)
    places = range(step - 1, count, step)
    kinds = [pattern.blocks[place].kind for place in places]
    labels = [f"{place + 1} {_SHOWN.get(kind, kind)}" for place, kind in zip(places, kinds, strict=True)]
    size = 9 if len(places) <= 24 else 6.5
    axis.set_xticks(places, labels, rotation=90, fontsize=size)
    axis.set_yticks(places, labels, fontsize=size)
    axis.set_xlabel("block whose contribution changes")
    axis.set_ylabel("removed block")
    axis.tick_params(length=2)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
