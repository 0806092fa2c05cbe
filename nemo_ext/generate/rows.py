"""Rows of the input: their keys, their order, and ranges of them that are worked on as a whole.

The input is read once from end to end before the first request, to refuse what does not fit while it costs nothing;
what that finds is kept beside the output. After that any worker reads any range.
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
from nemo_ext.job.settings import nearest

BATCH_KEYS = frozenset({"custom_id", "body"})
"""Keys of a line of OpenAI's batch files."""
_ROWS_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True)
class Range:
    """Consecutive rows of the input.

    Attributes:
        number: number of the range; its files have it in their names.
        part: piece of the input that holds them.
        skip: rows of the piece before them.
        rows: number of rows.
        repeated: places in the range of rows that stand in the input before; they are left out.
    """

    number: int
    part: Part
    skip: int
    rows: int
    repeated: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Number with leading zeros, as in the names of files."""
        return f"{self.number:06}"


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a look at the whole input has found.

    Attributes:
        digest: SHA-256 of the input's files.
        ranges: the ranges in order.
        rows: number of rows without those repeated.
        repeated: number of rows that equal an earlier one.
        batch: whether the rows are requests of OpenAI's batch files.
        columns: names of the columns, in the order in which they are first seen.
        schema: Arrow schema of the columns, serialised and in base64.
    """

    digest: str
    ranges: Sequence[Range]
    rows: int
    repeated: int
    batch: bool
    columns: Sequence[str]
    schema: str

    def arrow_schema(self) -> Any:
        """Arrow schema of the columns."""
        pyarrow = pyarrow_module()
        return pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(self.schema)))

    def as_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, held: Mapping[str, Any]) -> "Index":
        """An index that was written with `as_json`."""
        ranges = [
            Range(**{**each, "part": Part(**each["part"]), "repeated": tuple(each["repeated"])})
            for each in held["ranges"]
        ]
        return cls(**{**held, "ranges": ranges})


def is_batch(row: Mapping[str, Any]) -> bool:
    """True for a line of OpenAI's batch files."""
    return row.keys() >= BATCH_KEYS


def row_key(row: Mapping[str, Any], column: str | None) -> str:
    """Key of a row: a column's value as text, a batch line's `custom_id`, or a hash of the row.

    Raises:
        ValueError: the column has no value.
    """
    if column is not None and row.get(column) is None:
        raise ValueError(f"no value in the key column {column}: {nearest(column, list(row))}")
    if column is None and is_batch(row):
        column = "custom_id"
    return _digest(row).hex() if column is None else str(row[column])


