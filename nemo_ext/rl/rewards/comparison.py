"""Rewards of a group of responses, from comparisons of each with the next and from their relative lengths.

Nemotron 3 Nano, section 3.3.2. NeMo Gym's server genrm_compare differs in details, where this follows the paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import pydantic.dataclasses
from pydantic import Field

from nemo_ext.data.preference.genrm import FIRST_SUPERIOR, LEAST_HELPFUL, MOST_HELPFUL, SECOND_SUPERIOR

Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NEUTRAL = (LEAST_HELPFUL + MOST_HELPFUL) / 2
NO_PREFERENCE = (FIRST_SUPERIOR + SECOND_SUPERIOR) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Judgement of two responses by a judge.

    Attributes:
        helpfulness: scores of the first and second response as shown, 1 to 5.
        ranking: preference from 1 (the first is far superior) to 6 (the second is).

    Raises:
        ValueError: out of range, or NaN.
    """

    helpfulness: tuple[float, float]
    ranking: float

    def __post_init__(self) -> None:
        for score in self.helpfulness:
            if not LEAST_HELPFUL <= score <= MOST_HELPFUL:
                raise ValueError(f"helpfulness={score}: expected {LEAST_HELPFUL} to {MOST_HELPFUL}")
        if not FIRST_SUPERIOR <= self.ranking <= SECOND_SUPERIOR:
            raise ValueError(f"ranking={self.ranking}: expected {FIRST_SUPERIOR} to {SECOND_SUPERIOR}")

    @property
    def scores(self) -> tuple[float, float]:
        """Helpfulness, with the ranking as tie-breaker (equations 2 and 3): from -1.5 to 7.5."""
        first, second = self.helpfulness
        if first != second:
            return first, second
        return first + (NO_PREFERENCE - self.ranking), second + (self.ranking - NO_PREFERENCE)


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthControl:
    """Length control within a group; the defaults are the paper's. Values out of range raise ValueError.

    Attributes:
        thinking: lambda of the lengths of the traces, equation 6.
        answer: lambda of the lengths of the answers.
        thinking_bonus: beta for the shortest trace, if its base reward is above the percentile.
        answer_bonus: beta for the shortest answer, under the same condition.
        percentile: percentile of the base rewards, 0 to 100.
    """

    thinking: Coefficient = 0.5
    answer: Coefficient = 0.5
    thinking_bonus: Coefficient = 0.5
    answer_bonus: Coefficient = 0.5
    percentile: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 80.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """Rewards of the responses of a group.

    Attributes:
        rewards: total reward of each response.
        base: part of the reward from the judge.
        length: part from lengths; the sum over the group is zero.
        bonus: bonus for the shortest good responses.
        judged: True for responses with a judged match; the other responses have the mean base of these.
        missing: number of comparisons without a judgement.
        problem: reason why one of them has no judgement.
    """

    rewards: tuple[float, ...]
    base: tuple[float, ...]
    length: tuple[float, ...]
    bonus: tuple[float, ...]
    judged: tuple[bool, ...]
    missing: int = 0
    problem: str = ""


def circular_comparisons(size: int, *, both_orders: bool = True) -> list[tuple[int, int]]:
    """Pairs of responses to compare, (shown first, shown second): each with the next, the last with the first.

    "Each response is also judged twice in different positions": each pair is shown in both orders, 2N comparisons.
    With `both_orders=False` there are N, as in NeMo Gym, in which each response is once first and once second, but
    against different responses. A pair occurs at most once in each order: two responses make one pair, one makes none.

    Raises:
        ValueError: `size` is negative.
    """
    if size < 0:
        raise ValueError(f"a group cannot have {size} responses")
    circle = [(one, (one + 1) % size) for one in range(size)] if size > 1 else []
    if both_orders:
        circle = [pair for one, other in circle for pair in ((one, other), (other, one))]
    return list(dict.fromkeys(circle))


def base_rewards(
    size: int, judgements: Mapping[tuple[int, int], Judgement | None]
) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """Mean score of each response over its matches; the score of a match is the mean over the judged orders.

    Comparisons without a judgement are ignored. A response without any gets the mean of the other responses, so that
    with the group's mean as baseline nothing is learnt from it; if the whole group has none, all get the neutral 3.

    Args:
        judgements: judgements by (shown first, shown second); None where the judge gave none.

    Returns:
        Rewards, and for each a flag that is True if it comes from a judgement.

    Raises:
        ValueError: a comparison with a response that is not in the group, or of a response with itself.
    """
    matches: list[dict[int, list[float]]] = [{} for _ in range(size)]
    for (first, second), judgement in judgements.items():
        if first == second or not (0 <= first < size and 0 <= second < size):
            raise ValueError(f"comparison {(first, second)}: expected two different responses from 0 to {size - 1}")
        if judgement is not None:
            first_score, second_score = judgement.scores
            matches[first].setdefault(second, []).append(first_score)
            matches[second].setdefault(first, []).append(second_score)
    judged = tuple(map(bool, matches))
    known = [_mean([_mean(scores) for scores in match.values()]) for match in matches if match]
    rest = _mean(known) if known else NEUTRAL
    remaining = iter(known)
    return tuple(next(remaining) if there else rest for there in judged), judged


