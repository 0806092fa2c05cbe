"""Verdict of a verifier on one response."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["correct", "wrong", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on a response: correct, wrong, or error if it cannot be told.

    Attributes:
        outcome: `error` where the verifier itself failed (its time limit, a judge that did not answer), which is
            not the response's fault; an answer that cannot be read is `wrong`.
        score: from 0 to 1; 1 if and only if `outcome` is correct, between them where parts of a task are solved.
        reason: short explanation for reports; "" if correct.
        answer: compared text as found in the response; None if there was none.
        more: further numbers for reports, such as {math_verify: 1.0}; no reward takes account of them.
    """

    outcome: Outcome
    score: float
    reason: str = ""
    answer: str | None = None
    more: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert 0 <= self.score <= 1 and (self.score == 1) == (self.outcome == "correct"), self

    @classmethod
    def correct(cls, answer: str | None = None) -> "Verdict":
        """The task is solved."""
        return cls(outcome="correct", score=1.0, answer=answer)

    @classmethod
    def wrong(cls, reason: str, answer: str | None = None, *, score: float = 0.0) -> "Verdict":
        """The task is not solved, or only in part."""
        return cls(outcome="wrong", score=score, reason=reason, answer=answer)

    @classmethod
    def error(cls, reason: str, answer: str | None = None) -> "Verdict":
        """The verifier cannot tell."""
        return cls(outcome="error", score=0.0, reason=reason, answer=answer)