def _digest(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, sort_keys=True, default=str)
    if "\\ud" in text:
        try:
            json.dumps(row, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ValueError("a text has half a character (\\ud800 to \\udfff alone): mend it") from None
    return hashlib.sha256(text.encode()).digest()[:16]


@dataclass
class Rows:
    """Reader of the input's ranges.

    Attributes:
        source: reader of the files.
        key: column with the keys; None for a hash of the row.
    """

    source: RecordSource
    key: str | None
    _open: tuple[Part, int, Iterator[tuple[int, dict[str, Any]]]] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, paths: Sequence[str], key: str | None) -> "Rows":
        """Reader of .parquet or .jsonl files by their names.

        Raises:
            ValueError: there are none, or of both kinds.
        """
        source = record_source(tuple(paths), None, "input")
        source.check_files()
        return cls(source, key)

    def first(self, count: int) -> list[dict[str, Any]]:
        """The first rows that can be read."""
        parts = self.source.parts(max_documents=count, max_size=UNLIMITED)
        rows = (row for part in parts for _, row in self.source.records(part, ReadReport()))
        return list(itertools.islice(rows, count))

    def read(self, range_: Range) -> list[dict[str, Any]]:
        """Rows of a range; a later range of the same piece goes on where this one ends."""
        if self._open is not None and self._open[0] == range_.part and self._open[1] <= range_.skip:
            _, place, records = self._open
        else:
            place, records = 0, iter(self.source.records(range_.part, ReadReport()))
        for _ in range(range_.skip - place):
            next(records)
        found = [row for _, (_, row) in zip(range(range_.rows), records, strict=False)]
        self._open = range_.part, range_.skip + range_.rows, records
        if len(found) != range_.rows:
            raise ValueError(f"{range_.part.path}: has changed since the job began: put the file back as it was")
        return found

    def index(self, part_rows: int) -> Index:
        """Reads all of the input.

        Raises:
            ValueError: a record cannot be read, the key is missing in a row, two rows share a key, or there is no row.
        """
        columns, batch = _Columns(self.source), None
        ranges: list[Range] = []
        repeated = total = 0
        # A database in a file of its own, which goes with it: memory does not grow with the number of rows.
        with closing(sqlite3.connect("", isolation_level=None)) as database:
            database.execute("PRAGMA cache_size = -65536")  # KiB
            database.execute("BEGIN")
            database.execute("CREATE TABLE seen (key BLOB PRIMARY KEY, row BLOB, place TEXT) WITHOUT ROWID")
            for part in self.source.parts(max_documents=part_rows, max_size=UNLIMITED):
                for count, (number, found) in enumerate(self.source.numbered(part)):
                    place = self.source.place(part, number)
                    row = well_formed(found, place)
                    batch = is_batch(row) if batch is None else batch
                    if is_batch(row) != batch:
                        raise ValueError(f"{place}: lines of OpenAI's batch files stand among others: divide the input")
                    columns.add(row)
                    if count % part_rows == 0:
                        ranges.append(Range(number=len(ranges), part=part, skip=count, rows=0))
                    now = ranges[-1]
                    total += 1
                    again = self._seen(database, row, place)
                    repeated += again
                    ranges[-1] = replace(
                        now, rows=now.rows + 1, repeated=(*now.repeated, now.rows) if again else now.repeated
                    )
        columns.end()
        if not ranges:
            raise ValueError("input: has no rows")
        return Index(
            digest=self.digest(),
            ranges=ranges,
            rows=total - repeated,
            repeated=repeated,
            batch=bool(batch),
            columns=tuple(columns.schema.names),
            schema=base64.b64encode(columns.schema.serialize()).decode(),
        )

    def _seen(self, database: sqlite3.Connection, row: Mapping[str, Any], place: str) -> bool:
        """Notes the row; True if it stands earlier already."""
        named = self.key is not None or is_batch(row)
        try:
            whole = _digest(row)
            key = hashlib.sha256(row_key(row, self.key).encode()).digest()[:16] if named else whole
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if database.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (key, whole, place)).rowcount:
            return False
        before, first = database.execute("SELECT row, place FROM seen WHERE key = ?", (key,)).fetchone()
        if before != whole:
            raise ValueError(f"{place}: has the key {row_key(row, self.key)!r} of {first}, which is another row")
        return True

    def digest(self) -> str:
        """SHA-256 of the input's files, with their names."""
        found = hashlib.sha256()
        for name, path in self.source.inputs():
            with open(path, "rb") as file:
                found.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return found.hexdigest()


class _Columns:
    """Arrow schema of the input: that of Parquet files, or the types of the values seen."""

    def __init__(self, source: RecordSource) -> None:
        pyarrow = pyarrow_module()
        self._rows: list[Mapping[str, Any]] | None = None
        if isinstance(source, ParquetSource):
            schemas = [pyarrow.parquet.read_schema(path).remove_metadata() for _, path in source.inputs()]
            try:
                self.schema = pyarrow.unify_schemas(schemas, promote_options="permissive")
            except pyarrow.ArrowException as error:
                raise ValueError(f"input: the files' columns do not fit each other ({error})") from None
        else:
            self.schema, self._rows = pyarrow.schema([]), []

    def add(self, row: Mapping[str, Any]) -> None:
        """Take account of a row."""
        if self._rows is not None:
            self._rows.append(row)
            if len(self._rows) == _ROWS_AT_ONCE:
                self.end()

    def end(self) -> None:
        """Take account of the rows that are left."""
        if self._rows:
            self.schema = widened(self.schema, self._rows)
            self._rows.clear()
