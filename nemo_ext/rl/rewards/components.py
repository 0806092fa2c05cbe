"""A reward as a weighted sum of named components, each within a declared range."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_ext.job.settings import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of a reward.

    Attributes:
        name: name in values and metrics.
        weight: factor applied to the clipped value; may be negative.
        low: lower bound of the value before weighting.
        high: upper bound of the value before weighting.

    Raises:
        ValueError: the range is empty, or the weight or a bound is not finite.
    """

    name: str
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.weight, self.low, self.high))) or self.low > self.high:
            raise ValueError(
                f"reward component {self.name!r}: weight, low and high must be finite, with low <= high, "
                f"not weight={self.weight}, low={self.low}, high={self.high}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Reward of one response.

    Attributes:
        total: sum of `parts`.
        parts: mapping from component names to clipped and weighted values, for metrics.
    """

    total: float
    parts: Mapping[str, float]


def combine(components: Sequence[Component], values: Mapping[str, float]) -> Reward:
    """Return the weighted sum of values, each clipped to its component's range.

    Raises:
        ValueError: components share a name, or a value is missing, NaN or for an unknown component.
    """
    names = [component.name for component in components]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"reward components must have distinct names, but these occur twice: {', '.join(sorted(twice))}"
        )
    for name in values:
        if name not in names:
            raise ValueError(f"unknown reward component {name!r}: {nearest(name, names)}")
    parts = {}
    for component in components:
        if component.name not in values:
            raise ValueError(
                f"reward component {component.name!r} has no value: values are given only for {sorted(values)}"
            )
        value = values[component.name]
        # NaN passes through min and max, and a single one makes all advantages of its group NaN.
        if math.isnan(value):
            raise ValueError(f"reward component {component.name!r}: the value is NaN")
        parts[component.name] = component.weight * min(max(float(value), component.low), component.high)
    return Reward(total=sum(parts.values()), parts=parts)
