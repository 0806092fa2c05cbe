"""Mixing of the lines of all sources: deduplication, limits, order and split."""

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
    """Select the lines to keep, in random order; the others are counted in their source's report.

    Of a pair in several sources, the first source's is kept. A limit keeps a random part. It counts pairs, or the
    samples of a source that has only those, where both orders of one count once. `limits` and `reports` are the
    sources', `limit` is that of all together.
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
    """True if a line is for validation; the same for all lines with the same question."""
    return uniform(seed, "validation", row.prompt) < share


def _limited(
    lines: list[Line], most: int | None, reports: Sequence[ReadReport], reason: str, *, anew: bool = False
) -> list[Line]:
    """Lines of the `most` smallest units; `anew` draws units again, since an earlier limit left only small ones."""
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
