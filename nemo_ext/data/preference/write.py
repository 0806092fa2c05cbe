"""Writer of the selected lines to the output files, one per format and split."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from nemo_ext.data.preference.formats import Columns, JsonObject, genrm_line, nemo_rl_record, trl_record
from nemo_ext.data.preference.mix import Line
from nemo_ext.job.files import complete_file

Parts = Sequence[Sequence[Path]]
MOST_OPEN = 128
"""Maximum number of open files, however many parts there are; systems allow 256 or 1024."""
SPLITS = ("train", "validation")
FORMATS: Mapping[str, Callable[[Mapping[str, Any]], JsonObject]] = {
    "trl": trl_record,
    "nemo_rl": nemo_rl_record,
    "genrm": genrm_line,
}


def write_split(lines: Sequence[Line], parts: Parts, path: Path, kind: str, advance: Callable[[int], None]) -> None:
    """Write lines to a file, in order, except that lines with new keys come first (see `Columns`).

    Args:
        parts: paths of each source's parts, from which the contents are read.
        kind: key of the format in `FORMATS`.
        advance: called with 1 for each line read; every line is read twice.
    """
    convert = FORMATS[kind]
    columns = Columns()
    first: list[int] = []
    for number, staged in enumerate(read_lines(lines, parts)):
        if columns.see(convert(staged)):
            first.append(number)
        advance(1)
    ahead = set(first)
    order = [lines[number] for number in first] + [line for number, line in enumerate(lines) if number not in ahead]
    with complete_file(path) as output:
        for staged in read_lines(order, parts):
            output.write(json.dumps(columns.filled(convert(staged)), ensure_ascii=False).encode() + b"\n")
            advance(1)


def read_lines(lines: Sequence[Line], parts: Parts) -> Iterator[dict[str, Any]]:
    """Yield the contents of the lines, in the given order; `parts` are the paths of each source's parts."""
    opened: dict[tuple[int, int], IO[bytes]] = {}  # in the order of last use
    try:
        for line in lines:
            place = line.source, line.part
            if place not in opened and len(opened) >= MOST_OPEN:
                opened.pop(next(iter(opened))).close()
            opened[place] = file = opened.pop(place, None) or open(parts[line.source][line.part], "rb")  # noqa: SIM115
            file.seek(line.row.position)
            yield json.loads(file.readline())
    finally:
        for file in opened.values():
            file.close()
