"""Mixing of all sources' lines: deduplication, limits, order and split."""

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_ext.data.preference.build import Row
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.seeds import digest, uniform


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a part: number of the source, number of the part within the source, and the line's `Row`."""

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
    """Select the lines to keep, in random order; dropped lines are counted in their source's report.

    A pair that is in several sources is kept in the first one. A limit keeps a random subset. It counts pairs or, in a
    source that has only reward model samples, samples (a sample and its swapped copy count as one).

    Args:
        sources: lines of each source.
        limits: limit of each source; None for no limit.
        limit: limit of all sources together; None for no limit.
        reports: report of each source.
    """
    selected: list[Line] = []
    seen: set[tuple[int, bool]] = set()
    for lines, most, report in zip(sources, limits, reports, strict=True):
        distinct: list[Line] = []
        for line in sorted(lines, key=_order):
            if (line.row.content, line.row.genrm) in seen:
                report.skip("already in the data")
            else:
                seen.add((line.row.content, line.row.genrm))
                distinct.append(line)
        selected += _limited(distinct, most, [report] * len(distinct), "beyond the source's limit")
    selected = _limited(
        selected, limit, [reports[line.source] for line in selected], "beyond the overall limit", redraw=True
    )
    return sorted(selected, key=_order)


def is_validation(row: Row, share: float, seed: int) -> bool:
    """Return whether a line is for validation, which is the same for all lines with the same prompt."""
    return uniform(seed, "validation", row.prompt) < share


def _limited(
    lines: list[Line], most: int | None, reports: Sequence[ReadReport], reason: str, *, redraw: bool = False
) -> list[Line]:
    """Return the lines of a random subset of at most `most` units (see `Row.unit`), in order.

    Args:
        most: maximum number of units; None for no limit.
        reports: report of each line's source, which counts the dropped lines.
        redraw: True to draw new random numbers for the units, since an earlier limit has kept the smallest ones.
    """
    drawn = [digest(0, line.row.unit, line.source) if redraw else line.row.unit for line in lines]
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
