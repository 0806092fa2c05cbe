"""A policy's responses to tasks, with their rewards, from which preference pairs are made.

tasks/NAME.jsonl     tasks of one environment and thinking mode
store/, report.md    responses, as stored by `nemo-ext evaluate`
judged.jsonl         rewards from the group judge, appended batch by batch
generations.jsonl    responses with rewards, for `nemo-ext preference_data`; written once all are complete
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext.evaluation import job, rollouts
from nemo_ext.evaluation.benchmark import PLAIN, Benchmark, Mode
from nemo_ext.evaluation.judged import JUDGED, group_rewards, response_of
from nemo_ext.evaluation.store import Sample
from nemo_ext.generate.settings import Sampling
from nemo_ext.job.files import complete_file, write_text
from nemo_ext.job.progress import notice
from nemo_ext.rl.groups import GroupReward
from nemo_ext.rl.task import Task

GENERATIONS, RESULTS = "generations.jsonl", "results.json"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Settings for generating responses and computing their rewards.

    Attributes:
        samples: number of responses per task.
        sampling: sampling parameters.
        max_tokens: maximum response length in tokens.
        environments: mapping from environment names to their settings.
        group: group reward function; if None, the environments' scores are the rewards.
        group_settings: settings of `group`.
    """

    samples: int
    sampling: Sampling
    max_tokens: int
    environments: Mapping[str, Mapping[str, Any]]
    group: GroupReward | None
    group_settings: Mapping[str, Any] = field(default_factory=dict)


def generate(
    config: Mapping[str, Any], tasks: Sequence[Task], generation: Generation, folder: Path
) -> list[dict[str, Any]]:
    """Generate responses and their rewards, or resume doing so, and return the lines of generations.jsonl.

    There is one line per task that has at least one scored response.

    Args:
        generation: settings of generation and rewards.

    Raises:
        ValueError: the model cannot be served, or none of its responses has a score.
    """
    path = folder / GENERATIONS
    if not path.is_file():
        _write(config, tasks, generation, folder)
    with path.open() as file:
        return [json.loads(line) for line in file]


def _write(config: Mapping[str, Any], tasks: Sequence[Task], generation: Generation, folder: Path) -> None:
    settings = job.read(evaluation_config(config, folder))
    benchmarks = list(_benchmarks(tasks, generation, folder / "tasks"))
    result = job.asked(evaluation_config(config, folder), settings, benchmarks)
    if result["missing"]:
        raise ValueError(
            f"the tasks cannot be verified ({next(iter(result['missing'].values()))}); correct them in the files of "
            "tasks.train and tasks.validation, or correct online.environments"
        )
    verifiers = {name: entry["verifier"] for name, entry in result["benchmarks"].items()}
    answers: defaultdict[tuple[str, str], list[tuple[Sample, float]]] = defaultdict(list)
    for sample, score in rollouts.scored(folder, verifiers):
        answers[sample.key.benchmark.partition("@")[0], sample.key.problem].append((sample, score))
    groups = [
        (task, sorted(answers[task.environment, task.id], key=lambda scored: scored[0].key.sample))
        for task in tasks
        if answers[task.environment, task.id]
    ]
    expected, scored = len(tasks) * generation.samples, sum(len(group) for _, group in groups)
    if not scored:
        raise ValueError(
            f"{folder}: none of {expected:,} responses has a score; see {folder / 'report.md'} for the reason, correct "
            "it, and rerun the command"
        )
    if scored < expected:
        notice(
            f"{expected - scored:,} of {expected:,} responses are missing or have no score; see {folder / 'report.md'}"
        )
    rewards = group_rewards(groups, generation.group, generation.group_settings, folder / JUDGED)
    with complete_file(folder / GENERATIONS) as file:
        for task, group in groups:
            line = _line(task, group, rewards[task.environment, task.id])
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n")


def evaluation_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of the `nemo-ext evaluate` job that generates the responses and writes them to `folder`.

    `config` is the composed config of `nemo-ext online`, whose `served` is the policy.
    """
    keys = ("served", "serving", "files_from", "trust_remote_code", "evaluate")
    return {**{key: config[key] for key in keys}, "endpoint": None, "key_variable": None, "run_dir": str(folder)}


def _benchmarks(tasks: Iterable[Task], generation: Generation, folder: Path) -> Iterator[Benchmark]:
    """Write one task file per environment and thinking mode to `folder`, and yield the benchmark that evaluates it."""
    kinds: defaultdict[tuple[str, bool | None], list[Task]] = defaultdict(list)
    for task in tasks:
        kinds[task.environment, task.thinking].append(task)
    for (environment, thinking), tasks_of_kind in kinds.items():
        mode = {None: PLAIN, True: "on", False: "off"}[thinking]
        name = environment if thinking is None else f"{environment}@{mode}"
        path = folder / f"{name}.jsonl"
        write_text(path, "".join(f"{json.dumps(task.record())}\n" for task in tasks_of_kind))
        body: dict[str, Any] = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
        yield Benchmark(
            name=name,
            tasks=(str(path.resolve()),),
            environment=environment,
            environment_settings=generation.environments.get(environment, {}),
            samples=generation.samples,
            sampling=generation.sampling,
            max_tokens=generation.max_tokens,
            modes={mode: Mode(body=body)},
        )


def _line(task: Task, group: Sequence[tuple[Sample, float]], rewards: Sequence[float]) -> dict[str, Any]:
    """Return the record of a task and its scored responses, with their rewards, for `nemo-ext preference_data`.

    Truncated responses are listed under `cut`, because a pair would train on them as if they were complete.
    """
    record = task.record()
    line: dict[str, Any] = {"id": f"{task.environment}/{task.id}", "messages": record["prompt"], "task": task.domain}
    if "tools" in record:
        line["tools"] = record["tools"]
    line |= {"generations": [], "cut": []}
    for (sample, _), reward in zip(group, rewards, strict=True):
        response = response_of(sample)
        message: dict[str, Any] = {"role": "assistant", "content": response.answer}
        if response.thinking is not None:
            message["reasoning_content"] = response.thinking
        if response.tool_calls:
            message["tool_calls"] = list(sample.tool_calls)
        entry = {"message": message, "score": float(reward), "tokens": sample.completion_tokens}
        line["generations" if response.finished else "cut"].append(entry)
    return line
