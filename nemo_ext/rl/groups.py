"""Rewards that depend on all responses to one prompt, whatever engine generated them."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import Message
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import check_keys, checked, nearest
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.judge import Judge, JudgeSettings
from nemo_ext.rl.rewards.comparison import LengthControl, control_lengths
from nemo_ext.rl.rewards.genrm import genrm_messages
from nemo_ext.rl.rewards.rlhf import SHOWN, Show, rlhf_rewards

GroupReward = Callable[[Sequence[Sequence["Member"]]], Sequence[Sequence[float]]]
"""Function that returns the rewards of the members of all groups of a step, in order."""
KEYS = ("length_control", "judge", "show", "both_orders")


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
        group: one of `length_control` (a `LengthControl`) or `judge` (a `JudgeSettings`) with it; `show`, how the
            judge sees responses, of `nemo_ext.rl.rewards.rlhf.SHOWN`; `both_orders`, to judge each pair in both orders.

    Raises:
        ValueError: naming the key.
    """
    check_keys(group, KEYS, required=(), where="group")
    shown = group.get("show") or "genrm"
    if shown not in SHOWN:
        raise ValueError(f"group.show: unknown {shown!r}: {nearest(str(shown), SHOWN)}")
    if group.get("length_control") is None and group.get("judge") is None:
        return None
    control = checked(LengthControl, group.get("length_control") or {}, where="group.length_control")
    if group.get("judge") is None:
        return lambda groups: [length_controlled(members, control) for members in groups]
    judge, both = Judge(JudgeSettings.of(group["judge"])), group.get("both_orders", True)
    return lambda groups: asyncio.run(judged(groups, judge, control, show=SHOWN[shown], both_orders=both))


def check_judges(environments: Iterable[Environment], group: Mapping[str, Any]) -> None:
    """Check that all judges of a run can be reached, before days of it are spent.

    Raises:
        ValueError: an environment needs a judge of groups and has none, or a judge does not answer or serves another
            model.
    """
    environments = list(environments)
    asked = [environment.reach for environment in environments if environment.reach is not None]
    if group.get("judge"):
        asked.append(Judge(JudgeSettings.of(group["judge"])).check)
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
    control: LengthControl,
    *,
    show: Show = genrm_messages,
    both_orders: bool = True,
) -> list[tuple[float, ...]]:
    """Rewards of groups by circular comparison (`nemo_ext.rl.rewards.rlhf`), all at once.

    The environment's rewards are ignored. Comparisons without an answer are reported.

    Raises:
        ValueError: the judge answered none of the questions: nothing could be learnt from such a step.
    """
    asked = [
        rlhf_rewards(
            judge,
            group[0].prompt,
            [one.response for one in group],
            lengths=[lengths(one) for one in group],
            control=control,
            show=show,
            both_orders=both_orders,
        )
        for group in groups
    ]
    given = await asyncio.gather(*asked)
    missing = sum(one.missing for one in given)
    if missing and not any(any(one.judged) for one in given):
        raise ValueError(f"group.judge: none of {missing:,} comparisons was answered: {given[0].problem}")
    if missing:
        problem = next(one.problem for one in given if one.missing)
        notice(f"judge: {missing:,} comparisons without an answer: {problem}")
    return [one.rewards for one in given]
