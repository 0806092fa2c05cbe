"""Sources that read the user's files, and the package's reader of rows.

`jsonl` and `parquet` files hold many records each. With `text` and `tree` (a directory of source files), each file is
a document. `jsonl` and `parquet` sources also read rows that are not documents, such as conversations,
pairs and tasks.
"""

import fnmatch
import glob
import gzip
import importlib
import io
import itertools
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Annotated, Any, ClassVar, cast

import zstandard
from pydantic import Field

from nemo_ext.data.text.documents import UNLIMITED, Document, Part, ReadReport, Source, encoding_hint, file_text
from nemo_ext.job.job import at
from nemo_ext.job.records import read_json
from nemo_ext.job.settings import Share, Strings, nearest

_SAMPLE_BYTES = 1 << 20
PACKED = (".gz", ".zst")
Row = dict[str, Any]
DAMAGED = (EOFError, OSError, zlib.error, zstandard.ZstdError)
"""Errors raised when reading a damaged compressed file."""


@dataclass(frozen=True, kw_only=True)
class RecordSource(Source):
    """Base class of sources whose files hold many records each.

    path: Paths and globs.
    text_key: Key of the JSON object, or column of the table, that holds the text.
    max_bad_share: Maximum share of malformed records; more are an error.
    """

    path: Strings
    text_key: Annotated[str, Field(min_length=1)] = "text"
    max_bad_share: Share = 0.01
    _numbering: ClassVar[str] = ":"

    def inputs(self) -> list[tuple[str, Path]]:
        return _named_files(self.path, self.kind)

    def check_files(self) -> None:
        """Raise ValueError if a file is missing or, as far as a cheap check can tell, of a different kind."""
        self.inputs()

    def numbered(
        self, part: Part, *, columns: list[str] | None = None, strict: bool = False
    ) -> Iterator[tuple[int, Row | str]]:
        """Yield each record of a part as its number (line or row) and its content, or the reason why it is malformed.

        Args:
            columns: table columns to read; None for all.
            strict: whether to reject JSON that only Python accepts; see `read_json`.
        """
        raise NotImplementedError

    def records(self, part: Part, report: ReadReport, *, columns: list[str] | None = None) -> Iterator[tuple[int, Row]]:
        """Yield the number (line or row) and content of each record of a part; malformed records are only counted."""
        for number, row in self.numbered(part, columns=columns):
            report.records += 1
            if isinstance(row, str):
                report.skip("malformed", f"{self.place(part, number)}: {row}")
            else:
                yield number, row

    def placed(self, *, strict: bool = False) -> Iterator[tuple[str, Row | str]]:
        """Yield each record of all files as its place and its content, or the reason why it is malformed."""
        for part in self.parts(max_documents=UNLIMITED, max_size=UNLIMITED):
            for number, row in self.numbered(part, strict=strict):
                yield self.place(part, number), row

    def rows(self, *, strict: bool = False) -> Iterator[tuple[str, Row]]:
        """Yield the place and content of each record of all files; raises ValueError if a record is malformed."""
        return ((place, well_formed(row, place)) for place, row in self.placed(strict=strict))

    def place(self, part: Part, number: int) -> str:
        """Return the place of a record, worded for messages, such as `a.jsonl:7`."""
        return f"{part.path}{self._numbering}{number}"

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        for number, record in self.records(part, report, columns=[self.text_key]):
            if (text := self.text_of(record, part, number, report)) is not None:
                yield Document(f"{part.name}:{number}", text)

    def text_of(self, record: Mapping[str, Any], part: Part, number: int, report: ReadReport) -> str | None:
        """Return the text of a record; None if it has none, which is counted as malformed."""
        text = record.get(self.text_key)
        if isinstance(text, str):
            return text
        problem = f"there is no key {self.text_key!r}; set text_key to one of {', '.join(sorted(record)) or 'its keys'}"
        if self.text_key in record:
            kind = "null" if text is None else type(text).__name__
            problem = f"{self.text_key!r}: expected a string, not {kind}"
        report.skip("malformed", f"{self.place(part, number)}: {problem}")
        return None

    def finish(self, report: ReadReport) -> None:
        report.check_bad_share(f"{self.kind} source", self.max_bad_share)


