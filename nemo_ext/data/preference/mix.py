"""Out of the lines that all sources gave: no pair twice, the limits, the order and the split."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_ext.data.preference.build import Row
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.seeds import digest, uniform


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a part: number of its source, number of the part in it, and the row."""

    source: int
    part: int
    row: Row


def mixed(
    sources: Sequence[Sequence[Line]],
    *,
    limits: Sequence[int | None],
    limit: int | None,
    reports: Sequence[ReadReport],
) -> list[Line]:
    """The lines that stay, in random order; what goes is counted in its source's report.

    Of a pair that several sources have, the first source's stays. Under a limit a random part stays. A limit counts
    pairs, or the samples of a source that has only those, where both positions of one are one.

    Args:
        sources: lines of each.
        limits: of each source.
        limit: of all together.
    """
    kept: list[Line] = []
    seen: set[tuple[int, bool]] = set()
    for lines, most, report in zip(sources, limits, reports, strict=True):
        distinct: list[Line] = []
        for line in sorted(lines, key=_order):
            if (line.row.content, line.row.genrm) in seen:
                report.skip("in the data already")
            else:
                seen.add((line.row.content, line.row.genrm))
                distinct.append(line)
        kept += _limited(distinct, most, [report] * len(distinct), "beyond the source's limit")
    kept = _limited(kept, limit, [reports[line.source] for line in kept], "beyond the limit of all", anew=True)
    return sorted(kept, key=_order)


def is_validation(row: Row, share: float, seed: int) -> bool:
    """Whether a line is for validation: the same for all that ask the same."""
    return uniform(seed, "validation", row.prompt) < share


def _limited(
    lines: list[Line], most: int | None, reports: Sequence[ReadReport], reason: str, *, anew: bool = False
) -> list[Line]:
    """The lines of the `most` smallest units, drawn anew where the units that are left are small already."""
    drawn = [digest(0, line.row.unit, line.source) if anew else line.row.unit for line in lines]
    units = sorted(set(drawn))
    if most is None or len(units) <= most:
        return lines
    last = units[most - 1]
    for unit, report in zip(drawn, reports, strict=True):
        if unit > last:
            report.skip(reason)
    return [line for unit, line in zip(drawn, lines, strict=True) if unit <= last]


def _order(line: Line) -> tuple[int, int, int, int]:
    return line.row.order, line.source, line.part, line.row.position
