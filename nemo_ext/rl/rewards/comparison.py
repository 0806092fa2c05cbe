"""Rewards for a group of responses, from comparisons of each response with the next and from relative lengths.

Nemotron 3 Nano, section 3.3.2. Where NeMo Gym's server genrm_compare differs in details, this follows the paper.
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
    """A judge's judgement of two responses.

    Attributes:
        helpfulness: scores from 1 to 5 of the responses shown first and second.
        ranking: preference from 1 (the first is far superior) to 6 (the second is far superior).

    Raises:
        ValueError: a number is NaN or out of range.
    """

    helpfulness: tuple[float, float]
    ranking: float

    def __post_init__(self) -> None:
        for score in self.helpfulness:
            if not LEAST_HELPFUL <= score <= MOST_HELPFUL:
                raise ValueError(f"helpfulness={score}: expected a score from {LEAST_HELPFUL} to {MOST_HELPFUL}")
        if not FIRST_SUPERIOR <= self.ranking <= SECOND_SUPERIOR:
            raise ValueError(f"ranking={self.ranking}: expected a ranking from {FIRST_SUPERIOR} to {SECOND_SUPERIOR}")

    @property
    def scores(self) -> tuple[float, float]:
        """Helpfulness of both responses, with the ranking as tie-breaker (equations 2 and 3); from -1.5 to 7.5."""
        first, second = self.helpfulness
        if first != second:
            return first, second
        return first + (NO_PREFERENCE - self.ranking), second + (self.ranking - NO_PREFERENCE)


@pydantic.dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthControl:
    """Length control within a group; the defaults are the paper's. Values out of range raise ValueError.

    Attributes:
        thinking: coefficient lambda of the reasoning traces' lengths, equation 6.
        answer: coefficient lambda of the answers' lengths.
        thinking_bonus: bonus beta for the shortest trace, if its base reward is above the percentile.
        answer_bonus: bonus beta for the shortest answer, under the same condition.
        percentile: percentile of the group's base rewards, 0 to 100.
    """

    thinking: Coefficient = 0.5
    answer: Coefficient = 0.5
    thinking_bonus: Coefficient = 0.5
    answer_bonus: Coefficient = 0.5
    percentile: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 80.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """Rewards of a group's responses, with their components; each tuple has one value per response.

    Attributes:
        rewards: total rewards.
        base: base rewards, from the judge or the environment.
        length: length components, which sum to zero over the group.
        bonus: bonuses for the shortest good responses.
        judged: True for responses that were judged; the others get the mean base reward of the judged ones.
        missing: number of missing judgements.
        problem: reason for one of the missing judgements; "" if there are none.
    """

    rewards: tuple[float, ...]
    base: tuple[float, ...]
    length: tuple[float, ...]
    bonus: tuple[float, ...]
    judged: tuple[bool, ...]
    missing: int = 0
    problem: str = ""


def circular_comparisons(size: int, *, both_orders: bool = False) -> list[tuple[int, int]]:
    """Return the pairs to compare, (shown first, shown second): each response with the next, the last with the first.

    These are "exactly N comparisons", as in NeMo Gym: each response is "judged twice in different positions", once
    first and once second, against different responses. With `both_orders=True` each pair is shown in both orders, 2N
    comparisons. No ordered pair is repeated, and a single response has no comparison.
    """
    circle = [(one, (one + 1) % size) for one in range(size)] if size > 1 else []
    if both_orders:
        circle = [pair for one, other in circle for pair in ((one, other), (other, one))]
    return list(dict.fromkeys(circle))


def base_rewards(
    size: int, judgements: Mapping[tuple[int, int], Judgement | None]
) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """Compute each response's mean score over its opponents; its score against an opponent is the mean of both orders.

    Comparisons without a judgement are ignored. A response without judged comparisons gets the mean of the others, so
    its advantage is zero if the baseline is the group's mean. If no comparison was judged, all get the neutral 3.

    Args:
        judgements: mapping from (shown first, shown second) to judgements; None where the judge gave none.

    Returns:
        One reward per response, and one flag per response that is True if its reward comes from a judgement.
    """
    matches: list[dict[int, list[float]]] = [{} for _ in range(size)]
    for (first, second), judgement in judgements.items():
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
    """Return weights from 1 (shortest) to 0 (longest) minus their mean, equations 4 and 5; 0 if lengths are equal."""
    least, most = min(lengths, default=0), max(lengths, default=0)
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
    """Compute a group's rewards: base rewards from judgements, plus length control and bonuses within the group.

    Cases that the paper leaves open:
    - An empty answer counts as long as the longest one, and neither it nor an empty trace can get a bonus (as in NeMo
      Gym).
    - Equally short responses all get the bonus if they are good enough, since a group has no order.
    - The percentile is taken over the judged responses, with linear interpolation; only these can get a bonus.
    - If no comparison was judged, lengths do not count either and all rewards are equal. Otherwise, an unavailable
      judge would teach the policy nothing but brevity.

    Args:
        judgements: mapping from the pairs of `circular_comparisons` to judgements; None where there is none.
        thinking_lengths: length of each response's reasoning trace, in tokens or characters; 0 if there is no trace.
        answer_lengths: length of each response's answer after the trace, in the same unit.
        control: coefficients; the paper's if None.
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
    """Compute a group's rewards as `group_rewards` does, but from known base rewards, such as a verifier's.

    Args:
        base: base reward of each response.
        thinking_lengths, answer_lengths, control: see `group_rewards`.
        judged: True for each response that was judged; None if all were.
    """
    control = control or LengthControl()
    judged = tuple(judged or (True,) * len(base))
    thinking = length_weights(thinking_lengths)
    longest = max(answer_lengths, default=0)
    answer = length_weights([length or longest for length in answer_lengths])
    length = bonus = (0.0,) * len(base)
    if any(judged):
        length = tuple(
            control.thinking * one + control.answer * other for one, other in zip(thinking, answer, strict=True)
        )
        known = [reward for reward, there in zip(base, judged, strict=True) if there]
        threshold = float(np.percentile(known, control.percentile))
        good = [there and reward > threshold for reward, there in zip(base, judged, strict=True)]
        of_thinking = _bonus(thinking_lengths, good, control.thinking_bonus)
        bonus = tuple(map(sum, zip(of_thinking, _bonus(answer_lengths, good, control.answer_bonus), strict=True)))
    rewards = tuple(float(sum(parts)) for parts in zip(base, length, bonus, strict=True))
    return GroupRewards(rewards=rewards, base=tuple(base), length=length, bonus=bonus, judged=judged)


def _bonus(lengths: Sequence[int], good: Sequence[bool], bonus: float) -> list[float]:
    shortest = min((length for length in lengths if length), default=None)
    return [bonus if length == shortest and is_good else 0.0 for length, is_good in zip(lengths, good, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
