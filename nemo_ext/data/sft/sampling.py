"""Dynamic sampling: how often each source is passed over, and which samples a partial pass includes."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from nemo_ext.data.blends.division import fill
from nemo_ext.data.sft.settings import Sampling


def epochs(tokens: Sequence[int], sampling: Sampling) -> list[float]:
    """Return the number of passes over each source, given the sources' numbers of training tokens.

    A source's share of the budget is proportional to its tokens to the power `alpha`; the part that it cannot use
    within `max_epochs` goes to the other sources.

    Raises:
        ValueError: the budget exceeds what all sources provide within `max_epochs`.
    """
    if sampling.tokens is None and sampling.passes is None:
        return [1.0 if size else 0.0 for size in tokens]
    budget = Fraction(sampling.tokens if sampling.tokens is not None else (sampling.passes or 0) * sum(tokens))
    most = sampling.max_epochs * sum(tokens)
    if sampling.tokens is not None and sampling.tokens > most:
        raise ValueError(
            f"sampling.tokens={sampling.tokens:,.0f} must be at most {most:,.0f}, as the sources have {sum(tokens):,} "
            f"tokens and sampling.max_epochs={sampling.max_epochs:g}: lower tokens, raise max_epochs, or add data"
        )
    present = [number for number, size in enumerate(tokens) if size]
    weights = [Fraction(float(tokens[number]) ** sampling.alpha) for number in present]
    limits = [Fraction(sampling.max_epochs) * tokens[number] for number in present]
    passes = [0.0] * len(tokens)
    for number, used in zip(present, fill(budget, weights, limits), strict=True):
        passes[number] = float(used / tokens[number])
    return passes


def copies(passes: float, keys: npt.NDArray[np.uint64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of copies of each sample, [samples]; a partial pass takes the samples with the smallest keys.

    Args:
        passes: number of passes over all samples.
        keys: [samples] random but fixed keys, so that more passes never remove a sample.
        tokens: [samples] number of tokens.
    """
    counts = np.full(len(keys), int(passes), dtype=np.int64)
    partial = (passes - int(passes)) * tokens.sum()
    order = np.argsort(keys, kind="stable")
    # The partial pass ends at the nearest sample.
    middles = np.cumsum(tokens[order]) - tokens[order] / 2
    counts[order[: int(np.searchsorted(middles, partial, side="left"))]] += 1
    return counts