def length_weights(lengths: Sequence[int]) -> tuple[float, ...]:
    """Weights from 1 for the shortest to 0 for the longest, minus their mean, equations 4 and 5; 0 if all are equal.

    Raises:
        ValueError: a length is negative.
    """
    if not lengths:
        return ()
    least, most = min(lengths), max(lengths)
    if least < 0:
        raise ValueError(f"lengths must be at least 0, not {least}")
    if least == most:
        return (0.0,) * len(lengths)
    weights = [1 - (length - least) / (most - least) for length in lengths]
    mean = _mean(weights)
    return tuple(weight - mean for weight in weights)


def group_rewards(
    judgements: Mapping[tuple[int, int], Judgement | None],
    *,
    thinking_lengths: Sequence[int],
    answer_lengths: Sequence[int],
    control: LengthControl | None = None,
) -> GroupRewards:
    """Base rewards, with length control of thinking and answers within the group, and bonuses.

    Cases that the paper leaves open:
    - An empty answer counts as long as the longest one, and neither it nor an empty trace can get a bonus (as in NeMo
      Gym).
    - Equally short responses all get the bonus if they are good enough, since a group has no order.
    - The percentile is taken over the judged responses, with linear interpolation; only these can get a bonus.
    - Without any judgement lengths do not count either, and all rewards are equal: otherwise a judge that is down would
      teach nothing but brevity.

    Args:
        judgements: judgements of the `circular_comparisons`.
        thinking_lengths: length of each response's trace, in tokens or characters; 0 for no trace.
        answer_lengths: length of the answer after the trace.
        control: coefficients; the paper's if None.

    Raises:
        ValueError: the numbers of lengths differ, a length is negative, or a comparison is invalid.
    """
    base, judged = base_rewards(len(thinking_lengths), judgements)
    missing = sum(judgement is None for judgement in judgements.values())
    group = control_lengths(
        base, thinking_lengths=thinking_lengths, answer_lengths=answer_lengths, judged=judged, control=control
    )
    return replace(group, missing=missing)


def control_lengths(
    base: Sequence[float],
    *,
    thinking_lengths: Sequence[int],
    answer_lengths: Sequence[int],
    judged: Sequence[bool] | None = None,
    control: LengthControl | None = None,
) -> GroupRewards:
    """`group_rewards` for known base rewards, from a verifier for example.

    Args:
        base: base reward of each response.
        judged: True for each response that was judged; None if all were.

    Raises:
        ValueError: the numbers of lengths and responses differ, or a length is negative.
    """
    control = control or LengthControl()
    size = len(base)
    judged = tuple(judged or (True,) * size)
    for name, lengths in (("thinking", thinking_lengths), ("answer", answer_lengths)):
        if len(lengths) != size:
            raise ValueError(f"{size} responses, but {len(lengths)} {name} lengths")
    thinking = length_weights(thinking_lengths)
    longest = max(answer_lengths, default=0)
    answer = length_weights([length or longest for length in answer_lengths])
    length = bonus = (0.0,) * size
    if any(judged):
        length = tuple(
            control.thinking * one + control.answer * other for one, other in zip(thinking, answer, strict=True)
        )
        known = [reward for reward, there in zip(base, judged, strict=True) if there]
        threshold = float(np.percentile(known, control.percentile))
        good = [there and reward > threshold for reward, there in zip(base, judged, strict=True)]
        bonus = tuple(
            sum(pair)
            for pair in zip(
                _bonus(thinking_lengths, good, control.thinking_bonus),
                _bonus(answer_lengths, good, control.answer_bonus),
                strict=True,
            )
        )
    rewards = tuple(float(sum(parts)) for parts in zip(base, length, bonus, strict=True))
    return GroupRewards(rewards=rewards, base=tuple(base), length=length, bonus=bonus, judged=judged)


def _bonus(lengths: Sequence[int], good: Sequence[bool], bonus: float) -> list[float]:
    shortest = min((length for length in lengths if length), default=None)
    return [bonus if length == shortest and is_good else 0.0 for length, is_good in zip(lengths, good, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
