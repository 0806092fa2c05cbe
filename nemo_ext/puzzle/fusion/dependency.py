"""Dependency matrix of FFN Fusion (arXiv:2503.18908): how much each block depends on the ones before it.

h_j(x) = f_j(x) - x is what block j adds to the residual stream. M[i][j], i < j, is the cosine distance between h_j in
the whole model and h_j with block i left out, averaged over the tokens of a calibration set. Where it is small, blocks
compute nearly the same in parallel as in sequence.

One pass through the whole model gives every block's input. Block i is left out by running from block i + 1 on with the
input of block i, which gives row i at once. Rows are lines of JSON; existing ones are not measured again. A block adds
to the residual stream in its own precision: in bf16, small contributions lose digits that count in the distance.
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
from nemo_ext.job.report import new_figure, save_figure
from nemo_ext.puzzle.fusion.fusion import Dependency, Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNIT = "cosine distance of a block's contribution (1 − cos)"
_SHOWN = {"*": "\N{ASTERISK OPERATOR}", "-": "\N{EN DASH}"}
"""Symbols that are vertically centred, unlike the typed ones."""
_FUSED = "#f2348b"
_MISSING_COLOURS, _MISSING_DEPTH = "Greys", 8.0
_LABELS = 60
"""Most labels that fit along an axis."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Change in later blocks when one block is left out.

    Attributes:
        block: 1-based number of the block that is left out.
        distances: 1-based number of a later block -> cosine distance, 0 to 2, mean over tokens.
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
    parent: Parent,
    calibration: Sequence[Tensor],
    file: Path,
    *,
    numbers: Iterable[int] | None = None,
    together: int = 8,
    advance: Callable[[int], None] = lambda passes: None,
) -> list[list[float]]:
    """Measure every pair of blocks that `file` does not have yet.

    Fusion needs only the pairs within runs of FFNs; the picture needs all pairs.

    Args:
        parent: the model.
        calibration: this rank's tokens `[batch, seq]`.
        file: path of dependency.jsonl.
        numbers: 0-based numbers of the blocks whose pairs are measured; all by default.
        together: rows per pass of the whole model over the calibration set; they are written together.
        advance: called for every pass of one row over one batch, including those already in `file`:
            `(blocks - 1) x batches` in total.

    Returns:
        The matrix of everything now in the file, see `read_dependency`.

    Raises:
        ValueError: numbers outside the model, no calibration tokens, a file from another model or calibration set, or
            a model that gives NaN or infinity.
    """
    count = len(parent.layers)
    wanted = sorted(set(range(count) if numbers is None else numbers))
    if not calibration:
        raise ValueError("the calibration set is empty: dependency is measured on tokens")
    if together < 1:
        raise ValueError(f"together={together}: expected a positive number of rows")
    if wanted and not 0 <= wanted[0] <= wanted[-1] < count:
        raise ValueError(f"numbers={wanted}: the model has blocks 0 to {count - 1}")
    known = data_parallel.agreed(lambda: {row.block - 1: row for row in read_rows(file)})
    shares = torch.tensor([sum(batch.numel() for batch in calibration), checksum(calibration)])
    tokens, check = data_parallel.summed(shares).tolist()
    identity = (count, tokens, check % 2**32)
    _check_same(known.values(), identity, file)
    later = {i: [j for j in wanted if j > i and not _has(known.get(i), j)] for i in wanted[:-1]}
    todo = [i for i, after in later.items() if after]
    advance((len(later) - len(todo)) * len(calibration))
    for start in range(0, len(todo), together):
        part = {i: later[i] for i in todo[start : start + together]}
        sums, _ = distance_sums(parent, part, calibration, advance=advance)
        for i, after in part.items():
            means = (data_parallel.summed(sums[i]) / tokens).tolist()
            found = {j + 1: mean for j, mean in zip(after, means, strict=True)}
            broken = next((j for j, mean in found.items() if not isfinite(mean)), None)
            if broken is not None:
                raise ValueError(
                    f"block {broken} without block {i + 1} gives NaN or infinity: check the model's weights"
                )
            before = known[i].distances if i in known else {}
            merged = dict(sorted({**before, **found}.items()))
            known[i] = Row(block=i + 1, distances=merged, blocks=count, tokens=tokens, checksum=identity[2])
        data_parallel.written(partial(_write, file, known))
    return _matrix(known.values(), count)


def _write(file: Path, rows: Mapping[int, Row]) -> None:
    write_text(file, "".join(json.dumps(asdict(rows[number])) + "\n" for number in sorted(rows)))


