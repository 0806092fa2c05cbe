import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.curriculum.schedule import fixed, from_the_largest, means, quotas, wanted

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda shares: sum(shares) > 0.01)


@given(SHARES, st.integers(1, 200), st.integers(1, 120))
def test_every_batch_is_full_and_every_domain_stays_near_its_share(shares: list[float], batch: int, steps: int) -> None:
    names = tuple(f"d{number}" for number in range(len(shares)))
    scaled = fixed(dict(zip(names, shares, strict=True)), names)

    counts = quotas(scaled, batch=batch, steps=steps)

    assert (counts >= 0).all() and (counts.sum(axis=1) == batch).all()
    due = np.arange(1, steps + 1)[:, None] * batch * scaled
    assert np.abs(np.cumsum(counts, axis=0) - due).max() < 2
    assert (counts[:, np.array(shares) == 0] == 0).all()


@given(
    st.lists(st.booleans(), min_size=1, max_size=17).filter(any),
    st.integers(0, 64),
    st.floats(0, 1),
    st.floats(0.001, 2),
    st.integers(0, 10_000),
)
def test_levels_sum_to_the_quota_and_are_present(
    present: list[bool], quota: int, mean: float, sigma: float, first: int
) -> None:
    counts = wanted(
        np.array([mean]),
        np.array([quota]),
        first_step=first,
        present=np.array(present),
        sigma=sigma,
        start=0.7,
    )

    assert counts.sum() == quota and (counts >= 0).all()
    assert not counts[0, ~np.array(present)].any()


def test_small_quotas_follow_the_gaussian_over_the_steps() -> None:
    steps, quota = 4000, 2
    counts = wanted(
        np.full(steps, 0.5),
        np.full(steps, quota),
        first_step=0,
        present=np.ones(9, dtype=bool),
        sigma=0.2,
        start=0.3,
    ).sum(axis=0)

    density = np.exp(-((np.linspace(0, 1, 9) - 0.5) ** 2) / (2 * 0.2**2))
    np.testing.assert_allclose(counts / counts.sum(), density / density.sum(), atol=2e-3)


@given(st.data())
def test_missing_prompts_come_from_the_largest_pools(data: st.DataObject) -> None:
    left = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=12))
    short = data.draw(st.integers(1, sum(left))) if sum(left) else 0
    if not short:
        return

    taken = from_the_largest(np.array(left), short)

    expected = np.array(left)
    for _ in range(short):
        expected[np.argmax(expected)] -= 1
    assert taken.sum() == short and (taken >= 0).all()
    assert sorted(np.array(left) - taken) == sorted(expected)


def test_the_mean_falls_linearly() -> None:
    np.testing.assert_allclose(means(first=0.8, last=0.2, steps=4), [0.8, 0.6, 0.4, 0.2])
    assert means(first=0.8, last=0.2, steps=1) == pytest.approx([0.8])
