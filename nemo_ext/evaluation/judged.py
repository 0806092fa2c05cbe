"""Rewards from a judge that sees all answers to a task, for `nemo-ext rollouts` and `nemo-ext online`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from nemo_ext.evaluation.score import said
from nemo_ext.evaluation.store import Sample
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
    """

    environment: str
    id: str
    rewards: Sequence[float]


def group_rewards(
    groups: Sequence[tuple[Task, Sequence[tuple[Sample, float]]]], reward: GroupReward | None, path: Path
) -> dict[tuple[str, str], Sequence[float]]:
    """Return the rewards of all responses, as a mapping from (environment, task id) to one reward per response.

    Args:
        groups: each task with its responses and their scores.
        reward: group reward function; if None, the scores are the rewards.
        path: path of judged.jsonl; whole groups that it contains are not judged again, and new ones are appended.
    """
    if reward is None:
        return {(task.environment, task.id): [score for _, score in group] for task, group in groups}
    judged = {(line.environment, line.id): line.rewards for line in read_lines(path, Judged, what="rewards of a task")}
    remaining = [
        (task, group) for task, group in groups if len(judged.get((task.environment, task.id), ())) != len(group)
    ]
    with progress_of("judging:", len(groups), unit="prompts") as advance:
        advance(len(groups) - len(remaining))
        for batch in batched(remaining, AT_ONCE):
            rewards = reward([[_member(task, *scored) for scored in group] for task, group in batch])
            lines = [
                Judged(environment=task.environment, id=task.id, rewards=list(task_rewards))
                for (task, _), task_rewards in zip(batch, rewards, strict=True)
            ]
            append_lines(path, lines, Judged, what="rewards of a task")
            judged |= {(line.environment, line.id): line.rewards for line in lines}
            advance(len(batch))
    return judged


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
