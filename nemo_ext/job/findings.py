"""Findings of the checks that run before a job starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """Error, warning or note: one line of text, which includes the remedy."""

    kind: Literal["error", "warning", "note"]
    text: str


def errors(findings: Sequence[Finding]) -> bool:
    """True if any finding is an error."""
    return any(finding.kind == "error" for finding in findings)
