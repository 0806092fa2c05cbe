"""Context of a step: its input rows, folder, templates and counts."""

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
    """Row counts of a step, and further numbers for the report.

    Attributes:
        rows, made: numbers of rows before and after the step.
        dropped: mapping from reason to number of dropped rows.
        examples: mapping from reason to the ids of the first rows dropped for it, with details.
        numbers: further numbers for the report.
    """

    rows: int = 0
    made: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the counts as a JSON value, for `from_record`."""
        return {**vars(self), "dropped": dict(self.dropped.most_common())}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Counts":
        """Restore counts from the value returned by `record`."""
        return cls(**{**record, "dropped": Counter(record["dropped"])})


@dataclass
class Context:
    """Context in which a step is executed.

    Attributes:
        name: the step's name.
        folder: the step's folder.
        rows: the step's input rows.
        seed: seed for all random decisions.
        counts: counts so far.
    """

    name: str
    folder: Path
    rows: RowFile
    seed: int
    counts: Counts = field(default_factory=Counts)

    def names(self, row: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Return the variables for templates: the row's columns, `row` (the whole row), `seed`, and those in `more`."""
        return {**row, **more, "seed": self.seed, "row": row}

    def value(self, key: str, source: str, names: Mapping[str, Any]) -> Any:
        """Evaluate the expression `source` with the variables `names` (see `Templates.value`).

        `key` is the step's key that contains the expression, for error messages.
        """
        return TEMPLATES.value(source, names, f"steps.{self.name}.{key}", self._place(names))

    def text(self, key: str, source: str, names: Mapping[str, Any]) -> str:
        """Render the template `source` with the variables `names`; return it without surrounding whitespace.

        `key` is the step's key that contains the template, for error messages.
        """
        return TEMPLATES.text(source, names, f"steps.{self.name}.{key}", self._place(names)).strip()

    def columns(self, key: str, section: Mapping[str, str], names: Mapping[str, Any]) -> Row:
        """Evaluate a section of the step, and return the new columns.

        Args:
            key: the section's key, for error messages.
            section: mapping from new columns to expressions; later ones may refer to earlier columns.
            names: variables of the expressions.
        """
        variables, columns = dict(names), Row()
        for name, source in section.items():
            variables[name] = columns[name] = self.value(f"{key}.{name}", source, variables)
        return columns

    def applies(self, when: str | None, row: Mapping[str, Any]) -> bool:
        """Return whether the step applies to a row: the condition `when`, an expression, holds or is None."""
        return when is None or bool(self.value("when", when, self.names(row)))

    def satisfies(self, row: Mapping[str, Any], require: Mapping[str, str], names: Mapping[str, Any]) -> bool:
        """Return whether a row satisfies all conditions; if not, count it as dropped because of the first that fails.

        Args:
            row: the row.
            require: mapping from the reason for dropping the row to the condition, an expression.
            names: variables of the conditions.
        """
        for reason, source in require.items():
            if not self.value(f"require.{reason}", source, names):
                self.drop(row, reason)
                return False
        return True

    def drop(self, row: Mapping[str, Any], reason: str, detail: str = "") -> None:
        """Count a row as dropped for a reason, and keep its id and the detail as an example if there are few so far."""
        self.counts.dropped[reason] += 1
        examples = self.counts.examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(f"{row[ID]}{f': {detail}' if detail else ''}"[:200])

    def read_rows(self) -> Iterator[Row]:
        """Yield the input rows, counting them."""
        for row in self.rows:
            self.counts.rows += 1
            yield row

    def _place(self, names: Mapping[str, Any]) -> str:
        row = names.get("row") or {}
        return f"row {row[ID]}" if ID in row else ""
