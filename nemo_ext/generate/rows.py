"""Rows of the input: their keys, and the ranges of rows that workers process.

The input is read completely before the first request, so that invalid rows are found before any cost arises. The
resulting index is stored with the output; after that, any worker can read any range.
"""

import base64
import hashlib
import itertools
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nemo_ext.data.text.documents import UNLIMITED, Part, ReadReport
from nemo_ext.data.text.user_files import ParquetSource, RecordSource, pyarrow_module, record_source, well_formed
from nemo_ext.generate.columns import widened
from nemo_ext.job.settings import nearest, prefixed_errors

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class Range:
    """Range of consecutive input rows.

    Attributes:
        number: number of the range, from 0, used in its file names.
        part: part of the input that contains the range.
        skip: number of rows in the part before the range.
        rows: number of rows in the range.
        repeated: positions in the range of rows that equal earlier input rows and are therefore skipped.
    """

    number: int
    part: Part
    skip: int
    rows: int
    repeated: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The range's zero-padded number, used in file names."""
        return f"{self.number:06}"


@dataclass(frozen=True, kw_only=True)
class Index:
    """Index of the whole input.

    Attributes:
        digest: SHA-256 of the input files' names and contents.
        ranges: the ranges in order.
        rows: number of distinct rows.
        repeated: number of rows that equal an earlier one.
        batch: whether the rows are requests from OpenAI batch files.
        columns: column names in order of first occurrence.
        schema: the columns' Arrow schema, serialised and encoded in base64.
    """

    digest: str
    ranges: Sequence[Range]
    rows: int
    repeated: int
    batch: bool
    columns: Sequence[str]
    schema: str

    def arrow_schema(self) -> Any:
        """Decode the columns' Arrow schema."""
        pyarrow = pyarrow_module()
        return pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(self.schema)))

    def as_json(self) -> dict[str, Any]:
        """Return the index as a JSON value, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Index":
        """Restore an index from the value returned by `as_json`."""
        ranges = [
            Range(**{**entry, "part": Part(**entry["part"]), "repeated": tuple(entry["repeated"])})
            for entry in value["ranges"]
        ]
        return cls(**{**value, "ranges": ranges})


def is_batch(row: Mapping[str, Any]) -> bool:
    """Whether a row is a line of an OpenAI batch file."""
    return row.keys() >= {"custom_id", "body"}


def row_key(row: Mapping[str, Any], column: str | None) -> str:
    """Return a row's key: its value in `column` or, if that is None, a batch line's `custom_id` or a hash of the row.

    Raises:
        ValueError: the row has no value in the column, or a string in it cannot be encoded.
    """
    if column is not None and row.get(column) is None:
        raise ValueError(
            f"the row has no value in its key column {column!r}: add one, or choose another column; "
            f"{nearest(column, list(row))}"
        )
    if column is None and is_batch(row):
        column = "custom_id"
    return _digest(row).hex() if column is None else str(row[column])


def _digest(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, sort_keys=True, default=str)
    if "\\ud" in text:
        try:
            json.dumps(row, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError("the row has a string with a lone surrogate (\\ud800 to \\udfff): remove it") from None
    return hashlib.sha256(text.encode()).digest()[:16]


@dataclass
class Rows:
    """Reader of input rows, range by range.

    Attributes:
        source: reader of the files.
        key: column with the rows' keys; if None, see `row_key`.
    """

    source: RecordSource
    key: str | None
    _open: tuple[Part, int, Iterator[tuple[int, dict[str, Any]]]] | None = field(default=None, repr=False)

    @classmethod
    def from_paths(cls, paths: Sequence[str], key: str | None) -> "Rows":
        """Open .parquet or .jsonl files given as paths or globs; `key` is the column with the rows' keys.

        Raises:
            ValueError: no file matches, or the matches mix both formats.
        """
        source = record_source(tuple(paths), None, "input")
        source.check_files()
        return cls(source, key)

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the first rows of the input, at most `count`."""
        parts = self.source.parts(max_documents=count, max_size=UNLIMITED)
        rows = (row for part in parts for _, row in self.source.records(part, ReadReport()))
        return list(itertools.islice(rows, count))

    def read(self, range_: Range) -> list[dict[str, Any]]:
        """Read the rows of a range; ranges of one part that are read in order share an open file."""
        if self._open is not None and self._open[0] == range_.part and self._open[1] <= range_.skip:
            _, place, records = self._open
        else:
            place, records = 0, iter(self.source.records(range_.part, ReadReport()))
        for _ in range(range_.skip - place):
            next(records)
        rows = [row for _, (_, row) in zip(range(range_.rows), records, strict=False)]
        self._open = range_.part, range_.skip + range_.rows, records
        if len(rows) != range_.rows:
            raise ValueError(f"{range_.part.path} has changed since the job started: restore the original file")
        return rows

    def index(self, part_rows: int) -> Index:
        """Read the whole input and index it in ranges of at most `part_rows` rows.

        Raises:
            ValueError: a record cannot be read, a row has no key, different rows share a key, or the input is empty.
        """
        infer, batch = not isinstance(self.source, ParquetSource), None
        schema, pending = _parquet_schema(self.source), list[Mapping[str, Any]]()
        ranges: list[Range] = []
        repeated = total = 0
        # A temporary on-disk database, so that memory does not grow with the number of rows.
        with closing(sqlite3.connect("", isolation_level=None)) as database:
            database.execute("PRAGMA cache_size = -65536")  # KiB
            database.execute("BEGIN")
            database.execute("CREATE TABLE seen (key BLOB PRIMARY KEY, row BLOB, place TEXT) WITHOUT ROWID")
            for part in self.source.parts(max_documents=part_rows, max_size=UNLIMITED):
                for count, (number, record) in enumerate(self.source.numbered(part)):
                    place = self.source.place(part, number)
                    row = well_formed(record, place)
                    batch = is_batch(row) if batch is None else batch
                    if is_batch(row) != batch:
                        raise ValueError(
                            f"{place}: the input mixes lines of OpenAI batch files with others; use one job for each"
                        )
                    if infer:
                        pending.append(row)
                    if len(pending) == _ROWS_AT_ONCE:
                        schema, pending = widened(schema, pending), []
                    if count % part_rows == 0:
                        ranges.append(Range(number=len(ranges), part=part, skip=count, rows=0))
                    now = ranges[-1]
                    total += 1
                    again = self._is_repeated(database, row, place)
                    repeated += again
                    ranges[-1] = replace(
                        now, rows=now.rows + 1, repeated=(*now.repeated, now.rows) if again else now.repeated
                    )
        if not ranges:
            raise ValueError("input has no rows: give files with at least one row")
        schema = widened(schema, pending) if infer else schema
        return Index(
            digest=self.digest(),
            ranges=ranges,
            rows=total - repeated,
            repeated=repeated,
            batch=bool(batch),
            columns=tuple(schema.names),
            schema=base64.b64encode(schema.serialize()).decode(),
        )

    def _is_repeated(self, database: sqlite3.Connection, row: Mapping[str, Any], place: str) -> bool:
        """Record a row, and return whether it equals an earlier one; ValueError if a different row has the same key."""
        named = self.key is not None or is_batch(row)
        with prefixed_errors(place):
            whole = _digest(row)
            key = hashlib.sha256(row_key(row, self.key).encode()).digest()[:16] if named else whole
        if database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (key, whole, place)).rowcount:
            return False
        before, first = database.execute("SELECT row, place FROM seen WHERE key = ?", (key,)).fetchone()
        if before != whole:
            name = row_key(row, self.key)
            raise ValueError(f"{place} has the same key {name!r} as {first}, but differs from it: make keys unique")
        return True

    def digest(self) -> str:
        """Return the SHA-256 of the input files' names and contents."""
        total = hashlib.sha256()
        for name, path in self.source.inputs():
            with open(path, "rb") as file:
                total.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()


def _parquet_schema(source: RecordSource) -> Any:
    """Return the Arrow schema of all Parquet files; empty for JSON rows, whose types are inferred from their values."""
    pyarrow = pyarrow_module()
    if not isinstance(source, ParquetSource):
        return pyarrow.schema([])
    schemas = [pyarrow.parquet.read_schema(path).remove_metadata() for _, path in source.inputs()]
    try:
        return pyarrow.unify_schemas(schemas, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise ValueError(f"input: columns must have the same types in all files ({error})") from None
