"""Curation funnel: documents, bytes and tokens into and out of each stage, and dropped documents by reason."""

import heapq
from dataclasses import dataclass, field

from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.seeds import digest

EXAMPLES = 20
"""Number of examples kept per reason: those with the smallest hashes, so that the order of work does not matter."""


@dataclass
class Amount:
    """Number of documents, number of UTF-8 bytes in their text, and number of tokens (0 where they are not counted)."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, other: "Amount") -> None:
        """Add another amount to this one."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.tokens += other.tokens


@dataclass
class Reason:
    """Documents dropped for one reason; `examples` are (hash, document id, detail)."""

    amount: Amount = field(default_factory=Amount)
    examples: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, other: "Reason") -> None:
        """Add the documents that were dropped for the same reason in another unit of the input."""
        self.amount.add(other.amount)
        self.examples = heapq.nsmallest(EXAMPLES, [*self.examples, *other.examples])


@dataclass
class Through:
    """Counts for one stage: documents received, kept and changed, and documents dropped, keyed by reason."""

    came: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    changed: int = 0
    dropped: dict[str, Reason] = field(default_factory=dict)

    def drop(self, reason: str, amount: Amount, document: str, detail: str) -> None:
        """Count a dropped document, and keep it as an example if its hash is among the smallest."""
        counts = self.dropped.setdefault(reason, Reason())
        counts.amount.add(amount)
        document, detail = (text.encode(errors="replace").decode() for text in (document, detail))
        entry = (digest(0, document, detail), document, detail)
        if len(counts.examples) < EXAMPLES:
            heapq.heappush(counts.examples, _negated(entry))
        else:
            heapq.heappushpop(counts.examples, _negated(entry))

    def finish(self) -> None:
        """Convert the heaps of examples that `drop` filled to sorted lists."""
        for reason in self.dropped.values():
            reason.examples = sorted(map(_negated, reason.examples))

    def add(self, other: "Through") -> None:
        """Add the stage's counts from another unit of the input."""
        self.came.add(other.came)
        self.kept.add(other.kept)
        self.changed += other.changed
        for name, reason in other.dropped.items():
            self.dropped.setdefault(name, Reason()).add(reason)


def _negated(entry: tuple[int, str, str]) -> tuple[int, str, str]:
    """Negate the hash of an example, so that `heapq`, which removes the smallest item, removes the largest hash."""
    return -entry[0], entry[1], entry[2]


@dataclass
class Counts:
    """Counts of a pass over a unit or stream: records read, documents by stage, and documents written by folder."""

    read: ReadReport = field(default_factory=ReadReport)
    stages: dict[str, Through] = field(default_factory=dict)
    written: dict[str, Amount] = field(default_factory=dict)

    def stage(self, name: str) -> Through:
        """Return the counts of a stage, adding them if missing."""
        return self.stages.setdefault(name, Through())

    def add(self, other: "Counts") -> None:
        """Add the counts of another pass or unit."""
        self.read.add(other.read)
        for name, through in other.stages.items():
            self.stage(name).add(through)
        for place, amount in other.written.items():
            self.written.setdefault(place, Amount()).add(amount)
