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
        ValueError: empty range, or a weight or bound that is not finite.
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
        parts: clipped and weighted values by component, for metrics.
    """

    total: float
    parts: Mapping[str, float]


def combine(components: Sequence[Component], values: Mapping[str, float]) -> Reward:
    """Weighted sum of values, each clipped to its component's range.

    Raises:
        ValueError: duplicate names of components, or a value is missing, NaN or of no component.
    """
    names = [component.name for component in components]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"reward components: duplicate name {', '.join(sorted(twice))}")
    for name in values:
        if name not in names:
            raise ValueError(f"reward components: unknown name {name!r}: {nearest(name, names)}")
    parts = {}
    for component in components:
        if component.name not in values:
            raise ValueError(f"reward component {component.name!r}: no value among {sorted(values)}")
        value = values[component.name]
        # NaN passes through min and max, and a single one makes all advantages of its group NaN.
        if math.isnan(value):
            raise ValueError(f"reward component {component.name!r}: the value is NaN")
        parts[component.name] = component.weight * min(max(float(value), component.low), component.high)
    return Reward(total=sum(parts.values()), parts=parts)
