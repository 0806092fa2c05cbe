"""A reward as a weighted sum of named parts, each within its declared range."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_ext.job.settings import nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of a reward.

    Attributes:
        name: name in values and metrics.
        weight: factor of the clipped value; may be negative.
        low: lower bound of the value, before the weight.
        high: upper bound of the value, before the weight.

    Raises:
        ValueError: the range is empty, or the weight or the range is not finite.
    """

    name: str
    weight: float = 1.0
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.weight, self.low, self.high))) or self.low > self.high:
            raise ValueError(
                f"reward component {self.name!r}: weight and range must be finite, the range from low to high, "
                f"not weight={self.weight}, low={self.low}, high={self.high}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Reward of one response.

    Attributes:
        total: sum of `parts`.
        parts: clipped and weighted values by component, for metrics.
    """

    total: float
    parts: Mapping[str, float]


def combine(components: Sequence[Component], values: Mapping[str, float]) -> Reward:
    """Weighted sum of values, each clipped to its component's range.

    Raises:
        ValueError: two components have the same name, a value is missing or NaN, or belongs to no component.
    """
    names = [component.name for component in components]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"reward components: {', '.join(sorted(twice))} is there more than once")
    for name in values:
        if name not in names:
            raise ValueError(f"reward components: unknown name {name!r}: {nearest(name, names)}")
    parts = {}
    for component in components:
        if component.name not in values:
            raise ValueError(f"reward component {component.name!r}: no value; there are {sorted(values)}")
        value = values[component.name]
        # NaN passes through min and max, and one of them makes a whole group's advantages NaN.
        if math.isnan(value):
            raise ValueError(f"reward component {component.name!r}: the value is NaN")
        parts[component.name] = component.weight * min(max(float(value), component.low), component.high)
    return Reward(total=sum(parts.values()), parts=parts)


def reward_range(components: Sequence[Component]) -> tuple[float, float]:
    """Smallest and largest possible total."""
    ends = [sorted((component.weight * component.low, component.weight * component.high)) for component in components]
    return sum(low for low, _ in ends), sum(high for _, high in ends)
