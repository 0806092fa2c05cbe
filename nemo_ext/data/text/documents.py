"""Documents, and what every source of them is.

A source is a frozen dataclass that lists its input in a fixed order (`parts`, cheap) and reads one part at a time
(`read`), so any worker can read any part and the documents do not depend on who read them. What applies to the
stream as a whole, removing duplicates and stopping at `max_bytes`, is `Admission`: it sees the documents in order.
What does not become a document is counted with a reason in a `ReadReport`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

EXAMPLES_PER_REASON = 5


@dataclass(frozen=True, slots=True)
class Document:
    """One text and a name for it that is unique in its source and does not hold the machine's paths."""

    id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a source that is read on its own: a file, some lines of it, or a Parquet row group.

    `size` is in bytes of input; `documents` is how many documents it should give (0: not known). `start` and
    `stop` are byte offsets in a JSONL file (stop 0: to the end), `start` is the row group in a Parquet file,
    and `first` is the number of the first line or row.
    """

    name: str
    path: str
    size: int
    documents: int = 1
    start: int = 0
    stop: int = 0
    first: int = 1


@dataclass
class ReadReport:
    """What a reader met: records seen, and those skipped by reason with the first few places of each."""

    records: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def skip(self, reason: str, where: str = "", *, count: int = 1) -> None:
        """Count a record that gave no document; `where` is kept for the first few, and left out if none is expected."""
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
        """One line: `3 malformed (a.jsonl:7: ...; ...), 12 duplicate`, or "nothing"."""
        said = []
        for reason, count in sorted(self.skipped.items()):
            places = self.examples.get(reason, [])[:examples]
            more = "; ..." if places and count > len(places) else ""
            said.append(f"{count:,} {reason}" + (f" ({'; '.join(places)}{more})" if places else ""))
        return ", ".join(said) or "nothing"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Options that every kind has.

    max_bytes: Keep documents, in order, while their UTF-8 text is at most this long in total (None: all).
    deduplicate: Drop byte-identical documents after the first.
    """

    kind: ClassVar[str] = ""
    max_bytes: int | None = None
    deduplicate: bool = True

    def describe(self) -> dict[str, object]:
        """The mapping that `load_source` turns back into this source."""
        return {"kind": self.kind} | dataclasses.asdict(self)

    def inputs(self) -> list[tuple[str, Path]]:
        """The (name, path) of every input file, sorted by name.

        Raises:
            ValueError: If there is none, or a named one does not exist.
        """
        raise NotImplementedError

    def check(self) -> list[tuple[str, Path]]:
        """Find out cheaply whether the source can be read, and return its `inputs`.

        Raises:
            ValueError: Naming the file and what is wrong with it.
        """
        return self.inputs()

    def fingerprint(self, inputs: list[tuple[str, Path]]) -> str:
        """Digest of the input files' names, sizes and modification times, to notice that the data changed."""
        rows = []
        for name, path in inputs:
            status = path.stat()
            rows.append([name, status.st_size, status.st_mtime_ns if self._times_matter else 0])
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def parts(self, *, max_documents: int, max_size: int) -> Iterator[Part]:
        """The source in pieces of at most so many documents and input bytes, where its format can be cut."""
        for name, path in self.inputs():
            yield Part(name=name, path=str(path), size=path.stat().st_size)

    def read(self, part: Part, report: ReadReport) -> Iterator[Document]:
        """Read the documents of one part in order and count in `report` what is skipped."""
        raise NotImplementedError

    def finish(self, report: ReadReport) -> None:
        """Judge a fully read source: ValueError when too much of it was bad."""

    # Installed files get new times with every installation; the same version has the same content.
    _times_matter: ClassVar[bool] = True


class Admission:
    """Decides in stream order which documents are kept: no byte-identical duplicates, at most `max_bytes`.

    Duplicates are recognised by a 16-byte digest: about 100 bytes of memory a document while reading.
    """

    def __init__(self, source: Source) -> None:
        self._max_bytes = source.max_bytes
        self._seen: set[bytes] | None = set() if source.deduplicate else None
        self.size = 0
        self.full = False

    def admit(self, digest: bytes, size: int, report: ReadReport) -> bool:
        """Say whether the next document of `size` bytes is kept; `full` tells that `max_bytes` is reached."""
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


def readable(source: Source, part: Part, report: ReadReport) -> Iterator[tuple[Document, bytes]]:
    """The documents of a part with their UTF-8 bytes; blank and unencodable ones are only counted."""
    for document in source.read(part, report):
        try:
            data = document.text.encode()
        except UnicodeEncodeError as error:
            report.skip("malformed", f"{document.id}: {error.reason} at character {error.start}")
            continue
        if document.text.isspace() or not data:
            report.skip("empty", document.id)
            continue
        yield document, data


def document_digest(text: bytes) -> bytes:
    """Digest (16 bytes) by which byte-identical documents are recognised."""
    return hashlib.blake2b(text, digest_size=16).digest()


def split_position(seed: int, document_id: str) -> int:
    """Place of a document in [0, 2**64), the same for ever: below `validation_share` of it is validation."""
    name = f"{seed}\0{document_id}".encode(errors="surrogateescape")  # file names need not be UTF-8
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