@dataclass(frozen=True, kw_only=True)
class JsonlSource(RecordSource):
    """JSONL files (plain, .gz or .zst) as a source, with one JSON object per line; blank lines are ignored.

    Several workers can read a plain file, but only one a compressed file.
    """

    kind: ClassVar[str] = "jsonl"

    def check(self) -> list[tuple[str, Path]]:
        inputs = self.inputs()
        for name, path in inputs:
            report = ReadReport()
            sample = Part(name=name, path=str(path), size=0, stop=_SAMPLE_BYTES)
            if next(self.read(sample, report), None) is None and report.records:
                raise ValueError(
                    f"{path}: none of the first lines contains text ({report.examples['malformed'][0]}); correct the "
                    "file or text_key"
                )
        return inputs

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        for name, path in self.inputs():
            size = path.stat().st_size
            if path.suffix in PACKED or (size and min(max_documents, max_size) >= UNLIMITED):
                yield Part(name=name, path=str(path), size=size, documents=0)
                continue
            if max_documents >= UNLIMITED:
                yield from _parts_by_size(name, path, max_size)
                continue
            start = stop = lines = 0
            first = 1
            with open(path, "rb") as file:
                for line in itertools.chain(file, [b""]):  # the empty line ends the last part
                    enough = not line or lines >= max_documents or stop + len(line) - start > max_size
                    if lines and enough:
                        place = {"size": stop - start, "start": start, "stop": stop, "first": first}
                        yield Part(name=name, path=str(path), documents=lines, **place)
                        start, first, lines = stop, first + lines, 0
                    stop += len(line)
                    lines += 1

    def numbered(
        self, part: Part, *, columns: list[str] | None = None, strict: bool = False
    ) -> Iterator[tuple[int, Row | str]]:
        position = part.start
        with open_lines(part.path) as file:
            if part.start:
                file.seek(part.start)
            for number, line in enumerate(whole_lines(file, part.path), start=part.first):
                position += len(line)
                if not line.isspace():
                    yield number, json_object(line, strict=strict)
                if part.stop and position >= part.stop:
                    return
        if part.size and position < part.stop:
            raise ValueError(f"{part.path} became shorter during the run: start over when the file is complete")


@dataclass(frozen=True, kw_only=True)
class ParquetSource(RecordSource):
    """Parquet files as a source: one document per row, read by row group; null is malformed. Requires pyarrow."""

    kind: ClassVar[str] = "parquet"
    _numbering: ClassVar[str] = ": row "

    def check_files(self) -> None:
        for _, path in self.inputs():
            parquet_file(path).close()

    def check(self) -> list[tuple[str, Path]]:
        types = pyarrow_module().types
        inputs = self.inputs()
        for _, path in inputs:
            texts = []
            for item in parquet_file(path).schema_arrow:
                kind = item.type.value_type if types.is_dictionary(item.type) else item.type
                if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
                    texts.append(item.name)
            if self.text_key not in texts:
                raise ValueError(
                    f"{path} has no string column {self.text_key!r}: set text_key; {nearest(self.text_key, texts)}"
                )
        return inputs

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        for name, path in self.inputs():
            first = 1
            with parquet_file(path) as file:
                for number in range(file.metadata.num_row_groups):
                    group = file.metadata.row_group(number)
                    place = {"size": group.total_byte_size, "start": number, "first": first}
                    yield Part(name=name, path=str(path), documents=group.num_rows, **place)
                    first += group.num_rows

    def numbered(
        self, part: Part, *, columns: list[str] | None = None, strict: bool = False
    ) -> Iterator[tuple[int, Row | str]]:
        pyarrow = pyarrow_module()
        number = part.first
        try:
            with pyarrow.parquet.ParquetFile(part.path) as file:
                for batch in file.iter_batches(batch_size=1024, row_groups=[part.start], columns=columns):
                    for row in _readable_rows(batch):
                        yield number, row if isinstance(row, str) else table_row(row)
                        number += 1
        except (OSError, OverflowError, pyarrow.ArrowInvalid) as error:
            raise ValueError(f"{part.path} cannot be read to its end ({error}): copy or create it again") from error


@dataclass(frozen=True, kw_only=True)
class TextSource(Source):
    """Text files, given as paths and globs, as a source: one document per file; files must be UTF-8."""

    kind: ClassVar[str] = "text"
    path: Strings

    def inputs(self) -> list[tuple[str, Path]]:
        return _named_files(self.path, self.kind)

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        text = file_text(part, report)
        if text is None:
            raise ValueError(
                f"text source: a file is not text ({report.summary()}); convert it to UTF-8, or skip it with a "
                "'tree' source"
            )
        yield Document(part.name, text)


