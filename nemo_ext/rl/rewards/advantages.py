"""Advantages within groups of responses to one prompt, for engines that do not compute them and for testing adapters.

Rewards are `[..., responses]`: the last axis is the group.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

Baseline = Literal["mean", "leave_one_out"]
Normalisation = Literal["std", "unbiased_std", "none"]
Array = npt.NDArray[np.float64]


def group_advantages(
    rewards: npt.ArrayLike,
    *,
    baseline: Baseline = "mean",
    normalise: Normalisation = "std",
    epsilon: float = 1e-6,
) -> Array:
    """Compute advantages: rewards minus the group's baseline, divided by the group's standard deviation.

    GRPO (arXiv 2402.03300): mean, std. OLMo 3: mean, none. RLOO (arXiv 2402.14740): leave_one_out, none. Domyn-Small,
    section 4.4: leave_one_out, unbiased_std ("normalised by the unbiased within-group standard deviation"). If all
    rewards of a group are equal, or it has a single response, advantages are exactly 0.

    Args:
        baseline: mean over the group (`mean`), or over the other responses of the group (`leave_one_out`).
        normalise: divide by the standard deviation with denominator n (`std`) or n - 1 (`unbiased_std`), or not at all.
        epsilon: constant added to the standard deviation.

    Returns:
        Advantages, `[..., responses]`.

    Raises:
        ValueError: there are no rewards, or a reward is not finite.
    """
    values = _finite(rewards)
    size = values.shape[-1]
    flat = zero_variance(values)[..., None]
    # Rounding errors of 1e-17 in the mean would become large if divided by a standard deviation of 1e-17.
    centred = np.where(flat, 0.0, values - values.mean(axis=-1, keepdims=True))
    if size == 1:
        return centred
    # The mean of the other responses is the group's mean minus this deviation divided by size - 1.
    advantages = centred * (size / (size - 1)) if baseline == "leave_one_out" else centred
    if normalise == "none":
        return advantages
    squares = (centred**2).sum(axis=-1, keepdims=True)
    deviation = np.sqrt(squares / (size - 1 if normalise == "unbiased_std" else size))
    return advantages / np.where(flat, 1.0, deviation + epsilon)


def group_factors(tokens: npt.ArrayLike) -> Array:
    """Compute factors of advantages that turn a loss's mean over all tokens into the mean over groups of token means.

    The clipped objective is proportional to the advantage, so a factor per group changes the group's divisor from the
    batch's number of tokens to the group's (OlmoRL, equation 1). Groups without trained tokens are not counted.

    Args:
        tokens: number of trained tokens of each response, `[groups, responses]`.

    Returns:
        One factor per group, `[groups]`; 1 for groups without tokens.
    """
    sums = np.asarray(tokens, dtype=np.float64).sum(axis=-1)
    return np.where(sums > 0, sums.sum() / np.maximum(sums, 1) / max(1, int((sums > 0).sum())), 1.0)


def zero_variance(rewards: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Return for each group, `[...]`, whether all its rewards are equal.

    Such groups give no training signal, and dynamic sampling drops them (DAPO, arXiv 2503.14476, section 3.2;
    Domyn-Small, section 4.4; OLMo 3).

    Raises:
        ValueError: there are no rewards, or a reward is not finite.
    """
    values = _finite(rewards)
    return np.asarray(values.max(axis=-1) == values.min(axis=-1))


def _finite(rewards: npt.ArrayLike) -> Array:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(
            f"rewards must have shape [..., responses] with at least one response, not {list(values.shape)}"
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"{int((~np.isfinite(values)).sum())} of {values.size} rewards are not finite numbers; correct the "
            "environment or judge that returns them"
        )
    return values
