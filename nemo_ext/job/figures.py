"""Key figures of a run, for reports of pipelines."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How a run went.

    Attributes:
        text: its key figures: loss, reward or accuracy of benchmarks; "" for jobs that have none.
        tokens: tokens that it trained on, with those of prompts; None if unknown.
        step: newest step that it logged; None for jobs without steps.
        target: number of its steps; None if unknown.
    """

    text: str = ""
    tokens: int | None = None
    step: int | None = None
    target: int | None = None
