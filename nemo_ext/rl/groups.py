"""Rewards that depend on all responses to one prompt, whatever engine generated them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked
from nemo_ext.rl import algorithms
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.judge import Judge, JudgeSettings
from nemo_ext.rl.rewards.comparison import LengthControl, control_lengths
from nemo_ext.rl.rewards.genrm import genrm_messages
from nemo_ext.rl.rewards.rlhf import SHOWN, Show, reward_model_rewards, rlhf_rewards

GroupReward = Callable[[Sequence[Sequence["Member"]]], Sequence[Sequence[float]]]
"""Function that returns the rewards of the members of all groups of a step, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One response of a group.

    Attributes:
        reward: reward from the environment.
        thinking_tokens: number of reasoning tokens, including the closing tag; 0 without reasoning.
        answer_tokens: number of all other generated tokens.
        prompt: messages before the response.
        response: last response.
    """

    reward: float
    thinking_tokens: int
    answer_tokens: int
    prompt: tuple[Message, ...]
    response: Response


def group_reward(group: Mapping[str, Any]) -> GroupReward | None:
    """Group reward function that the settings ask for, or None if they ask for none.

    Args:
        group: an `algorithms.GroupReward`, where null is the default. A reward model's lengths are controlled only if
            `length_control` is given.

    Raises:
        ValueError: naming the key.
    """
    given = checked(algorithms.GroupReward, {key: value for key, value in group.items() if value is not None}, "group")
    if group.get("length_control") is None and given.judge is None:
        return None
    control = checked(LengthControl, given.length_control, where="group.length_control")
    if given.judge is None:
        return lambda groups: [length_controlled(members, control) for members in groups]
    judge, both = Judge(checked(JudgeSettings, given.judge, "judge", strict=True)), given.both_orders
    if given.show == "reward_model":
        only = control if given.length_control else None
        return lambda groups: asyncio.run(judged(groups, judge, only, show=None))
    show = SHOWN[given.show]
    return lambda groups: asyncio.run(judged(groups, judge, control, show=show, both_orders=both))


def check_judges(environments: Iterable[Environment], group: Mapping[str, Any]) -> None:
    """Check that all judges of a run can be reached, before days of it are spent.

    Raises:
        ValueError: an environment needs a judge of groups and has none, or a judge does not answer or serves another
            model.
    """
    environments = list(environments)
    asked = [environment.reach for environment in environments if environment.reach is not None]
    if group.get("judge"):
        asked.append(Judge(checked(JudgeSettings, group["judge"], "judge", strict=True)).check)
    for environment in environments:
        if environment.judged_in_groups and not group.get("judge"):
            raise ValueError(
                f"environment {environment.name!r}: its responses earn nothing by themselves: set group.judge, as "
                "preset=nemotron3_rlhf does"
            )

    async def reach() -> None:
        for one in asked:
            await one()

    asyncio.run(reach())


def lengths(member: Member) -> tuple[int, int]:
    """Tokens of trace and answer for length control; 0 for what is empty but for its tags and the end token."""
    response = member.response
    return (
        member.thinking_tokens if (response.thinking or "").strip() else 0,
        member.answer_tokens if response.answer.strip() or response.tool_calls else 0,
    )


def length_controlled(members: Sequence[Member], control: LengthControl) -> tuple[float, ...]:
    """Rewards of verifiers instead of a judge, with lengths controlled within the group."""
    thinking, answers = zip(*map(lengths, members), strict=True)
    given = control_lengths(
        [member.reward for member in members], thinking_lengths=thinking, answer_lengths=answers, control=control
    )
    return given.rewards


async def judged(
    groups: Sequence[Sequence[Member]],
    judge: Judge,
    control: LengthControl | None,
    *,
    show: Show | None = genrm_messages,
    both_orders: bool = True,
) -> list[tuple[float, ...]]:
    """Rewards of groups by circular comparison (`nemo_ext.rl.rewards.rlhf`), or by a reward model, all at once.

    The environment's rewards are ignored. Comparisons without an answer are reported.

    Args:
        show: how the judge sees two responses; None for a reward model, which sees each by itself.

    Raises:
        ValueError: the judge answered none of the questions: nothing could be learnt from such a step.
    """
    asked = []
    for group in groups:
        own: Any = {"lengths": [lengths(one) for one in group], "control": control}
        prompt, responses = group[0].prompt, [one.response for one in group]
        if show is None:
            asked.append(reward_model_rewards(judge, prompt, responses, **own))
        else:
            asked.append(rlhf_rewards(judge, prompt, responses, **own, show=show, both_orders=both_orders))
    given = await asyncio.gather(*asked)
    missing = sum(one.missing for one in given)
    if missing and not any(any(one.judged) for one in given):
        raise ValueError(f"group.judge: none of {missing:,} questions was answered: {given[0].problem}")
    if missing:
        problem = next(one.problem for one in given if one.missing)
        notice(f"judge: {missing:,} questions without an answer: {problem}")
    return [one.rewards for one in given]
