"""Choice of the units kept in BF16."""

from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_ext.architecture.precision_plan import Weight
from nemo_ext.sensitivity.choose import Option, cheapest, propose, random_within_bits, within_bits
from nemo_ext.sensitivity.units import Unit

SIZES = st.lists(st.tuples(st.integers(1, 50), st.floats(-1e-3, 1.0, allow_subnormal=False)), min_size=1, max_size=7)


def some(sizes: Sequence[int]) -> list[Unit]:
    return [Unit(str(number), "M", (Weight(number, "in_proj", size, 1),)) for number, size in enumerate(sizes)]


def least_bytes(units: Sequence[Unit], losses: Sequence[float], budget: float) -> int:
    """Fewest BF16 bytes by enumeration."""
    pairs = list(zip(units, losses, strict=True))
    return min(
        sum(unit.bytes for unit in units) - sum(unit.bytes for unit, _ in low)
        for count in range(len(pairs) + 1)
        for low in combinations(pairs, count)
        if sum(max(loss, 0.0) for _, loss in low) <= budget * (1 + 1e-9)
    )


@given(SIZES, st.floats(1e-3, 3.0))
def test_the_fewest_bytes_within_the_budget_are_kept_in_bf16(given: list[tuple[int, float]], budget: float) -> None:
    units, losses = some([size for size, _ in given]), [max(loss, 0.0) for _, loss in given]

    low = cheapest(units, losses, budget)

    assert sum(unit.bytes for unit in units if unit not in low) == least_bytes(units, losses, budget)


@given(SIZES, st.floats(0.3, 3.0), st.floats(0.01, 0.99))
@example([(1, 4.996966561817696e-306)], 1.0, 0.5)  # its inverse times a thousand is infinite
def test_the_measured_loss_meets_the_budget_even_if_losses_do_not_add_up(
    given: list[tuple[int, float]], factor: float, share: float
) -> None:
    units, losses = some([size for size, _ in given]), [loss for _, loss in given]

    def measure(low: Sequence[Unit]) -> float:
        return factor * sum(max(losses[int(unit.selector)], 0.0) for unit in low)

    budget = share * measure(units)
    tried = propose(units, losses, budget, measure, everything=measure(units), attempts=12)

    assert tried[-1].measured == measure(tried[-1].low)
    assert tried[-1].measured <= budget or not budget
    assert len({found.low for found in tried}) == len(tried)


def test_a_budget_met_by_fp8_leaves_nothing_in_bf16() -> None:
    units = some([3, 5])

    def measure(low: Sequence[Unit]) -> float:
        raise AssertionError("what everything loses is known")

    (found,) = propose(units, [0.1, 0.2], 0.5, measure, everything=0.4, attempts=3)
    assert found.low == tuple(units)
    assert found.added == pytest.approx(0.3)


def test_units_without_a_loss_are_chosen_by_bytes() -> None:
    units = some([1, 50, 3])
    together = {0: 0.0, 1: 0.02, 2: 0.08, 3: 0.5}

    tried = propose(units, [-0.1, 0.0, -0.2], 0.1, lambda low: together[len(low)], everything=0.5, attempts=8)

    assert [unit.selector for unit in tried[-1].low] == ["1", "2"]


def test_measuring_finds_more_where_losses_do_not_add_up() -> None:
    """Three blocks lose 1 each and 1.2 together: two meet a budget of 1.1, one by the sum of losses."""
    units = some([10, 11, 12])
    together = {0: 0.0, 1: 1.0, 2: 1.1, 3: 1.2}

    tried = propose(units, [1.0, 1.0, 1.0], 1.1, lambda low: together[len(low)], everything=1.2, attempts=8)

    assert [unit.selector for unit in tried[-1].low] == ["1", "2"]


OPTIONS = st.lists(
    st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=3).map(
        lambda losses: [
            Option(name, bits, loss)
            for (name, bits), loss in zip((("nvfp4", 4.5), ("fp8", 8.0), ("bf16", 16.0)), losses, strict=False)
        ]
    ),
    min_size=1,
    max_size=5,
)


@given(OPTIONS, st.floats(4.5, 16))
def test_the_choice_within_bits_has_the_least_sum_of_losses(options: list[list[Option]], bits: float) -> None:
    budget = bits * len(options)

    chosen = within_bits(options, budget)

    least = min(
        sum(option.loss for option in choice)
        for choice in product(*options)
        if sum(option.bits for option in choice) <= budget
    )
    assert sum(option.bits for option in chosen) <= budget * (1 + 1e-6)
    assert sum(option.loss for option in chosen) <= least + 2e-6
    other = random_within_bits(options, budget, seed=1)
    assert sum(option.bits for option in other) <= budget
    assert all(option in each for option, each in zip(other, options, strict=True))
