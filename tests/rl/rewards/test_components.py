import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.rl.rewards.components import Component, combine

RIGHT = Component(name="right", weight=3.0, low=-0.8, high=1.0)
SHORT = Component(name="short", weight=-0.5)


def test_values_are_clipped_and_weighted() -> None:
    reward = combine([RIGHT, SHORT], {"right": -7, "short": 0.5})

    assert reward.parts == pytest.approx({"right": -2.4, "short": -0.25})
    assert reward.total == pytest.approx(-2.65)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"right": math.nan, "short": 0}, "component 'right': the value is NaN"),
        ({"right": 1}, "component 'short' has no value"),
        ({"right": 1, "shrt": 0}, "unknown reward component 'shrt': did you mean 'short'"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combine([RIGHT, SHORT], values)


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="these occur twice: right"):
        combine([RIGHT, RIGHT], {"right": 1})


@pytest.mark.parametrize(
    "wrong", [{"weight": math.nan}, {"weight": math.inf}, {"low": math.nan}, {"high": math.inf}, {"low": 2.0}]
)
def test_components_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="reward component 'x'"):
        Component(name="x", **wrong)


numbers = st.floats(-1e6, 1e6)


@given(
    st.lists(st.tuples(numbers, numbers, numbers, st.floats(allow_nan=False)), min_size=1, max_size=5),
)
def test_totals_stay_in_the_range_whatever_the_values(drawn: list[tuple[float, float, float, float]]) -> None:
    components = [
        Component(name=str(place), weight=weight, low=min(one, other), high=max(one, other))
        for place, (weight, one, other, _) in enumerate(drawn)
    ]

    reward = combine(components, {str(place): value for place, (*_, value) in enumerate(drawn)})

    for component in components:
        low, high = sorted((component.weight * component.low, component.weight * component.high))
        assert low <= reward.parts[component.name] <= high
    assert reward.total == sum(reward.parts.values())