@dataclass(frozen=True, kw_only=True)
class TreeSource(Source):
    """Files below a directory as a source, one document each; binary, undecodable and unreadable files are skipped.

    A glob may match a file's path below `path` (where `*` also matches `/`) or its name; an exclude glob may also match
    a directory above it. Links to directories are not followed.
    """

    kind: ClassVar[str] = "tree"
    path: Annotated[str, Field(min_length=1)]
    include: Strings = ("*",)
    exclude: Strings = (".git", ".hg", ".svn", ".venv", "__pycache__", "node_modules")

    def inputs(self) -> list[tuple[str, Path]]:
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise ValueError(f"tree source: path={root} is not a directory: set it to an existing one")
        files = walk(
            root,
            lambda name: matches(name, self.include) and not matches(name, self.exclude),
            skip_directories=self.exclude,
        )
        if not files:
            raise ValueError(
                f"tree source: include={list(self.include)} and exclude={list(self.exclude)} select no file below "
                f"{root}: change them, or set path to another directory"
            )
        return files


def record_source(paths: tuple[str, ...], kind: str | None, where: str) -> RecordSource:
    """Return a source of records in jsonl or parquet files; a `kind` of None is inferred from the file names.

    Raises:
        ValueError: the names mix .parquet and others; the message begins with `where`.
    """
    if kind is None:
        kinds = {"parquet" if path.endswith(".parquet") else "jsonl" for path in paths}
        if len(kinds) != 1:
            raise ValueError(f"{where}: path is empty or mixes .parquet with other files; use one source for each")
        kind = kinds.pop()
    return (ParquetSource if kind == "parquet" else JsonlSource)(path=paths)


def value_at(record: Mapping[str, Any], key: str) -> Any:
    """Return the value under a key or a dotted path of keys such as `metadata.task`; None if it does not exist."""
    if key in record or "." not in key:
        return record.get(key)
    return at(record, key)


def table_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return an Arrow table's row without the nulls in its structs: Arrow adds keys that only other rows have, as null.

    JSONL rows do not pass through here, as their nulls are values, such as a JSON schema's `const: null`.
    """

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nulls(item) for key, item in value.items() if item is not None}
        return [without_nulls(item) for item in value] if isinstance(value, list) else value

    return {name: without_nulls(value) for name, value in row.items()}


def outside(folder: Path, inputs: Iterable[Path]) -> None:
    """Raise ValueError if an input lies in a folder that the job empties."""
    for path in inputs:
        if folder.resolve() in path.resolve().parents:
            raise ValueError(f"{path} is inside {folder}, which the job empties: move it, or choose another output")


def find_files(patterns: Collection[str], where: str) -> list[Path]:
    """Find the files that paths and globs match, without duplicates, in pattern order and sorted within each pattern.

    Raises:
        ValueError: a pattern matches nothing or names a directory, or no file is found; the message begins with
            `where`.
    """
    if not patterns:
        raise ValueError(f"{where}: no file is named; name at least one")
    files: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise ValueError(f"{where}: {path} is a directory; name its files, such as {path / '*'}")
        there = [path] if path.is_file() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if missing := [match for match in there if not match.exists()] or ([] if there else [path]):
            raise ValueError(f"{where}: file {missing[0]} does not exist; correct its path")
        files |= dict.fromkeys(match.absolute() for match in there if match.is_file())
    if not files:
        raise ValueError(f"{where}: {list(patterns)} matches only directories; name their files")
    return list(files)


def _named_files(patterns: Collection[str], kind: str) -> list[tuple[str, Path]]:
    """Return (path below the common directory, path) of the files that paths and globs match, sorted.

    `kind` is the kind of the source, for error messages.
    """
    files = find_files(patterns, f"{kind} source")
    common = Path(os.path.commonpath([path.parent for path in files]))
    return sorted((path.relative_to(common).as_posix(), path) for path in files)


def walk(root: Path, takes: Callable[[str], bool], *, skip_directories: Collection[str]) -> list[tuple[str, Path]]:
    """List the files whose path below `root` satisfies `takes`, as sorted pairs (path below `root`, path).

    Directories that match a glob in `skip_directories` are not entered.
    """
    listed = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if not matches(name, skip_directories)]
        below = directory[len(str(root)) :].replace(os.sep, "/").lstrip("/")
        for file in files:
            name = f"{below}/{file}" if below else file
            # The name is tested first, which is cheaper; isfile excludes pipes.
            if takes(name) and os.path.isfile(os.path.join(directory, file)):
                listed.append((name, Path(directory, file)))
    return sorted(listed)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a path or its last component matches one of the globs."""
    last = name.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (name, last))


