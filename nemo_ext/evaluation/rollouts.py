"""The `nemo-ext rollouts` job: samples and verifies rollouts on RL tasks, for curricula (docs/data/curriculum.md)."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import JsonValue
from pydantic.dataclasses import dataclass

from nemo_ext.evaluation import job, report
from nemo_ext.evaluation.benchmark import Benchmark
from nemo_ext.evaluation.judged import JUDGED, group_rewards
from nemo_ext.evaluation.settings import Settings
from nemo_ext.evaluation.store import ASKED, STORE, Key, Sample, Store
from nemo_ext.generate.settings import Sampling
from nemo_ext.job.files import complete_file
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import REPLACED, STRICT, Count, Extra, Places, checked
from nemo_ext.rl.groups import check_judges, group_reward
from nemo_ext.rl.plan import TaskFile
from nemo_ext.rl.task import Task

ROLLOUTS = "rollouts.jsonl"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutSettings:
    """Settings in the `rollouts` section, described in hydra_conf/rollouts.yaml."""

    tasks: Places
    samples: Count = 8
    temperature: float = 1.0
    top_p: float = 1.0
    extra: Extra = field(default_factory=dict)
    max_tokens: Count = 4096
    environments: Annotated[Mapping[str, Mapping[str, JsonValue]], REPLACED] = field(default_factory=dict)
    group: Mapping[str, Any] | None = None

    def benchmarks(self) -> list[Benchmark]:
        """Return one benchmark per environment that the tasks use.

        Raises:
            ValueError: a task file cannot be read, or there are settings for an environment that no task has.
        """
        names = sorted({task.environment for path in self.tasks for task in TaskFile(path).tasks})
        if unknown := sorted(set(self.environments) - set(names)):
            raise ValueError(
                f"rollouts.environments: no task has the environment {unknown[0]!r}; the tasks have {', '.join(names)}"
            )
        sampled = {name: getattr(self, name) for name in ("temperature", "top_p", "extra")}
        sampling = checked(Sampling, sampled, where="rollouts")
        return [
            Benchmark(
                name=name,
                tasks=tuple(str(Path(path).expanduser().absolute()) for path in self.tasks),
                environment=name,
                environment_settings=self.environments.get(name, {}),
                samples=self.samples,
                sampling=sampling,
                max_tokens=self.max_tokens,
            )
            for name in names
        ]


def run(config: Mapping[str, Any]) -> None:
    """Run `nemo-ext rollouts`: sample and verify rollouts, and write rollouts.jsonl; the same command resumes.

    Raises:
        ValueError: a setting is invalid, or the store belongs to another model.
        OSError: a file cannot be written.
    """
    settings, benchmarks = _checked(config)
    run_dir = Path(settings.run_dir).expanduser()
    check_judges((), config["rollouts"].get("group") or {})
    results = job.asked(config, settings, benchmarks)
    verifiers = {name: entry["verifier"] for name, entry in results["benchmarks"].items()}
    count = 0
    with complete_file(run_dir / ROLLOUTS) as file:
        for line in _lines(run_dir, verifiers, checked(RolloutSettings, config["rollouts"], where="rollouts")):
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            count += 1
    print(report.summary(results))
    notice(f"{count:,} rollouts in {run_dir / ROLLOUTS}; `nemo-ext curriculum rollouts=...` orders tasks by them")


def check(config: Mapping[str, Any]) -> None:
    """Validate a config of `nemo-ext rollouts` before its first request; task files that do not exist yet are skipped.

    Raises:
        ValueError: a setting is invalid, or a task file cannot be read.
    """
    section = checked(RolloutSettings, config["rollouts"], where="rollouts")
    if all(Path(path).expanduser().exists() for path in section.tasks):
        _checked(config)


def _checked(config: Mapping[str, Any]) -> tuple[Settings, list[Benchmark]]:
    section = checked(RolloutSettings, config["rollouts"], where="rollouts")
    group_reward(section.group or {}, "rollouts.group")
    evaluation = {key: value for key, value in config.items() if key != "rollouts"}
    return job.read(evaluation), section.benchmarks()


def _lines(run_dir: Path, verifiers: Mapping[str, str], section: RolloutSettings) -> Iterator[dict[str, Any]]:
    """Yield the lines of rollouts.jsonl: rewarded answers in the format that `nemo-ext curriculum` reads."""
    rewards = _judged(run_dir, verifiers, section)
    for sample, score in scored(run_dir, verifiers):
        more = {"reasoning_content": sample.reasoning, "tool_calls": sample.tool_calls}
        response = {"content": sample.answer} | {key: value for key, value in more.items() if value}
        yield {
            "id": sample.key.problem,
            "environment": sample.key.benchmark,
            "sample": sample.key.sample,
            "reward": rewards.get(sample.key, score),
            "tokens": sample.completion_tokens,
            "truncated": sample.finish_reason == "length",
            # A conversation with tools has no single response.
            **({} if sample.turns else {"response": response}),
        }


def _judged(run_dir: Path, verifiers: Mapping[str, str], section: RolloutSettings) -> dict[Key, float]:
    """Return a mapping from answer to its reward from `rollouts.group`; empty if that is not set.

    Rewards are stored in judged.jsonl, so that groups are not judged twice.
    """
    settings = section.group or {}
    reward = group_reward(settings, "rollouts.group")
    if reward is None:
        return {}
    tasks = {(task.environment, task.id): task for path in section.tasks for task in TaskFile(path).tasks}
    answers: defaultdict[tuple[str, str], list[tuple[Sample, float]]] = defaultdict(list)
    for sample, score in scored(run_dir, verifiers):
        answers[sample.key.benchmark, sample.key.problem].append((sample, score))
    groups: list[tuple[Task, list[tuple[Sample, float]]]] = [
        (tasks[key], sorted(group, key=lambda answer: answer[0].key.sample)) for key, group in answers.items()
    ]
    rewards = group_rewards(groups, reward, settings, run_dir / JUDGED)
    return {
        sample.key: value
        for task, group in groups
        for (sample, _), value in zip(group, rewards[task.environment, task.id], strict=True)
    }


def scored(run_dir: Path, verifiers: Mapping[str, str]) -> Iterator[tuple[Sample, float]]:
    """Yield the answers from which a run's results are computed, each with its score.

    `verifiers` maps each benchmark to its verifier's digest, from results.json.
    """
    store = Store(run_dir / STORE)
    wanted = {name: set(hashes) for name, hashes in json.loads((run_dir / ASKED).read_text()).items()}
    scores = store.scores()
    for sample in store.answers():
        name = sample.key.benchmark
        score = scores.get((sample.key, sample.asked, verifiers.get(name, "")))
        if sample.problem or score is None or score.score is None or sample.asked not in wanted.get(name, ()):
            continue
        yield sample, score.score
