"""Rewards for single responses from a verifier's verdict and the format, combined as in the papers.

Format scores come from `nemo_ext.rl.rewards.format`, whose caller knows which thinking mode the prompt requests.
"""

import math
from collections.abc import Mapping

from nemo_ext.rl.rewards.reward import Reward
from nemo_ext.rl.verdict import Outcome, Verdict

DOMYN_CORRECTNESS: Mapping[Outcome, float] = {"correct": 1.0, "wrong": 0.0, "error": -0.8}


def outcome_reward(verdict: Verdict) -> float:
    """Return 1 for a correct response, else 0, as in Domyn-Small (section 4.4) and Nemotron 3 Nano's RLVR.

    A verifier error also gives 0; callers can exclude it from the loss by checking `verdict.outcome`.
    """
    return float(verdict.outcome == "correct")


def domyn_math_reward(verdict: Verdict, *, format_score: float, tokens: int, max_tokens: int = 8192) -> Reward:
    """Compute Domyn-Small's math reward, section 4.2: correctness, format and length, from -2.65 to 4.

    The paper states the range as "approximately [-3, +4]"; its three components add up to [-2.65, 4].

    Args:
        verdict: verdict, which contributes 3 x {correct 1, wrong 0, verifier error -0.8}.
        format_score: mean of the two format checks: 0, 0.5 or 1.
        tokens: number of generated tokens.
        max_tokens: number of tokens at which the length penalty reaches -0.25.

    Raises:
        ValueError: `max_tokens` is not positive.
    """
    length = linear_length_penalty(tokens, max_tokens=max_tokens)
    return Reward.of_parts(correctness=3 * DOMYN_CORRECTNESS[verdict.outcome], format=format_score, length=length)


def linear_length_penalty(tokens: int, *, max_tokens: int = 8192, at_max: float = -0.25) -> float:
    """Return a penalty that falls linearly from 0 at no tokens to `at_max` at `max_tokens`, and stays there.

    Domyn-Small, section 4.2: "decreasing linearly from 0 to -0.25 at the 8,192-token maximum response length".

    Raises:
        ValueError: `max_tokens` is not positive.
    """
    if max_tokens <= 0:
        raise ValueError(f"max_tokens must be positive, not {max_tokens}")
    return at_max * min(tokens / max_tokens, 1.0)


def accuracy_format_reward(
    verdict: Verdict, *, format_score: float, accuracy_weight: float = 1.0, format_weight: float = 1.0
) -> Reward:
    """Compute Llama-Nemotron's reward, section 5.1: accuracy from a judge, plus the tags that the mode requires.

    The paper states no weights; 1 for both is our choice. A judge's accuracy is 1 if it is correct, else 0.

    Raises:
        ValueError: a weight is not finite.
    """
    for name, weight in (("accuracy_weight", accuracy_weight), ("format_weight", format_weight)):
        if not math.isfinite(weight):
            raise ValueError(f"{name} must be finite, not {weight}")
    return Reward.of_parts(accuracy=accuracy_weight * outcome_reward(verdict), format=format_weight * format_score)
