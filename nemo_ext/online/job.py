"""The job `nemo-ext online`: each round generates with the current policy, judges, makes pairs and trains on them.

    rounds/N/tasks.jsonl     prompts of round N
    rounds/N/answers/        answers of the policy before it, with rewards (`nemo_ext.online.answers`)
    rounds/N/pairs/          best and worst of each prompt, by `nemo-ext preference_data`
    rounds/N/train/          a run of `nemo-ext rl`; its model is the next round's policy
    validation/N/            answers of the policy after N rounds to tasks.validation
    model                    link to the model of the last round

What is there complete is not made again, so the same command goes on after a kill at any time.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
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
from nemo_ext.online.answers import Asked, answered
from nemo_ext.online.report import line_of, shown, summary, write_report
from nemo_ext.online.settings import Settings, algorithm_in_rounds, folder_of_round, of_a_round
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
_OF_EVALUATION = ("served", "serving", "files_from", "trust_remote_code", "evaluate")
_OF_TRAINING = ("trl", "micro_batch", "save_every", "memory_profile", "on_inexpressible", "seed", "trust_remote_code")
SAME = ("served", "rl", "tasks", "online", "trl", "seed")
"""Keys that must be unchanged when a run is resumed, but for the number of rounds."""


def run(config: Mapping[str, Any]) -> None:
    """Train in rounds to the last one; the same command goes on, and more rounds are the same run.

    Raises:
        ValueError: a wrong setting, tasks that cannot be verified, or a first round without enough pairs.
        OSError: a file cannot be written.
    """
    made = _Run(config)
    made.check_tasks()
    with only_run_in(made.run_dir):
        made.begin()
        policy = made.policy
        made.validate(policy, 0)
        for number in range(1, made.rounds + 1):
            after = made.round(policy, number)
            if after is None:
                break
            policy = after
            made.validate(policy, number)
        made.end(policy)


def check(config: Mapping[str, Any], *, tasks: bool = True) -> None:
    """Refuse what the job would refuse before its first request; without `tasks`, as for files that an earlier job
    has to write, tasks are not read.

    Raises:
        ValueError: see `run`.
    """
    run = _Run(config)
    if tasks:
        run.check_tasks()


class _Run:
    """A run whose settings are checked; its tasks are by `check_tasks`.

    Raises:
        ValueError: see `run`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        given = checked(Settings, config)
        if not given.served:
            raise ValueError("model=null: say which Hugging Face folder to train")
        self.config, self.given, self.settings = config, given, given.online
        self.algorithm = algorithm_in_rounds(config)
        assert self.algorithm.online is not None
        self.rounds, self.samples = self.algorithm.online.rounds, self.algorithm.online.generations_per_prompt
        self.run_dir, self.policy = Path(given.run_dir), Path(given.served).expanduser()
        evaluation.read({**{key: config[key] for key in _OF_EVALUATION}, "run_dir": str(self.run_dir)})
        self.training = of_a_round(self.algorithm)
        if given.trl and find_spec("trl") is not None:
            check_arguments(self.training, given.trl)
        rendered = render(self.training, micro_batch=gcd(self.training.batch, given.micro_batch))
        if given.on_inexpressible != "warn":
            rendered.settled()  # before hours of generation, not after
        self.asked = Asked(
            samples=self.samples,
            sampling=self.settings.sampling,
            max_tokens=self.settings.tokens(self.algorithm),
            environments=self.settings.environments,
            group=group_reward(self.settings.group or {}),
        )

    @cached_property
    def tasks(self) -> PlannedTasks:
        """Tasks of all rounds, a step of the plan a round."""
        train = self.config["tasks"].get("train") or {}
        given = checked(TrainTasks, {"seed": self.given.seed, **train}, "tasks.train")
        if given.curriculum:
            raise ValueError("tasks.train.curriculum: rounds take tasks by path, or by directory and blend")
        for key in ("adapt", "reprofile"):
            if getattr(given, key):
                raise ValueError(f"tasks.train.{key}: tasks of all rounds are decided before the first: leave it out")
        steps = self.training.schedule.steps
        prompts = self.settings.prompts or (steps * self.training.batch if steps else None)
        if prompts is None:
            whole = plan_tasks(given, steps=1, prompts=1)
            prompts = sum(len(file.tasks) for file in whole.files)
        return plan_tasks(given, steps=self.rounds, prompts=prompts)

    @cached_property
    def validation(self) -> PlannedTasks | None:
        """Tasks of validation, if there are any."""
        given = self.given.tasks.validation
        return validation_tasks(given["path"]) if given else None

    def of_round(self, number: int) -> list[Task]:
        """Tasks of a round, each once."""
        size = len(self.tasks) // self.rounds
        drawn = (self.tasks[place] for place in range((number - 1) * size, number * size))
        return list({(task.environment, task.id): task for task in drawn}.values())

    def begin(self) -> None:
        """Refuse another run's directory and write what the run is; checks that judges answer."""
        record = self.run_dir / OWN / _MADE_OF
        algorithm = {**self.config["rl"], "online": {**self.config["rl"]["online"], "rounds": None}}
        made_of = {**{key: self.config[key] for key in SAME}, "rl": algorithm}
        if not record.exists():
            note(record, made_of)
        elif changed := differing(json.loads(record.read_text()), made_of):
            raise ValueError(
                f"run_dir={self.run_dir}: began with other settings: {describe(changed)}; keep them, or name another"
            )
        check_judges(self._environments().values(), self.settings.group or {})
        write_config(self.run_dir, self.config)
        write_versions(self.run_dir, sys.argv)

    def round(self, policy: Path, number: int) -> Path | None:
        """Make a round, or what is left of it; returns the folder of the policy after it.

        None where the answers of a policy that earlier rounds have trained make fewer pairs than a batch.

        Raises:
            ValueError: the first round's do.
        """
        folder = folder_of_round(self.run_dir, number)
        model = folder / "train" / MODEL
        if not model.is_dir() and not self._made(folder, policy, number):
            return None
        self._note(number - 1, line_of(read_metrics(folder / "train" / METRICS)))
        shutil.rmtree(folder / "train" / CHECKPOINTS, ignore_errors=True)
        return model

    def validate(self, policy: Path, number: int) -> None:
        """Answers of the policy after so many rounds to the tasks of validation."""
        if self.validation is None:
            return
        tasks = [self.validation[place] for place in range(len(self.validation))]
        folder = self.run_dir / "validation" / str(number)
        found = answered({**self.config, "served": str(policy)}, tasks, self.asked, folder)
        values = summary(found, seed=self.config["seed"])
        notice(f"validation after {number}/{self.rounds} rounds: {shown(values)}")
        self._note(number, {f"validation/{key}": value for key, value in values.items()})

    def end(self, policy: Path) -> None:
        """Link the model and write the report."""
        link = self.run_dir / MODEL
        link.unlink(missing_ok=True)
        link.symlink_to(policy.relative_to(self.run_dir))
        notice(f"report: {write_report(self.run_dir, self.algorithm)}; model: {link}")

    def _made(self, folder: Path, policy: Path, number: int) -> bool:
        """Answers, pairs and training of a round; whether there were enough pairs."""
        tasks = self.of_round(number)
        notice(f"round {number}/{self.rounds}: {len(tasks):,} prompts x {self.samples} answers of {policy}")
        found = answered({**self.config, "served": str(policy)}, tasks, self.asked, folder / "answers")
        answers = summary(found, seed=self.config["seed"])
        if number == 1 and answers["cut"] == 1:
            raise ValueError(
                f"{folder}: all answers were cut off at online.max_tokens={self.asked.max_tokens}, which "
                "leaves no pairs: start again with more tokens"
            )
        pairs = self._pairs(folder, policy)
        values = {**answers, "pairs": pairs}
        notice(f"round {number}/{self.rounds}: {shown(values)}, {pairs:,} pairs")
        self._note(number - 1, values)
        if pairs < self.training.batch:
            why = f"{pairs:,} pairs, fewer than rl.batch={self.training.batch:,}: {folder / 'pairs' / REPORT} says why"
            if number == 1:
                raise ValueError(f"{folder}: {why}; begin anew with more prompts or answers, or a smaller batch")
            notice(f"round {number}/{self.rounds}: {why}; the rounds end here")
            return False
        self._train(folder, policy)
        return True

    def _pairs(self, folder: Path, policy: Path) -> int:
        """Pairs of a round's answers; returns their number."""
        path = folder / "pairs" / PAIRS
        most, batch = self.algorithm.lengths.prompt, self.training.batch
        if not (folder / "pairs" / "report.json").is_file():
            source = {"kind": "judged", "path": str(folder / "answers" / "generations.jsonl")}
            given = compose("preference_data", [f"output={json.dumps(str(folder / 'pairs'))}"])
            given |= {"sources": {f"round_{folder.name}": {**source, "min_margin": self.settings.min_margin}}}
            given |= {"outputs": ["trl"], "validation_share": 0.0, "max_bad_share": 1.0, "seed": self.config["seed"]}
            if most is not None:
                given["tokenizer"] = {"kind": "huggingface", "path": str(policy)}
                given["filters"] = {**given["filters"], "max_prompt_tokens": most}
            preference_data.run(given)
        count = sum(1 for _ in path.open("rb")) if path.is_file() else 0
        steps = self.training.schedule.steps
        if steps is not None and count >= batch:
            notice(f"{steps:,} steps of {batch:,}: {steps * batch / count:.2g} passes over {count:,} pairs")
        return count

    def _train(self, folder: Path, policy: Path) -> None:
        given = {key: self.config[key] for key in _OF_TRAINING}
        algorithm = {**self.config["rl"], "online": None, "rounds": 1}
        own = {"preset": self.config["preset"], "policy": str(policy), "run_dir": str(folder / "train")}
        pairs = {"train": str(folder / "pairs" / PAIRS), "validation": None}
        if rl.run({**compose("rl"), **given, **own, "rl": algorithm, "engine": "trl", "pairs": pairs}):
            raise KeyboardInterrupt

    def _note(self, rounds: int, values: Mapping[str, float]) -> None:
        """Put values of the policy after so many rounds into metrics.jsonl, a line a policy."""
        path = self.run_dir / METRICS
        lines = {line["rounds"]: line for line in read_metrics(path)} if path.is_file() else {}
        lines[rounds] = {"rounds": rounds, **lines.get(rounds, {}), **values}
        write_text(path, "".join(f"{json.dumps(lines[number])}\n" for number in sorted(lines)))

    def _environments(self) -> dict[str, Environment]:
        judge = self.config["evaluate"].get("judge")
        found = {}
        for name in sorted({name for plan in self._plans() for name in plan.environments()}):
            settings = dict(self.settings.environments.get(name, {}))
            if judge is not None and "judge" in settings_of(name):
                settings["judge"] = judge
            found[name] = make(name, settings)
        return found

    def _plans(self) -> Sequence[PlannedTasks]:
        return [plan for plan in (self.tasks, self.validation) if plan is not None]

    def check_tasks(self) -> None:
        """Refuse tasks that cannot be verified, and settings of environments that none has; raises ValueError."""
        environments = self._environments()
        for name in self.settings.environments:
            if name not in environments:
                raise ValueError(
                    f"online.environments: no task has the environment {name!r}, only {', '.join(environments)}"
                )
        for name, environment in environments.items():
            if environment.begin is not None:
                raise ValueError(f"tasks: environment {name!r} has several turns, and pairs are of single answers")
        check_references(self._plans(), lambda task: environments[task.environment].check(task.reference))
