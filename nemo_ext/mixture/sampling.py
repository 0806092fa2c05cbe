"""Mixtures sampled around a prior, each by its own number."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from nemo_ext.job.seeds import generator

_TRIES = 10_000
_DIGITS = 3
"""Digits to which two mixtures are the same."""

Shares = npt.NDArray[np.float64]


def sample(
    count: int, prior: Mapping[str, float], *, strengths: Sequence[float], least: float, most: Shares, seed: int
) -> list[Shares]:
    """Mixtures of streams; the first is the prior, and more of them begin with the same ones.

    Each is drawn from a Dirichlet distribution around the prior (RegMix, arXiv 2407.01492), until it keeps to `most`
    and is another than those before it.

    Args:
        count: number of mixtures beside the prior.
        prior: shares of the streams, with sum 1.
        strengths: ends of the range of concentrations.
        least: share below which a stream is left out.
        most: most of each stream, in the prior's order.
        seed: seed of all draws.

    Raises:
        ValueError: ten thousand draws gave no further mixture.
    """
    centre = np.array(list(prior.values()))
    found, seen = [centre], {_rounded(centre)}
    low, high = np.log(strengths)
    for number in range(1, count + 1):
        random = generator(seed, "mixture", number)
        for _ in range(_TRIES):
            drawn = random.dirichlet(centre * np.exp(random.uniform(low, high)))
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
