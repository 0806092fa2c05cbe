"""What a step is done with: its rows, its folder, and what is counted."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext.synthesis.expressions import TEMPLATES
from nemo_ext.synthesis.rows import ID, Row, RowFile

_EXAMPLES = 20


@dataclass
class Counts:
    """What a step counted.

    Attributes:
        rows, made: rows before and after it.
        dropped: rows that left, by reason.
        examples: the first ids of each reason, with what was found.
        numbers: what else is said of the step.
    """

    rows: int = 0
    made: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """What `of` reads back."""
        return {**vars(self), "dropped": dict(self.dropped.most_common())}

    @classmethod
    def of(cls, held: Mapping[str, Any]) -> "Counts":
        """Counts as a step's record holds them."""
        return cls(**{**held, "dropped": Counter(held["dropped"])})


@dataclass
class Context:
    """A step at work.

    Attributes:
        name: the step's name.
        folder: its folder.
        rows: the rows before it.
        seed: seed of all decisions.
        counts: what it has counted.
    """

    name: str
    folder: Path
    rows: RowFile
    seed: int
    counts: Counts = field(default_factory=Counts)

    def names(self, row: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """What templates and expressions see: the row's columns, all of them as `row`, the seed, and more."""
        return {**row, **more, "seed": self.seed, "row": row}

    def value(self, key: str, source: str, names: Mapping[str, Any]) -> Any:
        """Value of an expression; see `Templates.value`."""
        return TEMPLATES.value(source, names, f"steps.{self.name}.{key}", self._place(names))

    def text(self, key: str, source: str, names: Mapping[str, Any]) -> str:
        """Text of a template, without white space around it."""
        return TEMPLATES.text(source, names, f"steps.{self.name}.{key}", self._place(names)).strip()

    def columns(self, key: str, section: Mapping[str, str], names: Mapping[str, Any]) -> Row:
        """Columns of a section; later expressions may name earlier columns."""
        seen, made = dict(names), Row()
        for name, source in section.items():
            seen[name] = made[name] = self.value(f"{key}.{name}", source, seen)
        return made

    def applies(self, when: str | None, row: Mapping[str, Any]) -> bool:
        """True if the step is for the row."""
        return when is None or bool(self.value("when", when, self.names(row)))

    def satisfies(self, row: Mapping[str, Any], require: Mapping[str, str], names: Mapping[str, Any]) -> bool:
        """True if all of a section `require` is true; else the row is counted as dropped for the first that is not."""
        for reason, source in require.items():
            if not self.value(f"require.{reason}", source, names):
                self.drop(row, reason)
                return False
        return True

    def drop(self, row: Mapping[str, Any], reason: str, detail: str = "") -> None:
        """Count a row that leaves."""
        self.counts.dropped[reason] += 1
        examples = self.counts.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{row[ID]}{f': {detail}' if detail else ''}"[:200])

    def each(self) -> Iterator[Row]:
        """The rows before the step, counted."""
        for row in self.rows:
            self.counts.rows += 1
            yield row

    def _place(self, names: Mapping[str, Any]) -> str:
        row = names.get("row") or {}
        return f"row {row[ID]}" if ID in row else ""
