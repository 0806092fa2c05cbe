"""Number of passes over each source."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.sft.choice import copies, epochs
from nemo_ext.data.sft.settings import Sampling


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=8).filter(any),
    st.floats(0.0, 1.0),
    st.floats(0.1, 20.0),
    st.floats(0.01, 1.0),
)
def test_the_budget_is_reached_within_the_limit(sizes: list[int], alpha: float, most: float, share: float) -> None:
    budget = share * most * sum(sizes)
    if budget <= 0:
        return
    passes = epochs(sizes, Sampling(tokens=budget, alpha=alpha, max_epochs=most))

    assert sum(size * each for size, each in zip(sizes, passes, strict=True)) == pytest.approx(budget)
    assert all(each <= most * (1 + 1e-9) for each in passes)
    there = [(size, each) for size, each in zip(sizes, passes, strict=True) if size]
    # Smaller sources never have fewer passes.
    assert all(a[1] >= b[1] * (1 - 1e-9) for a in there for b in there if a[0] <= b[0])


def test_without_a_budget_every_sample_is_used_once() -> None:
    assert epochs([5, 0, 7], Sampling()) == [1.0, 0.0, 1.0]


def test_passes_are_an_average_over_all_tokens() -> None:
    small, large = epochs([100, 10_000], Sampling(passes=3))

    assert small == 8 and 2 < large < 3
    assert 100 * small + 10_000 * large == pytest.approx(3 * 10_100)
    assert epochs([100, 10_000], Sampling(passes=3, tokens=10_100, alpha=1)) == [1, 1]
    with pytest.raises(ValueError, match="passes=9 must be at most max_epochs=8"):
        Sampling(passes=9)


def test_a_budget_out_of_reach_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling\.tokens=100 must be at most 24, as the sources have 12 tokens"):
        epochs([5, 7], Sampling(tokens=100, max_epochs=2))


@given(st.floats(0, 4), st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(0, 99))
def test_copies_match_the_passes_and_more_passes_remove_no_sample(passes: float, sizes: list[int], seed: int) -> None:
    tokens = np.array(sizes, dtype=np.int64)
    keys = np.random.default_rng(seed).permutation(len(sizes)).astype(np.uint64)

    made = copies(passes, keys, tokens)

    assert set(made) <= {int(passes), int(passes) + 1}
    assert abs((made * tokens).sum() - passes * tokens.sum()) <= max(sizes)
    assert (copies(passes + 0.5, keys, tokens) >= made).all()
