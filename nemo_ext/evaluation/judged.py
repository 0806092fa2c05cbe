"""Rewards from a judge that sees all answers to a task, for `nemo-ext rollouts` and `nemo-ext online`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from nemo_ext.evaluation.score import said
from nemo_ext.evaluation.store import Sample, digest_of
from nemo_ext.job.progress import progress_of
from nemo_ext.job.records import append_lines, read_lines
from nemo_ext.rl.groups import GroupReward, Member
from nemo_ext.rl.task import Task

JUDGED = "judged.jsonl"
AT_ONCE = 64
"""Number of groups judged at a time; their rewards are stored together."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Rewards of the responses to one task.

    Attributes:
        environment, id: environment and id of the task.
        rewards: one reward per response, in order of sample number.
        digest: hash of the judge's settings and of the responses with their scores.
    """

    environment: str
    id: str
    rewards: Sequence[float]
    digest: str = ""


def group_rewards(
    groups: Sequence[tuple[Task, Sequence[tuple[Sample, float]]]],
    reward: GroupReward | None,
    settings: Mapping[str, Any],
    path: Path,
) -> dict[tuple[str, str], Sequence[float]]:
    """Return the rewards of all responses, as a mapping from (environment, task id) to one reward per response.

    Args:
        groups: each task with its responses and their scores.
        reward: group reward function; if None, the scores are the rewards.
        settings: settings of `reward`; stored rewards with other settings are not reused.
        path: path of judged.jsonl; groups that it contains unchanged are not judged again, and new ones are appended.
    """
    if reward is None:
        return {(task.environment, task.id): [score for _, score in group] for task, group in groups}
    judged = {line.digest: line.rewards for line in read_lines(path, Judged, what="rewards of a task")}
    digests, remaining = dict[tuple[str, str], str](), []
    for task, group in groups:
        members = [_member(task, *scored) for scored in group]
        digest = digest_of(_judging(settings), task.environment, task.id, members)
        digests[task.environment, task.id] = digest
        if digest not in judged:
            remaining.append((task, members, digest))
    with progress_of("judging:", len(groups), unit="prompts") as advance:
        advance(len(groups) - len(remaining))
        for batch in batched(remaining, AT_ONCE):
            rewards = reward([members for _, members, _ in batch])
            lines = [
                Judged(environment=task.environment, id=task.id, rewards=list(task_rewards), digest=digest)
                for (task, _, digest), task_rewards in zip(batch, rewards, strict=True)
            ]
            append_lines(path, lines, Judged, what="rewards of a task")
            judged |= {line.digest: line.rewards for line in lines}
            advance(len(batch))
    return {key: judged[digest] for key, digest in digests.items()}


def _judging(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group reward that affect the rewards, which excludes how its endpoint is reached."""
    judge = dict(settings.get("judge") or {})
    names = ("model", "sampling") if judge.get("model") else ("endpoint", "sampling")
    return {**settings, "judge": {name: judge.get(name) for name in names}}


def _member(task: Task, sample: Sample, score: float) -> Member:
    thinking = sample.reasoning_tokens or 0
    return Member(
        reward=score,
        thinking_tokens=thinking,
        answer_tokens=max(0, (sample.completion_tokens or 0) - thinking),
        prompt=task.prompt,
        response=response_of(sample),
    )


def response_of(sample: Sample) -> Any:
    """Return a stored answer as a response, with its reasoning and tool calls."""
    return said(
        sample.answer,
        sample.reasoning,
        sample.tool_calls,
        tokens=sample.completion_tokens,
        finished=sample.finish_reason != "length",
    ).response