def json_object(line: bytes, *, strict: bool = False) -> Row | str:
    """Return the JSON object on a line (see `read_json`), or the reason why the line is malformed."""
    try:
        record = read_json(line, strict=strict)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    return record if isinstance(record, dict) else f"not a JSON object but a {type(record).__name__}"


def well_formed(row: Row | str, place: str) -> Row:
    """Return a row of `RecordSource.placed`; raises ValueError if it is a reason (string) instead of a row."""
    if isinstance(row, str):
        raise ValueError(f"{place}: {row}; correct or remove this record")
    return row


def _readable_rows(batch: Any) -> list[Row | str]:
    """Return the rows of an Arrow batch; a row that is not UTF-8 is replaced by an error message."""
    try:
        return cast(list[Row | str], batch.to_pylist())
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [f"not UTF-8 ({error})"]
        return [row for n in range(len(batch)) for row in _readable_rows(batch.slice(n, 1))]


def pyarrow_module(what: str = "Parquet files require") -> ModuleType:
    """Import and return pyarrow with `pyarrow.parquet`; raises ValueError, beginning with `what`, if missing."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise ValueError(f"{what} pyarrow: pip install 'nemo_ext[data]' ({error})") from error


def parquet_file(path: Path) -> Any:
    """Open a Parquet file; raises ValueError if it is not one or pyarrow is missing."""
    pyarrow = pyarrow_module()
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable Parquet file ({error}): create it again") from None


def open_lines(path: str) -> IO[bytes]:
    """Open a file of UTF-8 lines: plain, .gz or .zst; raises ValueError if the file appears to be UTF-16 or UTF-32."""
    opened = gzip.open if path.endswith(".gz") else open
    packed: Any = opened(path, "rb")
    file = io.BufferedReader(_Zstandard(packed), 1 << 20) if path.endswith(".zst") else packed
    try:
        encoding = encoding_hint(file.peek(4))
    except DAMAGED:
        encoding = ""  # reported when the file is read
    if encoding:
        file.close()
        raise ValueError(
            f"{path} is not UTF-8{encoding}: convert it, for example with iconv -f {encoding[-7:-1]} -t UTF-8"
        )
    return cast(IO[bytes], file)


def _parts_by_size(name: str, path: Path, max_size: int) -> Iterator[Part]:
    """Yield the parts of a plain file as `JsonlSource.parts` does without `max_documents`, in less time."""
    start, first = 0, 1
    data = bytearray(min(max_size, path.stat().st_size))
    with open(path, "rb") as file:
        while size := file.readinto(data):
            if file.peek(1):
                # More follows: end after the last complete line, or after one line that is longer than max_size.
                size = data.rfind(b"\n", 0, size) + 1 or size + len(file.readline())
                file.seek(start + size)
            lines = data.count(b"\n", 0, size) + (data[size - 1 : size] != b"\n")
            place = {"size": size, "start": start, "stop": start + size, "first": first}
            yield Part(name=name, path=str(path), documents=lines, **place)
            start, first = start + size, first + lines


def utf8_text(path: Path) -> str:
    """Return the text of a UTF-8 file (plain, .gz or .zst), without its byte order mark.

    Raises:
        ValueError: the file is not UTF-8, or cannot be read.
    """
    try:
        with open_lines(str(path)) as file:
            return file.read().decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}: convert it to UTF-8") from None
    except DAMAGED as error:
        raise ValueError(f"{path} cannot be read ({error}): copy it again") from None


class _Zstandard(io.RawIOBase):
    """Decompressing reader of a .zst file with any window size. Unlike zstandard's reader, it detects truncated files.

    Raises:
        EOFError: the last frame is truncated.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame: Any = None
        self._packed, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            packed = self._packed or self._file.read(1 << 16)
            if not packed and self._frame is not None:
                raise EOFError("the last frame is truncated")
            if not packed:
                return 0
            frame = self._frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._content = memoryview(frame.decompress(packed))
            self._frame, self._packed = (None, frame.unused_data) if frame.eof else (frame, b"")
        size = min(len(buffer), len(self._content))
        buffer[:size], self._content = self._content[:size], self._content[size:]
        return size


def whole_lines(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Yield the lines of a file; raises ValueError naming `path` if its compressed data are damaged."""
    try:
        yield from file
    except DAMAGED as error:
        raise ValueError(f"{path} cannot be read to its end ({error}): copy or compress it again") from error