def _has(row: Row | None, later: int) -> bool:
    return row is not None and later + 1 in row.distances


def _check_same(rows: Iterable[Row], identity: tuple[int, int, int], file: Path) -> None:
    for row in rows:
        if (row.blocks, row.tokens, row.checksum) != identity:
            raise ValueError(
                f"{file} was measured with {row.blocks} blocks on {row.tokens} tokens (checksum {row.checksum}), these "
                f"are {identity[0]} blocks and {identity[1]} tokens (checksum {identity[2]}): remove the file"
            )


def checksum(calibration: Iterable[Tensor]) -> int:
    """Checksum of the sequences of a calibration set, independent of their order and batches.

    It is a sum of CRC-32 modulo 2^32, so the checksums of parts (data-parallel ranks) add up to that of the whole.
    """
    sequences = (sequence for tokens in calibration for sequence in tokens.to("cpu", torch.int64).contiguous())
    return sum(crc32(sequence.numpy().tobytes()) for sequence in sequences) % 2**32


def distance_sums(
    parent: Parent,
    later: Mapping[int, Sequence[int]],
    batches: Iterable[Tensor],
    *,
    advance: Callable[[int], None] = lambda passes: None,
) -> tuple[dict[int, Tensor], int]:
    """Sums over tokens of the distances of some rows; sums and counts over parts of a calibration set add up.

    Args:
        parent: the model.
        later: 0-based number of a block that is left out -> the later blocks to compare.
        batches: tokens `[batch, seq]`.
        advance: called for every pass of one row over one batch.

    Returns:
        Sums `[later blocks]` in fp64 for each row, and the number of tokens.
    """
    sums = {i: torch.zeros(len(after), dtype=torch.double) for i, after in later.items()}
    tokens = 0
    with torch.no_grad():
        for batch in batches:
            tokens += batch.numel()
            with parent.recorded() as whole:
                parent.hidden(batch, _none_after(parent, max(max(after) for after in later.values())))
            for i, after in later.items():
                with parent.recorded() as changed:
                    parent.hidden_from(i + 1, whole[i][0], _none_after(parent, max(after)))
                for at, j in enumerate(after):
                    apart = cosine_distance(_contribution(whole[j]), _contribution(changed[j - i - 1]))
                    sums[i][at] += apart.double().sum().cpu()
                advance(1)
    return sums, tokens


def cosine_distance(first: Tensor, second: Tensor) -> Tensor:
    """1 - cosine over the last dimension, as half the squared distance of the unit vectors: no cancellation near zero.

    A zero vector has no direction: two of them are 0 apart, a zero and a nonzero vector 0.5.
    """
    return (normalize(first, dim=-1) - normalize(second, dim=-1)).square().sum(-1) / 2


def _contribution(record: tuple[Tensor, Tensor]) -> Tensor:
    """A block's contribution to the residual stream, in fp32."""
    hidden, output = record
    return output.float() - hidden.float()


def _none_after(parent: Parent, last: int) -> dict[int, None]:
    return dict.fromkeys(range(last + 1, len(parent.layers)))


def read_rows(file: Path) -> list[Row]:
    """Rows in a file; empty if there is no file.

    Raises:
        ValueError: a line is not a row.
    """
    return read_records(file, _row, what="a row of a dependency matrix")


def _row(record: dict[str, Any]) -> Row:
    distances = {int(later): float(distance) for later, distance in record.pop("distances").items()}
    return Row(distances=distances, **record)


def read_dependency(file: Path) -> list[list[float]]:
    """Matrix in a file, `[i][j]` by 0-based block numbers; NaN where nothing was measured, including all j <= i.

    Raises:
        ValueError: there is no file, or a line is not a row.
    """
    rows = read_rows(file)
    if not rows:
        raise ValueError(f"{file}: no dependency matrix there: measure it first")
    return _matrix(rows, rows[0].blocks)


def _matrix(rows: Iterable[Row], count: int) -> list[list[float]]:
    matrix = [[nan] * count for _ in range(count)]
    for row in rows:
        for later, distance in row.distances.items():
            matrix[row.block - 1][later - 1] = distance
    return matrix


