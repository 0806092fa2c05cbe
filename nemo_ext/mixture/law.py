"""Loss as a function of shares: one law a benchmark, and the mixture that minimises their mean.

A benchmark's bits per byte at shares p are taken to be exp(c) + exp(t p), with a constant c and a slope t for each
stream, as in OLMo 3. Their mean is convex in p, so that its minimum within limits of shares is found by a solver, as
olmix does, where OLMo 3's report averages the best of many random mixtures.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import huber, rel_entr
from scipy.stats import spearmanr

from nemo_ext.mixture.sampling import Shares

DELTA = 0.02
"""Residual, in bits per byte, above which Huber's loss is linear (OLMo 3)."""
_FLOORS = (0.3, 0.8)
"""Shares of the least loss at which fits start to look for the constant."""
_RIDGE = 0.01
"""Weight of the slopes' squared distance from their mean, so that streams without data of their own are average."""
FOLDS = 5


@dataclass(frozen=True)
class Law:
    """Bits per byte of one benchmark.

    Attributes:
        constant: c, of the part that no share changes.
        slopes: t, one for each stream.
    """

    constant: float
    slopes: Shares

    def at(self, shares: Shares) -> Shares:
        """Values at shares, [..., streams] -> [...]."""
        values: Shares = np.exp(self.constant) + np.exp(shares @ self.slopes)
        return values


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How well laws foresee runs that they were not fitted to.

    Attributes:
        predicted: value of each run by a law fitted to the runs of other folds.
        error: root of the mean squared error.
        spread: standard deviation of the values themselves, which is the error of their mean.
        rank: Spearman's rank correlation of the two; NaN if one is constant.
        laws: the laws of the folds.
    """

    predicted: Shares
    error: float
    spread: float
    rank: float
    laws: Sequence[Law] = ()


def fit(shares: Shares, values: Shares) -> Law:
    """The law of one benchmark, by Huber's loss and L-BFGS from several starts.

    Args:
        shares: mixtures, [runs, streams].
        values: bits per byte, [runs], positive.
    """

    def loss(given: Shares) -> tuple[float, Shares]:
        """In units of DELTA's square, for the solver's tolerances."""
        constant, slopes = np.exp(given[0]), given[1:]
        moved = np.exp(np.clip(shares @ slopes, -50, 50))
        residuals = (constant + moved - values) / DELTA
        away = slopes - slopes.mean()
        pull = np.clip(residuals, -1, 1) / DELTA / len(values)
        gradient = np.concatenate([[pull.sum() * constant], shares.T @ (pull * moved) + 2 * _RIDGE * away])
        return float(huber(1, residuals).mean() + _RIDGE * (away**2).sum()), gradient

    best = None
    for floor in _FLOORS:
        constant = floor * values.min()
        slopes = np.linalg.lstsq(shares, np.log(values - constant), rcond=None)[0]
        found = minimize(
            loss,
            np.concatenate([[np.log(constant)], slopes]),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "ftol": 1e-10, "gtol": 1e-6},
        )
        if best is None or found.fun < best.fun:
            best = found
    assert best is not None
    return Law(float(best.x[0]), best.x[1:])


def foreseen(shares: Shares, values: Shares, *, folds: int = FOLDS) -> Quality:
    """Predictions of runs by laws of the others, in as many parts as there are folds.

    Args:
        shares: mixtures, [runs, streams].
        values: bits per byte, [runs].
        folds: number of parts; run i is in part i modulo this.
    """
    part = np.arange(len(values)) % folds
    laws = [fit(shares[part != each], values[part != each]) for each in range(folds)]
    predicted = np.empty_like(values)
    for each, law in enumerate(laws):
        predicted[part == each] = law.at(shares[part == each])
    return quality(predicted, values, laws)


def quality(predicted: Shares, values: Shares, laws: Sequence[Law] = ()) -> Quality:
    """Error and rank correlation of predictions by laws."""
    constant = np.ptp(predicted) == 0 or np.ptp(values) == 0
    return Quality(
        predicted=predicted,
        error=float(np.sqrt(np.mean((predicted - values) ** 2))),
        spread=float(values.std()),
        rank=float("nan") if constant else float(spearmanr(predicted, values).statistic),
        laws=laws,
    )


def optimum(
    laws: Sequence[Law], weights: Shares, prior: Shares, *, kl: float, lowest: Shares, highest: Shares, least: float
) -> Shares:
    """The mixture with the least weighted mean of the laws plus `kl` times its divergence from the prior.

    Args:
        laws: a law for each benchmark.
        weights: their weights in the mean, with sum 1.
        prior: shares that the divergence is from, with sum 1.
        kl: weight of the divergence.
        lowest, highest: limits of each share.
        least: share below which a stream is left out, one after the other, unless its limit wants it.

    Raises:
        ValueError: no mixture is within the limits, or none was found.
    """
    slopes = np.stack([law.slopes for law in laws])
    scale = np.maximum(prior, 1e-12)

    def goal(shares: Shares) -> tuple[float, Shares]:
        shares = np.maximum(shares, 1e-12)
        moved = weights * np.exp(slopes @ shares)
        divergence = np.log(shares / scale) + 1
        return float(moved.sum() + kl * rel_entr(shares, scale).sum()), slopes.T @ moved + kl * divergence

    highest = np.where((prior > 0) | (kl == 0), highest, lowest)
    while True:
        if highest.sum() < 1 - 1e-9 or lowest.sum() > 1 + 1e-9 or (lowest > highest + 1e-12).any():
            raise ValueError(
                f"mixture: no shares with sum 1 are within the limits (at least {lowest.sum():.3g}, at most "
                f"{highest.sum():.3g} together): raise mixture.repeats, or mend mixture.tokens, at_least or at_most"
            )
        found = minimize(
            goal,
            _within(prior, lowest, highest),
            jac=True,
            method="SLSQP",
            bounds=list(zip(lowest, highest, strict=True)),
            constraints={"type": "eq", "fun": lambda shares: shares.sum() - 1, "jac": np.ones_like},
            options={"maxiter": 2000, "ftol": 1e-12},
        )
        if not found.success:
            raise ValueError(f"mixture: the least loss was not found ({found.message}): raise mixture.kl")
        shares: Shares = np.clip(found.x, lowest, highest)
        small = (shares < least) & (lowest == 0) & (highest > 0)
        if not small.any():
            return shares / shares.sum()
        highest = np.where(small & (shares == shares[small].min()), 0, highest)


def _within(shares: Shares, lowest: Shares, highest: Shares) -> Shares:
    """Shares with sum 1 within limits, near the given ones: clipped, and the rest divided by the room that is left."""
    clipped = np.clip(shares, lowest, highest)
    rest = 1 - clipped.sum()
    room = highest - clipped if rest > 0 else clipped - lowest
    return clipped if not room.sum() else clipped + rest * room / room.sum()
