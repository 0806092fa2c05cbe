"""Dynamic sampling: number of passes over each source, and the samples that a partial pass repeats."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from nemo_ext.data.blends.division import fill
from nemo_ext.data.sft.settings import Sampling


def epochs(tokens: Sequence[int], sampling: Sampling) -> list[float]:
    """Number of passes over each source.

    Shares of the budget are proportional to size to the power `alpha`; what a source cannot take within `max_epochs`
    goes to the others. `tokens` is the number of training tokens of each source.

    Raises:
        ValueError: the budget is more than all sources can give within `max_epochs`.
    """
    if sampling.tokens is None:
        return [1.0 if size else 0.0 for size in tokens]
    most = sampling.max_epochs * sum(tokens)
    if sampling.tokens > most:
        raise ValueError(
            f"sampling.tokens={sampling.tokens:,.0f}: the sources have {sum(tokens):,} tokens, at most {most:,.0f} in "
            f"sampling.max_epochs={sampling.max_epochs:g}: ask for fewer, allow more epochs or add data"
        )
    there = [number for number, size in enumerate(tokens) if size]
    parts = [Fraction(float(tokens[number]) ** sampling.alpha) for number in there]
    limits = [Fraction(sampling.max_epochs) * tokens[number] for number in there]
    found = [0.0] * len(tokens)
    for number, got in zip(there, fill(Fraction(sampling.tokens), parts, limits), strict=True):
        found[number] = float(got / tokens[number])
    return found


def copies(passes: float, keys: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Number of copies of each sample, [samples]: whole passes, and one more for those with the smallest keys.

    Args:
        passes: number of passes over all samples.
        keys: [samples] random but fixed keys, so that more passes never remove a sample.
        tokens: [samples] number of tokens.
    """
    made = np.full(len(keys), int(passes), dtype=np.int64)
    left = (passes - int(passes)) * tokens.sum()
    order = np.argsort(keys, kind="stable")
    reached = np.cumsum(tokens[order])
    # Rounded to the nearest sample.
    made[order[: int(np.searchsorted(reached - tokens[order] / 2, left, side="left"))]] += 1
    return made
