"""Laws of losses by shares, and optima compared with every mixture on a grid."""

from itertools import product

import numpy as np
import pytest
from scipy.special import rel_entr

from nemo_ext.mixture.law import Law, cross_validate, fit, optimum
from nemo_ext.mixture.sampling import sample

CENTRE = np.array([0.6, 0.25, 0.1, 0.05])
TRUE = [
    Law(np.log(0.5), np.array([0.1, -0.9, 0.3, -0.2])),
    Law(np.log(0.7), np.array([-0.2, 0.4, -0.8, 0.1])),
    Law(np.log(0.2), np.array([0.2, 0.0, 0.1, -1.5])),
]
SHARES = np.stack(sample(24, CENTRE, strengths=(0.5, 5), least=0.002, most=np.ones(4), seed=3))


@pytest.mark.parametrize("law", TRUE)
def test_a_law_is_recovered_under_noise_and_one_outlier(law: Law) -> None:
    values = law.at(SHARES) + np.random.default_rng(0).normal(0, 0.003, len(SHARES))
    values[5] += 1.0

    found = fit(SHARES, values)

    others = np.random.default_rng(1).dirichlet(np.ones(4), 1000)
    assert np.abs(found.at(others) - law.at(others)).max() < 0.05
    assert np.sqrt(np.mean((found.at(others) - law.at(others)) ** 2)) < 0.01


def test_quality_is_measured_on_held_out_runs() -> None:
    noise = np.random.default_rng(0).normal(1, 0.1, len(SHARES))

    real, chance = cross_validate(SHARES, TRUE[0].at(SHARES)), cross_validate(SHARES, noise)

    assert real.error < 0.05 * real.spread
    assert real.rank > 0.99
    assert chance.error > 0.8 * chance.spread
    assert chance.rank < 0.7


@pytest.mark.parametrize("kl", [0.0, 0.05, 0.5])
@pytest.mark.parametrize(
    ("lowest", "highest"),
    [([0, 0, 0, 0], [1, 1, 1, 1]), ([0, 0, 0.2, 0], [1, 0.3, 1, 0.1]), ([0.5, 0, 0, 0], [0.8, 0.2, 0.2, 0.06])],
)
def test_no_mixture_on_a_grid_is_better(kl: float, lowest: list[float], highest: list[float]) -> None:
    low, high, weights = np.array(lowest, float), np.array(highest, float), np.array([0.5, 0.3, 0.2])

    found = optimum(TRUE, weights, CENTRE, kl=kl, lowest=low, highest=high, least=0.0)

    def goal(shares: np.ndarray) -> np.ndarray:
        losses = sum(weight * law.at(shares) for weight, law in zip(weights, TRUE, strict=True))
        return losses + kl * rel_entr(shares, CENTRE).sum(axis=-1)

    grid = np.array([(*three, 100 - sum(three)) for three in product(range(101), repeat=3) if sum(three) <= 100]) / 100
    grid = grid[((grid >= low) & (grid <= high)).all(axis=1)]
    assert len(grid) > 10
    assert found.sum() == pytest.approx(1)
    assert (found >= low - 1e-9).all()
    assert (found <= high + 1e-9).all()
    assert goal(found) <= goal(grid).min() + 1e-9


def test_small_shares_are_excluded_and_the_rest_is_optimal() -> None:
    weights, low, high = np.ones(3) / 3, np.zeros(4), np.ones(4)
    free = optimum(TRUE, weights, CENTRE, kl=0.5, lowest=low, highest=high, least=0.0)
    assert 0.01 < 1.01 * free.min() < sorted(free)[1]

    found = optimum(TRUE, weights, CENTRE, kl=0.5, lowest=low, highest=high, least=1.01 * float(free.min()))

    without = np.where(free == free.min(), 0.0, 1.0)
    assert found == pytest.approx(optimum(TRUE, weights, CENTRE, kl=0.5, lowest=low, highest=without, least=0.0))
    assert found.min() == 0


def test_contradictory_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"maximums to 0\.8\)"):
        optimum(TRUE, np.ones(3) / 3, CENTRE, kl=0.05, lowest=np.zeros(4), highest=np.full(4, 0.2), least=0.0)
