"""Mixtures sampled around a prior, each by its own number."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from nemo_ext.job.seeds import generator

_TRIES = 10_000
_DIGITS = 3
"""Digits to which two mixtures are the same."""

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
    """Mixtures of streams; the first is the prior, and more of them begin with the same ones.

    Each is drawn from a Dirichlet distribution around the prior (RegMix, arXiv 2407.01492), until it keeps to `most`
    and is another than those before it.

    Args:
        count: number of mixtures beside the prior.
        prior: shares of the streams, [streams], with sum 1.
        strengths: ends of the range of concentrations.
        least: share below which a stream is left out.
        most: most of each stream, [streams].
        seed: seed of all draws.
        before: mixtures that are there already, the prior among them, which stay.

    Raises:
        ValueError: ten thousand draws gave no further mixture.
    """
    found = list(before) or [prior]
    seen = {_rounded(each) for each in found}
    low, high = np.log(strengths)
    for number in range(len(found), count + 1):
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
                f"mixture: {_TRIES:,} draws gave no mixture {number} that is new and reads no stream too often: raise "
                "mixture.repeats or mixture.strengths, or lower mixture.runs or the runs' train.tokens"
            )
        found.append(drawn)
        seen.add(_rounded(drawn))
    return found


def _rounded(shares: Shares) -> tuple[float, ...]:
    return tuple(np.round(shares, _DIGITS).tolist())
