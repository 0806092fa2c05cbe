"""Measurements: one line of JSON for every unit and every plan. No torch."""

from dataclasses import dataclass

REFERENCE, EVERYTHING = "as it is", "given"
"""Names of the lines for the unchanged model and for the given plan."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Loss of the model with some units in FP8, means over tokens.

    Attributes:
        name: name of a unit in FP8 alone, of a group of them (`all M>*`), or of a plan.
        kl: nats per token, KL(the unchanged model || the model in FP8) of the next token.
        loss: language model loss, nats per token.
        tokens: number of tokens that it was measured on.
    """

    name: str
    kl: float
    loss: float
    tokens: int


def lost(score: Sensitivity, reference: Sensitivity, metric: str) -> float:
    """The loss by a metric of `Settings`, nats per token."""
    return score.kl if metric == "kl" else score.loss - reference.loss
