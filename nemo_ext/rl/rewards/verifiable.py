"""Rewards for single responses from a verifier's verdict and the format, combined as in the papers.

Format scores come from `nemo_ext.rl.rewards.format`, whose caller knows which thinking mode the prompt requests.
"""

from collections.abc import Mapping

from nemo_ext.rl.rewards.components import Component, Reward, combine
from nemo_ext.rl.rewards.length import linear_length_penalty
from nemo_ext.rl.verdict import Outcome, Verdict

DOMYN_CORRECTNESS: Mapping[Outcome, float] = {"correct": 1.0, "wrong": 0.0, "error": -0.8}
DOMYN_MATH = (
    Component(name="correctness", weight=3.0, low=-0.8, high=1.0),
    Component(name="format"),
    Component(name="length", low=-0.25, high=0.0),
)


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
        ValueError: the format score is NaN, or `tokens` is negative.
    """
    values = {
        "correctness": DOMYN_CORRECTNESS[verdict.outcome],
        "format": format_score,
        "length": linear_length_penalty(tokens, max_tokens=max_tokens, at_max=DOMYN_MATH[2].low),
    }
    return combine(DOMYN_MATH, values)


def accuracy_format_reward(
    verdict: Verdict, *, format_score: float, accuracy_weight: float = 1.0, format_weight: float = 1.0
) -> Reward:
    """Compute Llama-Nemotron's reward, section 5.1: accuracy from a judge, plus the tags that the mode requires.

    The paper states no weights; 1 for both is our choice.

    Args:
        verdict: the judge's verdict; the accuracy is 1 if it is correct, else 0.
        format_score: score of the response's tags, such as that of `think_tags`.
        accuracy_weight: weight of the accuracy.
        format_weight: weight of the format score.

    Raises:
        ValueError: a value or a weight is not finite.
    """
    components = (
        Component(name="accuracy", weight=accuracy_weight),
        Component(name="format", weight=format_weight),
    )
    return combine(components, {"accuracy": outcome_reward(verdict), "format": format_score})
