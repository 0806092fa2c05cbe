"""Rows of a recipe: JSON lines with an `id` each, in one file a step."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nemo_ext.data.text.documents import ReadReport
from nemo_ext.data.text.user_files import record_source
from nemo_ext.job.files import complete_file

Row = dict[str, Any]
ID = "id"
_UNLIMITED = 1 << 60


class RowFile:
    """The rows of a file, in order or by number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __iter__(self) -> Iterator[Row]:
        with open(self.path, "rb") as file:
            for line in file:
                yield orjson.loads(line)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Row:
        with open(self.path, "rb") as file:
            file.seek(int(self._places[number]))
            row: Row = orjson.loads(file.readline())
            return row

    @property
    def _places(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Offset of each row, eight bytes a row."""
        if self._offsets is None:
            with open(self.path, "rb") as file:
                sizes = np.fromiter((len(line) for line in file), np.int64)
            self._offsets = np.cumsum(sizes) - sizes
        return self._offsets


@contextmanager
def written(path: Path) -> Iterator[Any]:
    """Function that writes rows to a file, which gets its name when all are in it."""
    with complete_file(path) as file:
        yield lambda row: file.write(line(row))


def line(row: Mapping[str, Any]) -> bytes:
    """A row as a line; what JSON has no type for becomes its text."""
    try:
        return orjson.dumps(row, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # numbers of more than 64 bits, or halves of characters
        return f"{json.dumps(row, default=str)}\n".encode()


def read_input(paths: tuple[str, ...], path: Path) -> tuple[int, int]:
    """Write the rows of the input to a file; returns how many there are, and how many equal an earlier one.

    A row without an `id` is named by its hash.

    Raises:
        ValueError: a file cannot be read, or two rows have one id.
    """
    source, report = record_source(paths, None, "input"), ReadReport()
    source.check_files()
    seen: dict[bytes, bytes] = {}
    rows = repeated = 0
    with written(path) as write:
        for part in source.parts(max_documents=_UNLIMITED, max_size=_UNLIMITED):
            for number, record in source.records(part, report):
                whole = hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).digest()[:16]
                given = record.get(ID)
                name = whole.hex() if given is None else str(given)
                key = hashlib.sha256(name.encode()).digest()[:16]
                if seen.setdefault(key, whole) != whole:
                    raise ValueError(f"{source.place(part, number)}: has the id {name!r} of another row: mend the ids")
                if len(seen) > rows:
                    write({**record, ID: name})
                    rows += 1
                else:
                    repeated += 1
    if report.skipped:
        raise ValueError(f"input: {report.summary()}: mend the file, or take these rows out")
    if not rows:
        raise ValueError(f"input={', '.join(paths)}: has no rows")
    return rows, repeated


def source_of(name: str, step: str) -> str:
    """Id of the row that a step has made a row out of."""
    before, made, _ = name.rpartition(f"/{step}.")
    return before if made else name


def first_rows(paths: tuple[str, ...], count: int) -> list[Row]:
    """The first rows of the input.

    Raises:
        ValueError: a file cannot be read.
    """
    source, report, found = record_source(paths, None, "input"), ReadReport(), list[Row]()
    for part in source.parts(max_documents=count, max_size=_UNLIMITED):
        for number, record in source.records(part, report):
            found.append({ID: str(number), **record})
            if len(found) == count:
                return found
    return found
