"""Documents, and the base class of their sources.

A source is a frozen dataclass that lists its input in a fixed order (`parts`, which is cheap) and reads one part at a
time (`read`), so any worker can read any part with the same result. `Admission` sees the documents in order and makes
the decisions that concern the whole stream: it drops duplicates and stops at `max_bytes`. A `ReadReport` counts
skipped records by reason.
"""

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import PositiveInt

EXAMPLES_PER_REASON = 5
UNLIMITED = 1 << 60
"""Limit to pass when parts are not to be cut."""
BAD = ("malformed", "schema")
"""Reasons that count towards `max_bad_share`: not a JSON object, or not an object of the required form."""


@dataclass(frozen=True, slots=True)
class Document:
    """Text with an id, unique within its source and free of local paths; `about` holds metadata such as `url`."""

    id: str
    text: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Piece of a source that is read separately: a file, some lines of a file, or a Parquet row group.

    `size` is the number of input bytes; `documents` is the expected number of documents (0: unknown). `start` and
    `stop` are byte offsets in a JSONL file (`stop` 0: to the end); in a Parquet file, `start` is the row group. `first`
    is the number of the first line or row.
    """

    name: str
    path: str
    size: int
    documents: int = 1
    start: int = 0
    stop: int = 0
    first: int = 1


@dataclass(frozen=True)
class Unit:
    """Parts of a stream that are processed together (`nemo_ext.job.units`), numbered across all streams."""

    number: int
    stream: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Number of input bytes."""
        return sum(part.size for part in self.parts)


@dataclass
class ReadReport:
    """A reader's counts: records read, and skipped records by reason, with the first few places of each."""

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, where: str = "", *, count: int = 1) -> None:
        """Count a skipped record under `reason`, and keep its place `where` for each reason's first few records."""
        self.skipped[reason] = self.skipped.get(reason, 0) + count
        if where and len(places := self.examples.setdefault(reason, [])) < EXAMPLES_PER_REASON:
            places.append(where)

    def add(self, other: "ReadReport") -> None:
        """Add the counts of a later part of the same source."""
        self.records += other.records
        for reason, count in other.skipped.items():
            self.skip(reason, count=count)
        for reason, places in other.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + places)[:EXAMPLES_PER_REASON]

    def summary(self, *, examples: int = EXAMPLES_PER_REASON) -> str:
        """Return the skipped records on one line, `3 malformed (a.jsonl:7: ...; ...), 12 duplicate`, or "nothing"."""
        reasons = []
        for reason, count in sorted(self.skipped.items()):
            places = self.examples.get(reason, [])[:examples]
            more = "; ..." if places and count > len(places) else ""
            reasons.append(f"{count:,} {reason}" + (f" ({'; '.join(places)}{more})" if places else ""))
        return ", ".join(reasons) or "nothing"

    def check_bad_share(self, where: str, most: float) -> None:
        """Raise ValueError if all records, or more than a fraction `most`, were skipped as malformed (see `BAD`)."""
        bad = sum(self.skipped.get(reason, 0) for reason in BAD)
        if bad > most * self.records or bad == self.records > 0:
            places = [place for reason in BAD for place in self.examples.get(reason, [])]
            excess, remedy = f", more than max_bad_share={most}", ", or raise max_bad_share"
            if bad == self.records:
                excess = remedy = ""
            raise ValueError(
                f"{where}: {bad:,} of {self.records:,} records are malformed{excess} ({'; '.join(places[:3])}); "
                f"correct the files or the keys in the config{remedy}"
            )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Base class of sources, with the options common to all kinds.

    max_bytes: Maximum total size of the documents, in bytes of UTF-8 text; later ones are not read (None: no limit).
    deduplicate: Whether to drop all but the first of byte-identical documents.
    """

    kind: ClassVar[str] = ""
    max_bytes: PositiveInt | None = None
    deduplicate: bool = True

    def describe(self) -> dict[str, object]:
        """Return a mapping from which `load_source` rebuilds this source."""
        return {"kind": self.kind} | dataclasses.asdict(self)

    def identity(self) -> dict[str, object]:
        """Return everything that determines the documents: the settings, and a fingerprint of the input files."""
        return {**self.describe(), "files": self.fingerprint(self.inputs())}

    def inputs(self) -> list[tuple[str, Path]]:
        """List (name, path) of all input files, sorted by name.

        Raises:
            ValueError: There are no input files, or a file in the settings does not exist.
        """
        raise NotImplementedError

    def check(self) -> list[tuple[str, Path]]:
        """Run a cheap check that the source can be read, and return its `inputs`.

        Raises:
            ValueError: A file cannot be read.
        """
        return self.inputs()

    def fingerprint(self, inputs: list[tuple[str, Path]]) -> str:
        """Digest of the input files' names, sizes and modification times, for detecting changed data."""
        rows = []
        for name, path in inputs:
            status = path.stat()
            rows.append([name, status.st_size, status.st_mtime_ns if self._times_matter else 0])
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        """Split the source into parts within the limits on documents and input bytes; by default, one part per file."""
        for name, path in self.inputs():
            yield Part(name=name, path=str(path), size=path.stat().st_size)

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        """Yield the documents of a part in order, counting skipped records; by default, the text of the part's file."""
        if (text := file_text(part, report)) is not None:
            yield Document(part.name, text)

    def finish(self, report: ReadReport) -> None:
        """Check the report after a complete read; raises ValueError if too many records are malformed."""

    # False for installed files, whose times change with every installation although the content does not.
    _times_matter: ClassVar[bool] = True


