"""Rewards that depend on all responses to one prompt, whatever engine generated them."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_ext.data.settings import check_keys
from nemo_ext.data.sft.checked import checked
from nemo_ext.data.sft.sample import Message
from nemo_ext.rl.judge import Judge, JudgeSettings
from nemo_ext.rl.response import Response
from nemo_ext.rl.rewards.comparison import LengthControl, length_weights
from nemo_ext.rl.rewards.rlhf import rlhf_rewards

GroupReward = Callable[[Sequence[Sequence["Member"]]], Sequence[Sequence[float]]]
"""The rewards of the members of all groups of a step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One response of a group.

    Attributes:
        reward: what the environment gave.
        thinking_tokens: of the reasoning, with the tag that ends it; 0 without one.
        answer_tokens: all others that were generated.
        prompt: messages before the response.
        response: the last one.
    """

    reward: float
    thinking_tokens: int
    answer_tokens: int
    prompt: tuple[Message, ...]
    response: Response


def group_reward(group: Mapping[str, Any]) -> GroupReward | None:
    """The rewards over groups that settings ask for; None if they ask for none.

    Args:
        group: one of `length_control` (a `LengthControl`) or `judge` (a `JudgeSettings`) with it.

    Raises:
        ValueError: naming the key.
    """
    check_keys(group, ("length_control", "judge"), required=(), where="group")
    if group.get("length_control") is None and group.get("judge") is None:
        return None
    control = checked(LengthControl, group.get("length_control") or {}, where="group.length_control")
    if group.get("judge") is None:
        return lambda groups: [length_controlled(members, control) for members in groups]
    judge = Judge(JudgeSettings.of(group["judge"]))
    return lambda groups: asyncio.run(judged(groups, judge, control))


def length_controlled(members: Sequence[Member], control: LengthControl) -> list[float]:
    """Rewards of verified responses with the length of thinking and answers controlled within the group.

    Nemotron 3 Nano, section 3.3.2, on rewards of verifiers in place of a judge's: plus the centred weights of both
    lengths, plus the bonus of the shortest, if its reward is above the group's percentile.
    """
    total = np.array([member.reward for member in members])
    above = total > np.percentile(total, control.percentile)
    thinking = [member.thinking_tokens for member in members]
    answers = [member.answer_tokens for member in members]
    total = total + control.thinking * np.array(length_weights(thinking))
    # No answer is no short one, as in `nemo_ext.rl.rewards.comparison`: it counts as the longest.
    total = total + control.answer * np.array(length_weights([length or max(answers) for length in answers]))
    for lengths, bonus in ((thinking, control.thinking_bonus), (answers, control.answer_bonus)):
        shortest = min((length for length in lengths if length), default=-1)
        total = total + bonus * (above & (np.array(lengths) == shortest))
    return [float(value) for value in total]


async def judged(groups: Sequence[Sequence[Member]], judge: Judge, control: LengthControl) -> list[tuple[float, ...]]:
    """Rewards of groups by circular comparison (`nemo_ext.rl.rewards.rlhf`), all at once.

    What the environment gave does not count.
    """
    asked = [rlhf_rewards(judge, group[0].prompt, [one.response for one in group], control=control) for group in groups]
    return [given.rewards for given in await asyncio.gather(*asked)]
