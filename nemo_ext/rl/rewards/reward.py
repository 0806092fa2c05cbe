"""Reward of one response, with its parts."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Reward of one response.

    Attributes:
        total: the reward; the sum of `parts`, if there are any.
        parts: mapping from names to weighted values, for metrics.
    """

    total: float
    parts: Mapping[str, float]

    @classmethod
    def of_parts(cls, **parts: float) -> "Reward":
        """Return the reward that is the sum of its parts."""
        return cls(total=sum(parts.values()), parts=parts)