def cut(streams: Mapping[str, Source], *, max_documents: int, max_size: int) -> Iterator[Unit]:
    """Group the streams' parts into units within limits of documents and bytes; a larger part is a unit on its own."""
    number = 0
    for stream, source in streams.items():
        parts: list[Part] = []
        documents = size = 0
        for part in source.parts(max_documents=max_documents, max_size=max_size):
            if parts and (documents + part.documents > max_documents or size + part.size > max_size):
                yield Unit(number, stream, tuple(parts))
                parts, documents, size, number = [], 0, 0, number + 1
            parts.append(part)
            documents, size = documents + part.documents, size + part.size
        if parts:
            yield Unit(number, stream, tuple(parts))
            number += 1


class Admission:
    """Filter that decides in stream order what to keep: no byte-identical duplicates, at most `max_bytes` in total.

    Duplicates are recognised by 16-byte digests, which take about 100 bytes of memory per document.
    """

    def __init__(self, source: Source) -> None:
        self._max_bytes = source.max_bytes
        self._seen: set[bytes] | None = set() if source.deduplicate else None
        self.size = 0
        self.full = False

    def admit(self, digest: bytes, size: int, report: ReadReport) -> bool:
        """Return whether the next document, of `size` bytes, is kept; sets `full` once `max_bytes` is reached."""
        if self.full:
            return False
        if self._seen is not None and digest in self._seen:
            report.skip("duplicate")
            return False
        if self._max_bytes is not None and self.size + size > self._max_bytes:
            self.full = True
            return False
        if self._seen is not None:
            self._seen.add(digest)
        self.size += size
        return True


def shuffled(source: Source, report: ReadReport, *, seed: str) -> Iterator[tuple[str, bytes]]:
    """Yield text and digest of the documents that `Admission` keeps, reading parts of about 1 MB in random order."""
    parts = list(source.parts(max_documents=1000, max_size=1 << 20))
    random.Random(seed).shuffle(parts)
    admission = Admission(source)
    for part in parts:
        for document, data in readable(source, part, report):
            digest = document_digest(data)
            if admission.admit(digest, len(data), report):
                yield document.text, digest
            elif admission.full:
                return


class _WithText(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def text(self) -> str: ...


def readable(source: Source, part: Part, report: ReadReport) -> Iterator[tuple[Document, bytes]]:
    """Yield the documents of a part with their UTF-8 bytes; blank and unencodable documents are only counted."""
    return encodable(source.read(part, report), report)


def encodable[D: _WithText](documents: Iterable[D], report: ReadReport) -> Iterator[tuple[D, bytes]]:
    """Yield documents of any class with their UTF-8 bytes; blank and unencodable documents are only counted."""
    for document in documents:
        try:
            data = document.text.encode()
        except UnicodeEncodeError as error:
            report.skip("malformed", f"{document.id}: {error.reason} at character {error.start}")
            continue
        if document.text.isspace() or not data:
            report.skip("empty", document.id)
            continue
        yield document, data


def file_text(part: Part, report: ReadReport) -> str | None:
    """Return the text of a UTF-8 file without its byte order mark; None if unreadable, which is counted by reason."""
    report.records += 1
    try:
        data = Path(part.path).read_bytes()
        if b"\0" not in data:
            return data.decode().removeprefix("\ufeff")
        report.skip("binary", f"{part.path}{encoding_hint(data)}")
    except UnicodeDecodeError as error:
        report.skip("undecodable", f"{part.path}: byte {error.start}{encoding_hint(data)}")
    except OSError as error:
        report.skip("unreadable", f"{part.path}: {error.strerror}")
    return None


def encoding_hint(start: bytes) -> str:
    """Return a phrase, for messages, that names a text's likely encoding; "" if it may be UTF-8."""
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")) or start[:4].count(0) == 3:
        return " (it seems to be UTF-32)"
    utf16 = start.startswith((b"\xff\xfe", b"\xfe\xff")) or (start[0:4:2] == b"\0\0") != (start[1:4:2] == b"\0\0")
    return " (it seems to be UTF-16)" if utf16 else ""


def document_digest(text: bytes) -> bytes:
    """Digest (16 bytes) that identifies byte-identical documents."""
    return hashlib.blake2b(text, digest_size=16).digest()


def split_position(seed: int, document_id: str) -> int:
    """Hash a document id to a position in [0, 2**64); the first `validation_share` of this range is for validation."""
    name = f"{seed}\0{document_id}".encode(errors="surrogateescape")  # file names need not be UTF-8
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
