"""A verifier's verdict on one response."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["correct", "wrong", "error"]
Metric = float | Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on a response: correct, wrong, or error if the verifier failed.

    Attributes:
        outcome: `error` if the verifier failed, for example at a time limit or because a judge did not answer; a
            malformed answer is `wrong`.
        score: number from 0 to 1; 1 if and only if `outcome` is correct, and between 0 and 1 for partial solutions.
        reason: short explanation for reports; "" if correct.
        answer: answer as found in the response and compared with the reference; None if none was found.
        more: further metrics for reports, such as {math_verify: 1.0}; no reward uses them. A pair is a numerator and a
            denominator, each summed over all samples, such as {cells: (5, 6)} for the share of all cells.
    """

    outcome: Outcome
    score: float
    reason: str = ""
    answer: str | None = None
    more: Mapping[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert 0 <= self.score <= 1 and (self.score == 1) == (self.outcome == "correct"), self

    @classmethod
    def correct(cls, answer: str | None = None) -> "Verdict":
        """Return the verdict on a solved task."""
        return cls(outcome="correct", score=1.0, answer=answer)

    @classmethod
    def wrong(cls, reason: str, answer: str | None = None, *, score: float = 0.0) -> "Verdict":
        """Return the verdict on an unsolved or only partly solved task."""
        return cls(outcome="wrong", score=score, reason=reason, answer=answer)

    @classmethod
    def error(cls, reason: str, answer: str | None = None) -> "Verdict":
        """Return the verdict for a failure of the verifier."""
        return cls(outcome="error", score=0.0, reason=reason, answer=answer)