def draw_dependency(
    matrix: Dependency, path: Path, *, pattern: Pattern, groups: Sequence[Group] = (), title: str = ""
) -> Path:
    """Draw a matrix as a heat map (PNG or SVG by suffix), of the blocks with any measurement.

    Colours follow the square root of the distance, because the blocks that can be fused differ at small distances.

    Args:
        matrix: matrix from `measure_dependency` or `read_dependency`.
        path: path of the picture.
        pattern: the model's blocks; their kinds are drawn on the diagonal.
        groups: fused blocks, drawn with an outline.
        title: title of the picture.

    Raises:
        ValueError: the matrix has another size than the pattern, or no measured number.
    """
    count = len(pattern.blocks)
    if any(len(row) != count for row in [matrix, *matrix]):
        raise ValueError(f"the dependency matrix has {len(matrix)} rows, the model {count} blocks")
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count) if isfinite(matrix[i][j])]
    if not pairs:
        raise ValueError("nothing of the dependency matrix was measured, so there is nothing to draw")
    numbers = sorted({number for pair in pairs for number in pair} | {n for group in groups for n in group.blocks})
    from matplotlib.colors import PowerNorm

    figure = new_figure(figsize=(8.6, 7.4))
    axis = figure.subplots()
    shown = [[matrix[i][j] if j > i else nan for j in numbers] for i in numbers]
    missing = [[1.0 if j > i and not isfinite(matrix[i][j]) else nan for j in numbers] for i in numbers]
    axis.imshow(missing, cmap=_MISSING_COLOURS, vmin=0, vmax=_MISSING_DEPTH, interpolation="nearest")
    largest = max(matrix[i][j] for i, j in pairs)
    scale = PowerNorm(0.5, vmin=0, vmax=largest or 1.0)
    image = axis.imshow(shown, cmap="viridis", norm=scale, interpolation="nearest")
    figure.colorbar(image, ax=axis, label=_UNIT, shrink=0.85, pad=0.02)
    _add_kinds(axis, pattern, numbers)
    for group in groups:
        _outline(axis, numbers.index(group.first), len(group.blocks))
    _add_legend(axis, pattern, numbers, missing=len(pairs) < len(numbers) * (len(numbers) - 1) / 2, fused=bool(groups))
    _label(axis, pattern, numbers)
    axis.set_title(title, loc="left", fontsize=11)
    save_figure(figure, path, dpi=150)
    return path


def _add_kinds(axis: "Axes", pattern: Pattern, numbers: Sequence[int]) -> None:
    """Draws every block's kind on the diagonal."""
    from matplotlib.patches import Rectangle

    for place, number in enumerate(numbers):
        colour = COLOURS[pattern.blocks[number].kind]
        axis.add_patch(Rectangle((place - 0.5, place - 0.5), 1, 1, color=colour, linewidth=0))


def _outline(axis: "Axes", place: int, length: int) -> None:
    from matplotlib.patches import Rectangle

    corner = (place - 0.5, place - 0.5)
    axis.add_patch(Rectangle(corner, length, length, fill=False, edgecolor=_FUSED, linewidth=1.6, clip_on=False))


def _add_legend(axis: "Axes", pattern: Pattern, numbers: Sequence[int], *, missing: bool, fused: bool) -> None:
    """Draws the legend in the empty half."""
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(pattern.blocks[number].kind for number in numbers)
    handles = [Patch(color=COLOURS[kind], label=f"{_SHOWN.get(kind, kind)} {NAMES[kind]}") for kind in kinds]
    if missing:
        colour = colormaps[_MISSING_COLOURS](1.0 / _MISSING_DEPTH)
        handles.append(Patch(color=colour, label="not measured"))
    if fused:
        handles.append(Patch(fill=False, edgecolor=_FUSED, linewidth=1.6, label="fused"))
    axis.legend(handles=handles, loc="lower left", frameon=False, fontsize=9)


def _label(axis: "Axes", pattern: Pattern, numbers: Sequence[int]) -> None:
    """Labels every block with number and symbol, or every second, fifth or tenth where they would not fit."""
    step = next((step for step in (1, 2, 5, 10, 20, 50) if len(numbers) / step <= _LABELS), 100)
    places = [place for place, number in enumerate(numbers) if step == 1 or (number + 1) % step == 0]
    blocks = [(numbers[place] + 1, pattern.blocks[numbers[place]].kind) for place in places]
    labels = [f"{number} {_SHOWN.get(kind, kind)}" for number, kind in blocks]
    size = 9 if len(places) <= 24 else 6.5
    axis.set_xticks(places, labels, rotation=90, fontsize=size)
    axis.set_yticks(places, labels, fontsize=size)
    axis.set_xlabel("block whose contribution changes")
    axis.set_ylabel("block left out")
    axis.tick_params(length=2)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)
