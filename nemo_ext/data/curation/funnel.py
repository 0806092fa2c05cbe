"""The funnel: documents, bytes and tokens into and out of every stage, and what left it, why, with examples."""

import heapq
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.seeds import digest

EXAMPLES = 20
"""Examples that are kept of each reason: those whose hash is the smallest, so that they do not depend on order."""


@dataclass
class Amount:
    """Documents, UTF-8 bytes of their text, and its tokens (0 where none are counted)."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0

    def add(self, other: "Amount") -> None:
        """Add another amount."""
        self.documents += other.documents
        self.bytes += other.bytes
        self.tokens += other.tokens


@dataclass
class Reason:
    """What left for one reason; `examples` are [hash, id, detail]."""

    amount: Amount = field(default_factory=Amount)
    examples: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, other: "Reason") -> None:
        """Add what left elsewhere for the same reason."""
        self.amount.add(other.amount)
        self.examples = heapq.nsmallest(EXAMPLES, [*self.examples, *other.examples])


@dataclass
class Through:
    """What came into a stage and what it let through, how many documents it changed, and what left by reason."""

    came: Amount = field(default_factory=Amount)
    kept: Amount = field(default_factory=Amount)
    changed: int = 0
    dropped: dict[str, Reason] = field(default_factory=dict)

    def drop(self, reason: str, amount: Amount, document: str, detail: str) -> None:
        """Count a document that leaves."""
        own = self.dropped.setdefault(reason, Reason())
        own.amount.add(amount)
        document, detail = (text.encode(errors="replace").decode() for text in (document, detail))
        entry = (digest(0, document, detail), document, detail)
        if len(own.examples) < EXAMPLES:
            heapq.heappush(own.examples, _turned(entry))
        else:
            heapq.heappushpop(own.examples, _turned(entry))

    def finish(self) -> None:
        """Put the examples of `drop` into their order."""
        for reason in self.dropped.values():
            reason.examples = sorted(map(_turned, reason.examples))

    def add(self, other: "Through") -> None:
        """Add the counts of another unit."""
        self.came.add(other.came)
        self.kept.add(other.kept)
        self.changed += other.changed
        for name, reason in other.dropped.items():
            self.dropped.setdefault(name, Reason()).add(reason)


def _turned(entry: tuple[int, str, str]) -> tuple[int, str, str]:
    """The entry with its hash negated: the heap gives up the smallest."""
    return -entry[0], entry[1], entry[2]


@dataclass
class Counts:
    """Counts of a pass over a unit or a stream: what the reader saw, every stage, and every folder of the output."""

    read: ReadReport = field(default_factory=ReadReport)
    stages: dict[str, Through] = field(default_factory=dict)
    written: dict[str, Amount] = field(default_factory=dict)

    def of(self, name: str) -> Through:
        """Counts of a stage."""
        return self.stages.setdefault(name, Through())

    def add(self, other: "Counts") -> None:
        """Add the counts of another pass or unit."""
        self.read.add(other.read)
        for name, through in other.stages.items():
            self.of(name).add(through)
        for place, amount in other.written.items():
            self.written.setdefault(place, Amount()).add(amount)

    def as_json(self) -> dict[str, Any]:
        """The counts as JSON."""
        return asdict(self)

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Counts":
        """Counts of `as_json`."""
        stages = {}
        for name, each in found["stages"].items():
            dropped = {
                reason: Reason(Amount(**one["amount"]), [(a, b, c) for a, b, c in one["examples"]])
                for reason, one in each["dropped"].items()
            }
            stages[name] = Through(Amount(**each["came"]), Amount(**each["kept"]), each["changed"], dropped)
        written = {place: Amount(**each) for place, each in found["written"].items()}
        return Counts(ReadReport(**found["read"]), stages, written)
