"""The settings of groups: baselines, standard deviations and rewards over a group."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_ext.data.settings import check_keys, nearest
from nemo_ext.data.sft.checked import checked
from nemo_ext.rl.judge import Judge, JudgeSettings
from nemo_ext.rl.nemo_rl.group_rewards import GroupReward, Groups, Member
from nemo_ext.rl.nemo_rl.register import PREFIX
from nemo_ext.rl.rewards.comparison import LengthControl, length_weights
from nemo_ext.rl.rewards.rlhf import rlhf_rewards

_BASELINES = ("mean", "leave_one_out")
_NORMALISATIONS = ("std", "unbiased_std", "none")


def groups_of(*, generations: int, advantage: Mapping[str, Any] | None, group: Mapping[str, Any] | None) -> Groups:
    """How a run's groups are scored.

    Args:
        generations: responses to a prompt.
        advantage: `baseline` (mean, leave_one_out) and `normalise` (std, unbiased_std, none); NeMo-RL's
            `grpo.normalize_rewards` says whether the deviation divides.
        group: `environments`, names of those it is for (all if left out), and one of `length_control` (a
            `LengthControl`) or `judge` (a `JudgeSettings`) with it.

    Raises:
        ValueError: naming the key.
    """
    given = dict(advantage or {})
    check_keys(given, ("baseline", "normalise"), required=(), where="advantage")
    baseline, normalise = given.get("baseline", "mean"), given.get("normalise", "unbiased_std")
    for key, value, known in (("baseline", baseline, _BASELINES), ("normalise", normalise, _NORMALISATIONS)):
        if value not in known:
            raise ValueError(f"advantage.{key}: unknown {value!r}: {nearest(str(value), known)}")
    environments = None
    reward = None
    if group is not None:
        check_keys(group, ("environments", "length_control", "judge"), required=(), where="group")
        names = group.get("environments")
        environments = None if names is None else frozenset(PREFIX + name for name in names)
        reward = _reward(group)
    return Groups(
        generations=generations,
        leave_one_out=baseline == "leave_one_out",
        biased=normalise == "std",
        reward=reward,
        tasks=environments,
    )


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


def _reward(group: Mapping[str, Any]) -> GroupReward | None:
    if group.get("length_control") is None and group.get("judge") is None:
        return None
    control = checked(LengthControl, group.get("length_control") or {}, where="group.length_control")
    if group.get("judge") is None:
        return lambda groups: [length_controlled(members, control) for members in groups]
    judge = Judge(JudgeSettings.of(group["judge"]))
    return lambda groups: asyncio.run(judged(groups, judge, control))
