"""Advantages over groups of responses to one prompt, for engines that lack them and to test adapters.

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
    variance, as in a group of one, advantages are exactly 0.

    Args:
        rewards: rewards, `[..., responses]`.
        baseline: mean of the group, or, for each response, of the other responses.
        normalise: division by the standard deviation over n responses (`std`), over n - 1 (`unbiased_std`), or none.
        epsilon: constant added to the standard deviation.

    Returns:
        Advantages, `[..., responses]`.

    Raises:
        ValueError: a reward is not finite, there is none, or `baseline` or `normalise` is unknown.
    """
    given = _finite(rewards)
    size = given.shape[-1]
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline must be mean or leave_one_out, not {baseline!r}")
    if normalise not in ("std", "unbiased_std", "none"):
        raise ValueError(f"normalise must be std, unbiased_std or none, not {normalise!r}")
    flat = zero_variance(given)[..., None]
    # Rounding of the mean would leave advantages of 1e-17, which a standard deviation of 1e-17 makes large.
    centred = np.where(flat, 0.0, given - given.mean(axis=-1, keepdims=True))
    if size == 1:
        return centred
    # The mean of the others is the group's mean minus this deviation over size - 1.
    advantages = centred * (size / (size - 1)) if baseline == "leave_one_out" else centred
    if normalise == "none":
        return advantages
    squares = (centred**2).sum(axis=-1, keepdims=True)
    deviation = np.sqrt(squares / (size - 1 if normalise == "unbiased_std" else size))
    return advantages / np.where(flat, 1.0, deviation + epsilon)


def zero_variance(rewards: npt.ArrayLike, *, tolerance: float = 0.0) -> npt.NDArray[np.bool_]:
    """True for groups whose rewards are all within `tolerance`, from which nothing is learnt.

    `[..., responses]` -> `[...]`.

    Dynamic sampling leaves such groups out (DAPO, arXiv 2503.14476, section 3.2; Domyn-Small, section 4.4; OLMo 3).

    Raises:
        ValueError: a reward is not finite, or there is none.
    """
    given = _finite(rewards)
    return np.asarray(given.max(axis=-1) - given.min(axis=-1) <= tolerance)


def _finite(rewards: npt.ArrayLike) -> Array:
    given = np.asarray(rewards, dtype=np.float64)
    if given.ndim == 0 or given.shape[-1] == 0:
        raise ValueError(f"rewards must be [..., responses] with at least one response, not of shape {given.shape}")
    if not np.isfinite(given).all():
        raise ValueError(f"rewards must be finite: {int((~np.isfinite(given)).sum())} of {given.size} are not")
    return given
