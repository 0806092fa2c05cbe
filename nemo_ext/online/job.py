"""The `nemo-ext online` job: each round generates with the current policy, judges, makes pairs and trains on them.

    rounds/N/answers/        the round's responses with their rewards (`nemo_ext.online.answers`)
    rounds/N/pairs/          best and worst response to each prompt, from `nemo-ext preference_data`
    rounds/N/train/          run directory of `nemo-ext rl`; its model is the next round's policy
    validation/N/            responses to tasks.validation from the policy after N rounds
    model                    link to the last round's model

Complete outputs are reused, so the same command resumes a run killed at any point.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

from nemo_ext.data.preference import job as preference_data
from nemo_ext.evaluation import job as evaluation
from nemo_ext.job.config import compose
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.made_of import describe, differing, note
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import CHECKPOINTS, METRICS, OWN, REPORT, read_metrics, write_config, write_versions
from nemo_ext.job.settings import checked
from nemo_ext.online.answers import Generation, evaluation_config, generate
from nemo_ext.online.report import line_of, shown, summary, write_report
from nemo_ext.online.settings import Settings, algorithm_in_rounds
from nemo_ext.rl import job as rl
from nemo_ext.rl.environments import Environment, make, settings_of
from nemo_ext.rl.groups import check_judges, group_reward
from nemo_ext.rl.plan import PlannedTasks, check_references, plan_tasks, validation_tasks
from nemo_ext.rl.settings import TrainTasks
from nemo_ext.rl.task import Task
from nemo_ext.rl.trl.render import check_arguments, render

MODEL = "model"
PAIRS = "trl_train.jsonl"
_MADE_OF = "made_of.json"

_OF_TRAINING = ("trl", "micro_batch", "save_every", "memory_profile", "on_inexpressible", "seed", "trust_remote_code")
SAME = ("served", "rl", "tasks", "online", "trl", "seed")
"""Config keys that must not change when a run is resumed; only the number of rounds may."""


def run(config: Mapping[str, Any]) -> None:
    """Train all rounds, or resume the run; a finished run can be extended with more rounds.

    Raises:
        ValueError: a setting is invalid, tasks cannot be verified, or the first round yields too few pairs.
        OSError: a file cannot be written.
    """
    training = _Run(config)
    training.check_tasks()
    with only_run_in(training.run_dir):
        training.begin()
        policy = training.policy
        training.validate(policy, 0)
        for number in range(1, training.rounds + 1):
            after = training.round(policy, number)
            if after is None:
                break
            policy = after
            training.validate(policy, number)
        training.end(policy)


def check(config: Mapping[str, Any], *, tasks: bool = True) -> None:
    """Perform the checks that the job makes before its first request.

    Args:
        tasks: whether to read and check the tasks; False if an earlier job has yet to write them.

    Raises:
        ValueError: see `run`.
    """
    run = _Run(config)
    if tasks:
        run.check_tasks()


class _Run:
    """A run with validated settings, created from a composed config. The constructor raises the same errors as `run`.

    The tasks are checked separately, by `check_tasks`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        settings = checked(Settings, config)
        if not settings.served:
            raise ValueError("model=null: set it to the Hugging Face folder of the model to train")
        self.config, self.all_settings, self.settings = config, settings, settings.online
        self.algorithm = algorithm_in_rounds(config)
        assert self.algorithm.online is not None
        self.rounds, self.samples = self.algorithm.online.rounds, self.algorithm.online.generations_per_prompt
        self.run_dir, self.policy = Path(settings.run_dir), Path(settings.served).expanduser()
        if settings.serving.get("draft") is not None:
            raise ValueError(
                f"serving.draft={settings.serving['draft']}: models of later rounds have no multi-token prediction, as "
                "TRL does not train it; set serving.draft=null"
            )
        evaluation.read(evaluation_config(config, self.run_dir))
        self.training = replace(self.algorithm, online=None)
        if settings.trl and find_spec("trl") is not None:
            check_arguments(self.training, settings.trl)
        rendered = render(self.training, micro_batch=gcd(self.training.batch, settings.micro_batch))
        if settings.on_inexpressible != "warn":
            rendered.settled()  # before hours of generation, not after
        self.generation = Generation(
            samples=self.samples,
            sampling=self.settings.sampling,
            max_tokens=self.settings.tokens(self.algorithm),
            environments=self.settings.environments,
            group=group_reward(self.settings.group or {}, "online.group"),
            group_settings=self.settings.group or {},
        )

    @cached_property
    def tasks(self) -> PlannedTasks:
        """Training tasks, planned for all rounds before the first one; a round is one step of the plan."""
        train = self.config["tasks"].get("train") or {}
        settings = checked(TrainTasks, {"seed": self.all_settings.seed, **train}, "tasks.train")
        if settings.curriculum:
            raise ValueError(
                "`nemo-ext online` does not support tasks.train.curriculum; set tasks.train.path instead, or "
                "tasks.train.directory and tasks.train.blend"
            )
        for key in ("adapt", "reprofile"):
            if getattr(settings, key):
                raise ValueError(
                    f"tasks.train.{key} is not supported, because all rounds' tasks are chosen before round 1; "
                    "remove it"
                )
        steps = self.training.schedule.steps
        prompts = self.settings.prompts or (steps * self.training.batch if steps else None)
        if prompts is None:
            whole = plan_tasks(settings, steps=1, prompts=1)
            prompts = sum(len(file.tasks) for file in whole.files)
        return plan_tasks(settings, steps=self.rounds, prompts=prompts)

    @cached_property
    def validation(self) -> PlannedTasks | None:
        """Validation tasks; None if there are none."""
        validation = self.all_settings.tasks.validation
        return validation_tasks(validation["path"]) if validation else None

    def of_round(self, number: int) -> list[Task]:
        """Return a round's tasks without duplicates; rounds are numbered from 1."""
        size = len(self.tasks) // self.rounds
        drawn = (self.tasks[place] for place in range((number - 1) * size, number * size))
        return list({(task.environment, task.id): task for task in drawn}.values())

    def begin(self) -> None:
        """Reject a run directory with different settings, check that judges are reachable, and write the config."""
        record = self.run_dir / OWN / _MADE_OF
        algorithm = {**self.config["rl"], "online": {**self.config["rl"]["online"], "rounds": None}}
        made_of = {**{key: self.config[key] for key in SAME}, "rl": algorithm}
        if not record.exists():
            note(record, made_of)
        elif changed := differing(json.loads(record.read_text()), made_of):
            raise ValueError(
                f"run_dir={self.run_dir} was started with different settings ({describe(changed)}); restore them, or "
                "set another run_dir"
            )
        check_judges(self._environments().values(), self.settings.group or {})
        write_config(self.run_dir, self.config)
        write_versions(self.run_dir, sys.argv)

    def round(self, policy: Path, number: int) -> Path | None:
        """Run or resume a round, and return the trained policy's path; None if there are too few pairs for a batch."""
        folder = self.run_dir / "rounds" / str(number)
        model = folder / "train" / MODEL
        if not model.is_dir() and not self._make(folder, policy, number):
            return None
        self._note(number - 1, line_of(read_metrics(folder / "train" / METRICS)))
        shutil.rmtree(folder / "train" / CHECKPOINTS, ignore_errors=True)
        return model

    def validate(self, policy: Path, number: int) -> None:
        """Evaluate the policy after `number` rounds on the validation tasks, if there are any."""
        if self.validation is None:
            return
        tasks = [self.validation[place] for place in range(len(self.validation))]
        folder = self.run_dir / "validation" / str(number)
        generations = generate({**self.config, "served": str(policy)}, tasks, self.generation, folder)
        values = summary(generations, seed=self.config["seed"])
        notice(f"validation after {number}/{self.rounds} rounds: {shown(values)}")
        self._note(number, {f"validation/{key}": value for key, value in values.items()})

    def end(self, policy: Path) -> None:
        """Link `model` to the final policy and write the report."""
        link = self.run_dir / MODEL
        link.unlink(missing_ok=True)
        link.symlink_to(policy.relative_to(self.run_dir))
        notice(f"report: {write_report(self.run_dir, self.algorithm)}; model: {link}")

    def _make(self, folder: Path, policy: Path, number: int) -> bool:
        """Generate and judge responses, make pairs, and train on them; return False if the pairs do not fill a batch.

        In round 1, too few pairs, or only truncated responses, raise ValueError.
        """
        tasks = self.of_round(number)
        notice(f"round {number}/{self.rounds}: {len(tasks):,} prompts x {self.samples} responses of {policy}")
        generations = generate({**self.config, "served": str(policy)}, tasks, self.generation, folder / "answers")
        responses = summary(generations, seed=self.config["seed"])
        if number == 1 and responses["cut"] == 1:
            raise ValueError(
                f"{folder}: no pairs can be made, because all responses were cut off at "
                f"online.max_tokens={self.generation.max_tokens}; raise it, and set another run_dir to start over"
            )
        pairs = self._pairs(folder, policy)
        values = {**responses, "pairs": pairs}
        notice(f"round {number}/{self.rounds}: {shown(values)}, {pairs:,} pairs")
        self._note(number - 1, values)
        if pairs < self.training.batch:
            report = folder / "pairs" / REPORT
            few = f"{pairs:,} pairs are fewer than rl.batch={self.training.batch}"
            if number == 1:
                raise ValueError(
                    f"{folder}: {few} (see {report}); set another run_dir to start over, with a larger online.prompts "
                    "or rl.online.generations_per_prompt, or a smaller rl.batch"
                )
            notice(f"round {number}/{self.rounds}: {few} (see {report}), so the run ends with the previous policy")
            return False
        self._train(folder, policy)
        return True

    def _pairs(self, folder: Path, policy: Path) -> int:
        """Make a round's preference pairs, unless already made, and return their number."""
        path = folder / "pairs" / PAIRS
        max_prompt, batch = self.algorithm.lengths.prompt, self.training.batch
        if not (folder / "pairs" / "report.json").is_file():
            source = {"kind": "judged", "path": str(folder / "answers" / "generations.jsonl")}
            config = compose("preference_data", [f"output={json.dumps(str(folder / 'pairs'))}"])
            config |= {"sources": {f"round_{folder.name}": {**source, "min_margin": self.settings.min_margin}}}
            config |= {"outputs": ["trl"], "validation_share": 0.0, "max_bad_share": 1.0, "seed": self.config["seed"]}
            if max_prompt is not None:
                config["tokenizer"] = {"kind": "huggingface", "path": str(policy)}
                config["filters"] = {**config["filters"], "max_prompt_tokens": max_prompt}
            preference_data.run(config)
        count = sum(1 for _ in path.open("rb")) if path.is_file() else 0
        steps = self.training.schedule.steps
        if steps is not None and count >= batch:
            notice(f"{steps:,} steps of {batch:,} pairs: {steps * batch / count:.2g} epochs over {count:,} pairs")
        return count

    def _train(self, folder: Path, policy: Path) -> None:
        shared = {key: self.config[key] for key in _OF_TRAINING}
        algorithm = {**self.config["rl"], "online": None}
        round_keys = {"preset": self.config["preset"], "policy": str(policy), "run_dir": str(folder / "train")}
        pairs = {"train": str(folder / "pairs" / PAIRS), "validation": None}
        if rl.run({**compose("rl"), **shared, **round_keys, "rl": algorithm, "engine": "trl", "pairs": pairs}):
            raise KeyboardInterrupt

    def _note(self, rounds: int, values: Mapping[str, float]) -> None:
        """Add values, keyed by name, to the line of metrics.jsonl for the policy after `rounds` rounds."""
        path = self.run_dir / METRICS
        lines = {line["rounds"]: line for line in read_metrics(path)} if path.is_file() else {}
        lines[rounds] = {"rounds": rounds, **lines.get(rounds, {}), **values}
        write_text(path, "".join(f"{json.dumps(lines[number])}\n" for number in sorted(lines)))

    def _environments(self) -> dict[str, Environment]:
        judge = self.config["evaluate"].get("judge")
        environments = {}
        for name in sorted({name for plan in self._plans() for name in plan.environments()}):
            settings = dict(self.settings.environments.get(name, {}))
            if judge is not None and "judge" in settings_of(name):
                settings["judge"] = judge
            environments[name] = make(name, settings)
        return environments

    def _plans(self) -> Sequence[PlannedTasks]:
        return [plan for plan in (self.tasks, self.validation) if plan is not None]

    def check_tasks(self) -> None:
        """Raise ValueError for tasks that cannot be verified and for settings of unused environments."""
        environments = self._environments()
        for name in self.settings.environments:
            if name not in environments:
                used = ", ".join(environments)
                raise ValueError(
                    f"online.environments.{name} is set, but no task has this environment, only {used}; remove or "
                    "rename it"
                )
        for name, environment in environments.items():
            if environment.begin is not None:
                raise ValueError(
                    f"environment {name!r} has several turns, but pairs require single responses; remove its tasks "
                    "from the files of tasks.train and tasks.validation"
                )
        check_references(self._plans(), lambda task: environments[task.environment].check(task.reference))
