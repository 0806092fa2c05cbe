"""What is measured: one line of JSON for every unit and every plan. No torch."""

from dataclasses import dataclass

REFERENCE, EVERYTHING = "as it is", "given"
"""Lines of the model as it is, and of the plan that was given."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the model loses with something in FP8, means over tokens.

    Attributes:
        name: of a unit in FP8 alone, of a group of them (`all M>*`), or of a plan.
        kl: nats a token, KL(the model as it is || the model in FP8) of the next token.
        loss: language model loss, nats a token.
        tokens: that it was measured on.
    """

    name: str
    kl: float
    loss: float
    tokens: int


def lost(score: Sensitivity, reference: Sensitivity, metric: str) -> float:
    """By a metric of `Settings`, nats a token."""
    return score.kl if metric == "kl" else score.loss - reference.loss
