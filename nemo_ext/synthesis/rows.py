"""Rows passed between the steps of a recipe: JSON lines with an `id`, in one file per step."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nemo_ext.data.text.user_files import record_source
from nemo_ext.generate.rows import Rows, row_key
from nemo_ext.job.files import complete_file
from nemo_ext.job.records import json_line, read_json

Row = dict[str, Any]
ID = "id"
_AT_ONCE = 1000


class RowFile:
    """Rows of a file, which can be iterated over or accessed by index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __iter__(self) -> Iterator[Row]:
        with open(self.path, "rb") as file:
            yield from map(read, file)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Row:
        with open(self.path, "rb") as file:
            file.seek(int(self._places[number]))
            return read(file.readline())

    @property
    def _places(self) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Byte offset of each row, [rows]; takes 8 bytes of memory per row."""
        if self._offsets is None:
            with open(self.path, "rb") as file:
                sizes = np.fromiter((len(line) for line in file), np.int64)
            self._offsets = np.cumsum(sizes) - sizes
        return self._offsets


@contextmanager
def written(path: Path) -> Iterator[Any]:
    """Provide a function that writes a row to a file; the file appears at `path` once it is complete."""
    with complete_file(path) as file:
        yield lambda row: file.write(json_line(row))


def read(text: bytes | str) -> Row:
    """Parse a line of JSON as a row."""
    row: Row = read_json(text, strict=False)  # some answers have lone surrogates
    return row


def files_of(paths: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Return the input files that match the paths or globs, as pairs of name and path.

    Raises:
        ValueError: no file matches.
    """
    return record_source(paths, None, "input").inputs()


def read_input(paths: tuple[str, ...], path: Path) -> tuple[int, int]:
    """Write the distinct input rows to a file; return their number and the number of repeated rows.

    If the rows have no `id`, each gets a hash as its id.

    Args:
        paths: input files, or globs.
        path: file to write to.

    Raises:
        ValueError: a file cannot be read, or two different rows have the same id.
    """
    first = Rows.from_paths(paths, None).first(1)
    rows = Rows.from_paths(paths, ID if first and first[0].get(ID) is not None else None)
    index = rows.index(_AT_ONCE)
    with written(path) as write:
        for range_ in index.ranges:
            for number, row in enumerate(rows.read(range_)):
                if number not in range_.repeated:
                    write({**row, ID: row_key(row, rows.key)})
    return index.rows, index.repeated


def source_of(name: str, step: str) -> str:
    """Return the id of the row that a step made another row from; if the step did not make that row, the row's own id.

    `name` is the id of the row, and `step` the name of the step.
    """
    before, made, _ = name.rpartition(f"/{step}.")
    return before if made else name


def read_first(paths: tuple[str, ...], count: int) -> list[Row]:
    """Return the first rows of the input, at most `count`; raise ValueError if there are none."""
    rows = Rows.from_paths(paths, None).first(count)
    if not rows:
        raise ValueError(f"input={', '.join(paths)} has no rows: choose files with at least one row")
    return [{**row, ID: str(row.get(ID) or number)} for number, row in enumerate(rows)]


class FirstRows(RowFile):
    """First rows of the input, held in memory, with the interface of `RowFile`."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Row]:
        yield from map(dict, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        return dict(self.rows[number])
