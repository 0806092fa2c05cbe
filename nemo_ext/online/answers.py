"""Answers of a policy to tasks, with their rewards: what pairs are made of.

tasks/NAME.jsonl     tasks of one environment and mode
store/, report.md    the answers, as `nemo-ext evaluate` keeps them
judged.jsonl         rewards by a judge of groups, appended
generations.jsonl    the answers with rewards, as `nemo-ext preference_data` reads them; complete when it is there
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

from nemo_ext.evaluation import job, rollouts
from nemo_ext.evaluation.benchmark import PLAIN, Benchmark, Mode
from nemo_ext.evaluation.score import said
from nemo_ext.evaluation.store import Sample
from nemo_ext.generate.settings import Sampling
from nemo_ext.job.files import complete_file, write_text
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.records import append_lines, read_lines
from nemo_ext.rl.groups import GroupReward, Member
from nemo_ext.rl.task import Task

GENERATIONS, JUDGED, RESULTS = "generations.jsonl", "judged.jsonl", "results.json"
AT_ONCE = 64
"""Groups that are judged before their rewards are kept."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Rewards of the answers to one task.

    Attributes:
        environment, id: the task.
        rewards: reward of each answer, in the order of their numbers.
    """

    environment: str
    id: str
    rewards: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """How tasks are asked.

    Attributes:
        samples: answers to a task.
        sampling: their sampling.
        max_tokens: most tokens of one.
        environments: settings of environments by name.
        group: rewards over the answers to one task; None for the environments' scores.
    """

    samples: int
    sampling: Sampling
    max_tokens: int
    environments: Mapping[str, Mapping[str, Any]]
    group: GroupReward | None


def answered(config: Mapping[str, Any], tasks: Sequence[Task], asked: Asked, folder: Path) -> list[dict[str, Any]]:
    """Lines of generations.jsonl, one a task; the same call goes on after a kill.

    Args:
        config: config of the evaluation, whose `served` is the policy.
        tasks: tasks to ask.
        folder: where all of it is kept.

    Raises:
        ValueError: the model cannot be served, or nothing was answered or judged.
    """
    path = folder / GENERATIONS
    if not path.is_file():
        _write(config, tasks, asked, folder)
    with path.open() as file:
        return [json.loads(line) for line in file]


def _write(config: Mapping[str, Any], tasks: Sequence[Task], asked: Asked, folder: Path) -> None:
    settings = job.read(_of_evaluation(config, folder))
    benchmarks = list(_benchmarks(tasks, asked, folder / "tasks"))
    found = job.asked(_of_evaluation(config, folder), settings, benchmarks)
    if found["missing"]:
        raise ValueError(next(iter(found["missing"].values())))
    verifiers = {name: entry["verifier"] for name, entry in found["benchmarks"].items()}
    answers: defaultdict[tuple[str, str], list[tuple[Sample, float]]] = defaultdict(list)
    for sample, score in rollouts.scored(folder, verifiers):
        answers[sample.key.benchmark.partition("@")[0], sample.key.problem].append((sample, score))
    groups = [
        (task, sorted(answers[task.environment, task.id], key=lambda one: one[0].key.sample))
        for task in tasks
        if answers[task.environment, task.id]
    ]
    wanted, there = len(tasks) * asked.samples, sum(len(group) for _, group in groups)
    if not there:
        raise ValueError(f"{folder}: none of {wanted:,} answers has a score: report.md there says why")
    if there < wanted:
        notice(f"{wanted - there:,} of {wanted:,} answers are missing or have no score: {folder / 'report.md'}")
    rewards = _rewards(groups, asked.group, folder / JUDGED)
    with complete_file(folder / GENERATIONS) as file:
        for task, group in groups:
            line = _line(task, group, rewards[task.environment, task.id])
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def _of_evaluation(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The keys that evaluation reads."""
    keys = ("served", "serving", "files_from", "trust_remote_code", "evaluate")
    return {**{key: config[key] for key in keys}, "endpoint": None, "key_variable": None, "run_dir": str(folder)}


def _benchmarks(tasks: Iterable[Task], asked: Asked, folder: Path) -> Iterator[Benchmark]:
    """A benchmark for each environment, and for each mode of thinking that its tasks ask for."""
    kinds: defaultdict[tuple[str, bool | None], list[Task]] = defaultdict(list)
    for task in tasks:
        kinds[task.environment, task.thinking].append(task)
    for (environment, thinking), own in kinds.items():
        mode = {None: PLAIN, True: "on", False: "off"}[thinking]
        name = environment if thinking is None else f"{environment}@{mode}"
        path = folder / f"{name}.jsonl"
        write_text(path, "".join(f"{json.dumps(task.record())}\n" for task in own))
        body: dict[str, Any] = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        yield Benchmark(
            name=name,
            tasks=(str(path.resolve()),),
            environment=environment,
            environment_settings=asked.environments.get(environment, {}),
            samples=asked.samples,
            sampling=asked.sampling,
            max_tokens=asked.max_tokens,
            modes={mode: Mode(body=body)},
        )


def _rewards(
    groups: Sequence[tuple[Task, Sequence[tuple[Sample, float]]]], reward: GroupReward | None, path: Path
) -> dict[tuple[str, str], Sequence[float]]:
    """Rewards of each task's answers, by environment and id."""
    if reward is None:
        return {(task.environment, task.id): [score for _, score in group] for task, group in groups}
    kept = {(line.environment, line.id): line.rewards for line in read_lines(path, Judged, what="rewards of a task")}
    left = [(task, group) for task, group in groups if (task.environment, task.id) not in kept]
    with progress_of("judging:", len(groups), unit="prompts") as advance:
        advance(len(groups) - len(left))
        for some in batched(left, AT_ONCE):
            given = reward([[_member(task, *one) for one in group] for task, group in some])
            lines = [
                Judged(environment=task.environment, id=task.id, rewards=list(rewards))
                for (task, _), rewards in zip(some, given, strict=True)
            ]
            append_lines(path, lines, Judged, what="rewards of a task")
            kept |= {(line.environment, line.id): line.rewards for line in lines}
            advance(len(some))
    return kept


def _member(task: Task, sample: Sample, score: float) -> Member:
    thinking = sample.reasoning_tokens or 0
    return Member(
        reward=score,
        thinking_tokens=thinking,
        answer_tokens=max(0, (sample.completion_tokens or 0) - thinking),
        prompt=task.prompt,
        response=_said(sample),
    )


def _said(sample: Sample) -> Any:
    return said(
        sample.answer,
        sample.reasoning,
        sample.tool_calls,
        tokens=sample.completion_tokens,
        finished=sample.finish_reason != "length",
    ).response


def _line(task: Task, group: Sequence[tuple[Sample, float]], rewards: Sequence[float]) -> dict[str, Any]:
    """A record of `nemo-ext preference_data`.

    Answers that were cut off stand apart, in `cut`: in a pair they would be trained on as if they had ended there.
    """
    record = task.record()
    line: dict[str, Any] = {"id": f"{task.environment}/{task.id}", "messages": record["prompt"], "task": task.domain}
    if "tools" in record:
        line["tools"] = record["tools"]
    line |= {"generations": [], "cut": []}
    for (sample, _), reward in zip(group, rewards, strict=True):
        response = _said(sample)
        message: dict[str, Any] = {"role": "assistant", "content": response.answer}
        if response.thinking is not None:
            message["reasoning_content"] = response.thinking
        if response.tool_calls:
            message["tool_calls"] = list(sample.tool_calls)
        one = {"message": message, "score": float(reward), "tokens": sample.completion_tokens}
        line["generations" if response.finished else "cut"].append(one)
    return line
