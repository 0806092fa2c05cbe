"""Advantages within groups of responses to one prompt, for engines without them and for tests of adapters.

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
    """Rewards minus the group's baseline, divided by the group's standard deviation.

    GRPO (arXiv 2402.03300): mean, std. OLMo 3: mean, none. RLOO (arXiv 2402.14740): leave_one_out, none. Domyn-Small,
    section 4.4: leave_one_out, unbiased_std ("normalised by the unbiased within-group standard deviation"). Without
    variance, as in a group of one response, advantages are exactly 0.

    Args:
        rewards: rewards, `[..., responses]`.
        baseline: mean of the group, or, for each response, of the other responses.
        normalise: division by the standard deviation over n responses (`std`), over n - 1 (`unbiased_std`), or none.
        epsilon: constant added to the standard deviation.

    Returns:
        Advantages, `[..., responses]`.

    Raises:
        ValueError: no rewards, a reward is not finite, or unknown `baseline` or `normalise`.
    """
    values = _finite(rewards)
    size = values.shape[-1]
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline must be mean or leave_one_out, not {baseline!r}")
    if normalise not in ("std", "unbiased_std", "none"):
        raise ValueError(f"normalise must be std, unbiased_std or none, not {normalise!r}")
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


def zero_variance(rewards: npt.ArrayLike, *, tolerance: float = 0.0) -> npt.NDArray[np.bool_]:
    """True for groups whose rewards differ by at most `tolerance`, from which nothing is learnt.

    `[..., responses]` -> `[...]`.

    Dynamic sampling drops such groups (DAPO, arXiv 2503.14476, section 3.2; Domyn-Small, section 4.4; OLMo 3).

    Raises:
        ValueError: no rewards, or a reward is not finite.
    """
    values = _finite(rewards)
    return np.asarray(values.max(axis=-1) - values.min(axis=-1) <= tolerance)


def _finite(rewards: npt.ArrayLike) -> Array:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim == 0 or values.shape[-1] == 0:
        raise ValueError(f"rewards must be [..., responses] with at least one response, not of shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError(f"rewards must be finite: {int((~np.isfinite(values)).sum())} of {values.size} are not")
    return values
