"""Rewards that depend on all responses to one prompt, for all engines."""

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
"""Function that takes all groups of a step and returns the rewards of each group's members, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One response of a group, with its reward and lengths.

    Attributes:
        reward: reward from the environment.
        thinking_tokens: number of reasoning tokens, including the closing tag; 0 without reasoning.
        answer_tokens: number of all other generated tokens.
        prompt: messages before the response.
        response: last response of the rollout.
    """

    reward: float
    thinking_tokens: int
    answer_tokens: int
    prompt: tuple[Message, ...]
    response: Response


def group_reward(group: Mapping[str, Any], where: str = "group") -> GroupReward | None:
    """Build the group reward function from its settings; return None if they define no group reward.

    Args:
        group: settings of `algorithms.GroupReward`; null means the default. With a reward model, length control is
            applied only if `length_control` is set.
        where: key of the settings, for error messages.

    Raises:
        ValueError: a setting is invalid; the message names its key.
    """
    defined = {key: value for key, value in group.items() if value is not None}
    settings = checked(algorithms.GroupReward, defined, where)
    if group.get("length_control") is None and settings.judge is None:
        return None
    control = checked(LengthControl, settings.length_control, where=f"{where}.length_control")
    if settings.judge is None:
        return lambda groups: [length_controlled(members, control) for members in groups]
    judge = Judge(checked(JudgeSettings, settings.judge, f"{where}.judge", strict=True))
    both = settings.both_orders
    if settings.show == "reward_model":
        optional = control if settings.length_control else None
        return lambda groups: asyncio.run(judged(groups, judge, optional, show=None))
    show = SHOWN[settings.show]
    return lambda groups: asyncio.run(judged(groups, judge, control, show=show, both_orders=both))


def check_judges(environments: Iterable[Environment], group: Mapping[str, Any]) -> None:
    """Raise ValueError, before training starts, if a judge is missing, unreachable or serves a different model.

    Args:
        environments: environments of the run, some of which have a judge of their own.
        group: settings of `algorithms.GroupReward`, which may contain another judge.
    """
    environments = list(environments)
    checks = [environment.reach for environment in environments if environment.reach is not None]
    if group.get("judge"):
        checks.append(Judge(checked(JudgeSettings, group["judge"], "group.judge", strict=True)).check)
    for environment in environments:
        if environment.judged_in_groups and not group.get("judge"):
            raise ValueError(
                f"environment {environment.name!r} requires a judge that compares the responses of a group, but none "
                "is set; set rl.group.judge as preset=nemotron3_rlhf does, or online.group.judge for `nemo-ext online`"
            )

    async def reach() -> None:
        for check in checks:
            await check()

    asyncio.run(reach())


def lengths(member: Member) -> tuple[int, int]:
    """Return the token counts of reasoning and answer for length control; 0 for a part without text or tool calls."""
    response = member.response
    return (
        member.thinking_tokens if (response.thinking or "").strip() else 0,
        member.answer_tokens if response.answer.strip() or response.tool_calls else 0,
    )


def length_controlled(members: Sequence[Member], control: LengthControl) -> tuple[float, ...]:
    """Return one group's environment rewards after length control."""
    thinking, answers = zip(*map(lengths, members), strict=True)
    rewards = [member.reward for member in members]
    return control_lengths(rewards, thinking_lengths=thinking, answer_lengths=answers, control=control).rewards


async def judged(
    groups: Sequence[Sequence[Member]],
    judge: Judge,
    control: LengthControl | None,
    *,
    show: Show | None = genrm_messages,
    both_orders: bool = False,
) -> list[tuple[float, ...]]:
    """Compute the rewards of all groups by circular comparison (`nemo_ext.rl.rewards.rlhf`) or with a reward model.

    All groups are judged concurrently. The environment's rewards are ignored. Requests without an answer are logged.

    Args:
        control: length control; not applied if None.
        show: function that writes the judge's messages for two responses; None for a reward model, which scores each
            response separately.
        both_orders: whether each pair is judged in both orders.

    Returns:
        For each group, the rewards of its responses.

    Raises:
        ValueError: the judge answered no request, so the step has no training signal.
    """
    scoring = []
    for group in groups:
        shared: Any = {"lengths": [lengths(member) for member in group], "control": control}
        prompt, responses = group[0].prompt, [member.response for member in group]
        if show is None:
            scoring.append(reward_model_rewards(judge, prompt, responses, **shared))
        else:
            scoring.append(rlhf_rewards(judge, prompt, responses, **shared, show=show, both_orders=both_orders))
    scored = await asyncio.gather(*scoring)
    missing = sum(result.missing for result in scored)
    if missing and not any(any(result.judged) for result in scored):
        raise ValueError(
            f"group.judge answered none of {missing:,} questions ({scored[0].problem}); check "
            "group.judge.endpoint, then rerun the command to resume"
        )
    if missing:
        problem = next(result.problem for result in scored if result.missing)
        notice(f"the judge did not answer {missing:,} questions, which are not counted: {problem}")
    return [result.rewards for result in scored]
