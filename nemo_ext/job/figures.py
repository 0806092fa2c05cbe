"""Key figures of a run, as shown in pipeline reports."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Key figures of a run.

    Attributes:
        text: loss, reward or benchmark accuracy, as a string; "" for jobs without figures.
        tokens: number of tokens it trained on, including prompts; None if unknown.
        step: newest logged step; None for jobs without steps.
        target: total number of steps; None if unknown.
    """

    text: str = ""
    tokens: int | None = None
    step: int | None = None
    target: int | None = None
