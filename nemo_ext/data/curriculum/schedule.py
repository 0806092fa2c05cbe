"""How many prompts a step requests from each domain and pass-rate level; `plan` draws from those available."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
GOLDEN = (5**0.5 - 1) / 2


def fixed(shares: Mapping[str, float], domains: tuple[str, ...]) -> Floats:
    """Return the share of each domain in every step, [domains], scaled to sum to 1; 0 if it is not in `shares`."""
    weights = np.array([shares.get(name, 0.0) for name in domains], dtype=np.float64)
    return weights / weights.sum()


def quotas(shares: Floats, *, batch: int, steps: int) -> Counts:
    """Return the number of prompts from each domain in each step, [steps, domains]; every row sums to `batch`.

    Rounded by largest remainders, with rounding errors carried over to the next step, so that over all steps, a domain
    stays within two prompts of its share.
    """
    counts = np.empty((steps, len(shares)), dtype=np.int64)
    owed = np.zeros(counts.shape[1])
    for step in range(steps):
        owed += shares * batch
        counts[step] = rounded(owed, batch)
        owed -= counts[step]
    return counts


def rounded(owed: Floats, batch: int) -> Counts:
    """Round `owed`, the number of prompts due from each domain, by largest remainders, so that the sum is `batch`."""
    row = np.maximum(np.floor(owed), 0).astype(np.int64)
    missing = batch - int(row.sum())
    order = np.argsort(row - owed, kind="stable")
    if missing > 0:
        row[order[:missing]] += 1
    while missing < 0:  # a negative entry of `owed` was raised to 0, so that the sum is too large
        most_over = max((at for at in range(len(row)) if row[at] > 0), key=lambda at: row[at] - owed[at])
        row[most_over] -= 1
        missing += 1
    return row


def means(*, first: float, last: float, steps: int) -> Floats:
    """Return the target mean pass rate of each step, [steps], linear from `first` to `last`."""
    return np.linspace(first, last, steps) if steps > 1 else np.array([first])


def wanted(
    means_of_steps: Floats,
    quota: Counts,
    *,
    first_step: int,
    present: npt.NDArray[np.bool_],
    sigma: float,
    start: float,
) -> Counts:
    """Return how many prompts each step requests from each level, [steps, levels]; rows sum to `quota`.

    A step's counts are proportional to a Gaussian's density at the levels. They are rounded by systematic sampling:
    each expectation is rounded up or down such that rounding averages out over the steps. Rounding to the nearest
    number would never draw a level with an expectation below half a prompt.

    Args:
        means_of_steps: [steps] mean of the Gaussian.
        quota: [steps] number of prompts from the domain.
        first_step: number in the schedule of the first of these steps.
        present: [levels] whether the domain has prompts at this level.
        start: random start of the sampling in step 0, in [0, 1).
    """
    levels = np.linspace(0, 1, len(present))
    exponent = -((levels - means_of_steps[:, None]) ** 2) / (2 * sigma**2)
    exponent[:, ~present] = -np.inf
    # Without the shift, all densities underflow to zero if every level is far from the mean.
    density = np.exp(exponent - exponent.max(axis=1, keepdims=True))
    ends = np.cumsum(density, axis=1)
    ends /= ends[:, -1:]
    steps = np.arange(first_step, first_step + len(quota))
    shift = (start + steps * GOLDEN) % 1.0
    marks = np.floor(quota[:, None] * ends + shift[:, None]).astype(np.int64)
    marks[:, -1] = quota
    counts = np.diff(marks, axis=1, prepend=0)
    assert (counts >= 0).all() and (counts.sum(axis=1) == quota).all()
    return counts


def from_the_largest(left: Counts, short: int) -> Counts:
    """Return the number to take from each pool, [pools], `short` in total, one at a time from the largest.

    The pool sizes `left` must sum to at least `short`.
    """
    order = (-left).argsort(kind="stable")
    sizes = left[order]
    sums = sizes.cumsum()
    # The largest `count` pools are reduced to the same size, which is at least that of the next pool.
    count = int((sums[:-1] - np.arange(1, len(sizes)) * sizes[1:]).searchsorted(short)) + 1
    level, extra = divmod(int(sums[count - 1]) - short, count)
    taken = np.zeros_like(left)
    taken[order[:count]] = sizes[:count] - level
    taken[order[:extra]] -= 1
    return taken
