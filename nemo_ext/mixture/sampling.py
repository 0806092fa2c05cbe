"""Sampling of mixtures around a prior; each has its own random generator, so more can be added later."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nemo_ext.job.seeds import generator

_TRIES = 10_000
_DIGITS = 3
"""Number of decimal places in which two mixtures must differ."""

Shares = npt.NDArray[np.float64]


def sample(
    count: int,
    prior: Shares,
    *,
    strengths: Sequence[float],
    least: float,
    most: Shares,
    seed: int,
    before: Sequence[Shares] = (),
) -> list[Shares]:
    """Sample mixtures of streams; the first is the prior, and a larger `count` only adds mixtures.

    Each mixture is drawn from a Dirichlet distribution around the prior (RegMix, arXiv 2407.01492) until it satisfies
    `most` and differs from all earlier mixtures.

    Args:
        count: number of mixtures in addition to the prior.
        prior: shares of the streams, [streams], summing to 1.
        strengths: range of the concentration, (lowest, highest).
        least: streams with a share below this are excluded.
        most: maximum share of each stream, [streams].
        before: existing mixtures, including the prior, which are kept.

    Raises:
        ValueError: ten thousand draws did not yield another mixture.
    """
    mixtures = list(before) or [prior]
    seen = {_rounded(mixture) for mixture in mixtures}
    low, high = np.log(strengths)
    for number in range(len(mixtures), count + 1):
        random = generator(seed, "mixture", number)
        for _ in range(_TRIES):
            drawn = random.dirichlet(prior * np.exp(random.uniform(low, high)))
            drawn = np.where(drawn < least, 0, drawn)
            if not drawn.sum() > 0:
                continue
            drawn /= drawn.sum()
            if (drawn <= most).all() and _rounded(drawn) not in seen:
                break
        else:
            raise ValueError(
                f"mixture: {_TRIES:,} draws gave no new mixture for run {number} within mixture.repeats; raise "
                "mixture.repeats or mixture.strengths, or lower mixture.runs or train.tokens of the runs"
            )
        mixtures.append(drawn)
        seen.add(_rounded(drawn))
    return mixtures


def _rounded(shares: Shares) -> tuple[float, ...]:
    return tuple(np.round(shares, _DIGITS).tolist())
