"""Loss as a function of shares: one law per benchmark, and the mixture that minimises their mean.

A benchmark's bits per byte at shares p are modelled as exp(c) + exp(t p), with a constant c and one slope t per stream,
as in OLMo 3. The mean over benchmarks is convex in p, so a solver finds its minimum within the limits on shares, as in
olmix; OLMo 3's report averages the best of many random mixtures instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.special import huber, rel_entr
from scipy.stats import spearmanr

from nemo_ext.mixture.sampling import Shares

DELTA = 0.02
"""Residual, in bits per byte, above which the Huber loss is linear (OLMo 3)."""
_FLOORS = (0.3, 0.8)
"""Initial values of the constant exp(c), as fractions of the lowest loss."""
_RIDGE = 0.01
"""Weight of the slopes' squared distance from their mean, so that streams without information get the mean slope."""
FOLDS = 5


@dataclass(frozen=True)
class Law:
    """Law for the bits per byte on one benchmark.

    Attributes:
        constant: c, the logarithm of the part that does not depend on the shares.
        slopes: t, one per stream.
    """

    constant: float
    slopes: Shares

    def at(self, shares: Shares) -> Shares:
        """Return the bits per byte at these shares, [..., streams] -> [...]."""
        values: Shares = np.exp(self.constant) + np.exp(shares @ self.slopes)
        return values


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of a law's predictions for held-out runs, by cross-validation.

    Attributes:
        predicted: predicted value of each run, by the law fitted to the other folds.
        error: root mean squared error.
        spread: standard deviation of the measured values, which is the error of predicting their mean.
        rank: Spearman's rank correlation between predicted and measured values; NaN if one of them is constant.
        laws: law for each fold, fitted to the runs of the other folds.
    """

    predicted: Shares
    error: float
    spread: float
    rank: float
    laws: Sequence[Law] = ()


def fit(shares: Shares, values: Shares) -> Law:
    """Fit the law of one benchmark, with the Huber loss and L-BFGS from several initial values.

    Args:
        shares: mixtures, [runs, streams].
        values: bits per byte, [runs], positive.
    """

    def loss(parameters: Shares) -> tuple[float, Shares]:
        """Return the loss and its gradient at `parameters`, the constant followed by the slopes.

        Both are in units of DELTA squared, to suit the solver's tolerances.
        """
        constant, slopes = np.exp(parameters[0]), parameters[1:]
        variable = np.exp(np.clip(shares @ slopes, -50, 50))
        residuals = (constant + variable - values) / DELTA
        deviation = slopes - slopes.mean()
        pull = np.clip(residuals, -1, 1) / DELTA / len(values)
        gradient = np.concatenate([[pull.sum() * constant], shares.T @ (pull * variable) + 2 * _RIDGE * deviation])
        return float(huber(1, residuals).mean() + _RIDGE * (deviation**2).sum()), gradient

    best = None
    for floor in _FLOORS:
        constant = floor * values.min()
        slopes = np.linalg.lstsq(shares, np.log(values - constant), rcond=None)[0]
        result = minimize(
            loss,
            np.concatenate([[np.log(constant)], slopes]),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "ftol": 1e-10, "gtol": 1e-6},
        )
        if best is None or result.fun < best.fun:
            best = result
    assert best is not None
    return Law(float(best.x[0]), best.x[1:])


def cross_validate(shares: Shares, values: Shares, *, folds: int = FOLDS) -> Quality:
    """Predict the runs of each fold with a law fitted to the other folds.

    Args:
        shares: mixtures, [runs, streams].
        values: bits per byte, [runs].
        folds: number of folds; run i is in fold i modulo this.
    """
    fold_of = np.arange(len(values)) % folds
    laws = [fit(shares[fold_of != fold], values[fold_of != fold]) for fold in range(folds)]
    predicted = np.empty_like(values)
    for fold, law in enumerate(laws):
        predicted[fold_of == fold] = law.at(shares[fold_of == fold])
    return quality(predicted, values, laws)


def quality(predicted: Shares, values: Shares, laws: Sequence[Law] = ()) -> Quality:
    """Compute the error and rank correlation of predictions.

    Args:
        predicted: predicted value of each run, [runs].
        values: measured value of each run, [runs].
        laws: the laws that predicted them, kept in the result.
    """
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
    """Find the mixture that minimises the weighted mean of the laws plus `kl` times its KL divergence from the prior.

    Args:
        laws: law of each benchmark.
        weights: weights of the benchmarks in the mean, summing to 1.
        prior: shares from which the divergence is measured, summing to 1.
        kl: weight of the divergence.
        lowest, highest: limits on each share, [streams].
        least: streams with a share below this are excluded, smallest first, unless `lowest` requires them.

    Returns:
        Shares of the mixture, [streams].

    Raises:
        ValueError: no mixture is within the limits, or the solver fails.
    """
    slopes = np.stack([law.slopes for law in laws])
    scale = np.maximum(prior, 1e-12)

    def goal(shares: Shares) -> tuple[float, Shares]:
        shares = np.maximum(shares, 1e-12)
        variable = weights * np.exp(slopes @ shares)
        divergence = np.log(shares / scale) + 1
        return float(variable.sum() + kl * rel_entr(shares, scale).sum()), slopes.T @ variable + kl * divergence

    highest = np.where((prior > 0) | (kl == 0), highest, lowest)
    while True:
        if highest.sum() < 1 - 1e-9 or lowest.sum() > 1 + 1e-9 or (lowest > highest + 1e-12).any():
            raise ValueError(
                f"mixture: no shares within the limits sum to 1 (minimums sum to {lowest.sum():.3g}, maximums to "
                f"{highest.sum():.3g}); raise mixture.repeats, or change mixture.tokens, at_least or at_most"
            )
        result = minimize(
            goal,
            _within(prior, lowest, highest),
            jac=True,
            method="SLSQP",
            bounds=list(zip(lowest, highest, strict=True)),
            constraints={"type": "eq", "fun": lambda shares: shares.sum() - 1, "jac": np.ones_like},
            options={"maxiter": 2000, "ftol": 1e-12},
        )
        if not result.success:
            raise ValueError(f"mixture: the solver did not find the optimum ({result.message}); raise mixture.kl")
        shares: Shares = np.clip(result.x, lowest, highest)
        small = (shares < least) & (lowest == 0) & (highest > 0)
        if not small.any():
            return shares / shares.sum()
        highest = np.where(small & (shares == shares[small].min()), 0, highest)


def _within(shares: Shares, lowest: Shares, highest: Shares) -> Shares:
    """Clip shares to the limits, then make them sum to 1 by moving each in proportion to its room within the limits."""
    clipped = np.clip(shares, lowest, highest)
    rest = 1 - clipped.sum()
    room = highest - clipped if rest > 0 else clipped - lowest
    return clipped if not room.sum() else clipped + rest * room / room.sum()
