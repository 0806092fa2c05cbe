"""New curricula made during a run, from newly measured pass rates.

"Once training progress plateaus, we re-profile the tasks using the best RL checkpoint and construct a new curriculum"
(Nemotron 3 Nano, section 3.2.2). The definition of a plateau, the number of curricula, and that training continues from
its newest weights are (choice). The module is independent of the engine. The pipeline `reprofile` does the same in
separate jobs.

    RUN_DIR/curricula/tasks.jsonl        tasks whose pass rates are measured
    RUN_DIR/curricula/N/begun.json       start of the Nth curriculum: step, reason and checkpoint
    RUN_DIR/curricula/N/rollouts.jsonl   rollouts of that checkpoint
    RUN_DIR/curricula/N/                 output of `nemo-ext curriculum` on the rollouts
    RUN_DIR/curricula/N/result.json      written last

A checkpoint alone determines whether a new curriculum is due: if a run is killed between the checkpoint and the new
curriculum, the resumed run makes it.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from nemo_ext.data.curriculum import job as curriculum
from nemo_ext.data.curriculum.layout import CURRICULUM, STATS
from nemo_ext.data.curriculum.plan import NoOrder
from nemo_ext.data.curriculum.settings import settings as curriculum_settings
from nemo_ext.data.text.user_files import find_files, pyarrow_module
from nemo_ext.job.config import compose
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import checked
from nemo_ext.rl.plan import PlannedTasks, TaskFile
from nemo_ext.rl.settings import OF_A_RUN, Reprofile, TrainTasks
from nemo_ext.rl.task import Task

CURRICULA, TASKS, ROLLOUTS = "curricula", "tasks.jsonl", "rollouts.jsonl"
BEGUN, RESULT = "begun.json", "result.json"


@dataclass(frozen=True, kw_only=True)
class Change:
    """Start of a new curriculum.

    Attributes:
        step: number of training steps before it.
        drawn: number of tasks drawn before it.
        why: reason for making it, as shown in the report.
        checkpoint: name of the checkpoint that generated its rollouts.
    """

    step: int
    drawn: int
    why: str
    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measured pass rates, and whether they led to a new order.

    Attributes:
        solved: `solved[n]` is the number of tasks with n correct responses.
        kept: reason why the old order is kept; None if there is a new one.
    """

    tasks: int
    pass_rate: float
    solved: Sequence[int]
    kept: str | None = None


@dataclass
class Curricula:
    """The curricula that a run makes, stored in its run directory.

    Attributes:
        folder: folder that holds the curricula.
        first: folder of the curriculum that the run started with; None if there was none.
        prompts: number of prompts per step.
        tasks: tasks whose pass rates are measured.
    """

    settings: Reprofile
    folder: Path
    first: Path | None
    prompts: int
    steps: int
    tasks: Sequence[Task] = field(default_factory=list)

    @classmethod
    def from_config(cls, train: Mapping[str, Any], run_dir: Path, *, prompts: int, steps: int) -> "Curricula | None":
        """Create a run's curricula from `tasks.train`; return None if `reprofile` is not set.

        Raises:
            ValueError: a setting is invalid.
        """
        settings = checked(TrainTasks, train, "tasks.train")
        if settings.reprofile is None:
            return None
        pyarrow_module()
        first = Path(settings.curriculum).expanduser() if settings.curriculum else None
        curricula = cls(settings.reprofile, run_dir / CURRICULA, first, prompts, steps)
        try:
            curriculum_settings(curricula._config(1, (), step=0))
        except ValueError as error:
            raise ValueError(f"tasks.train.reprofile.curriculum is invalid ({error}); correct it") from None
        return curricula

    def read_tasks(self, planned: PlannedTasks) -> TaskFile:
        """Return the tasks to measure: the first curriculum's prompts, or the plan's files if there is no curriculum.

        Raises:
            ValueError: a file no longer exists, or two tasks have the same id.
        """
        path = self.folder / TASKS
        if not self.changes():
            files = list(planned.files)
            if self.first is not None:
                prompts = _stats(self.first)["prompts"]
                try:
                    files = [TaskFile(file) for file in find_files(prompts, "prompts")]
                except ValueError as error:
                    raise ValueError(
                        f"tasks.train.reprofile requires the prompts of the curriculum {self.first} "
                        f"({', '.join(prompts)}); restore them or remove reprofile ({error})"
                    ) from error
            tasks = [task for file in files for task in file.tasks]
            (most, count), *_ = Counter(task.id for task in tasks).most_common(1)
            if count > 1:
                raise ValueError(
                    f"tasks.train.reprofile requires unique ids, but {count} tasks have the id {most!r}; rename them"
                )
            write_text(path, "".join(json.dumps(task.record(), ensure_ascii=False) + "\n" for task in tasks))
        return TaskFile(path)

    def changes(self) -> list[Change]:
        """Return the starts of all curricula, in order."""
        changes: list[Change] = []
        while (path := self.of_number(len(changes) + 1) / BEGUN).is_file():
            changes.append(Change(**json.loads(path.read_bytes())))
        return changes

    def result(self, number: int) -> Result | None:
        """Return the result of curriculum `number`, counted from 1; None while it is incomplete."""
        path = self.of_number(number) / RESULT
        return Result(**json.loads(path.read_bytes())) if path.is_file() else None

    def of_number(self, number: int) -> Path:
        """Return the folder of curriculum `number`, counted from 1."""
        return self.folder / str(number)

    def forget_after(self, step: int) -> None:
        """Remove curricula that start after `step`, the step from which a run is resumed."""
        for number, change in enumerate(self.changes(), start=1):
            if change.step > step:
                notice(
                    f"{self.of_number(number)} was removed, because it starts at step {change.step}, but training "
                    f"resumes from step {step}"
                )
                shutil.rmtree(self.of_number(number))

    def due(self, step: int, validations: Iterable[tuple[int, float]]) -> str | None:
        """Return the reason to measure pass rates after a step; None if they are not due.

        Args:
            validations: (step, reward) of each validation so far.
        """
        since = self.since()
        if len(self.changes()) >= self.settings.times or not since < step < self.steps:
            return None
        if self.settings.every is not None and step - since >= self.settings.every:
            return f"{step - since} steps"
        last = self.settings.plateau
        rewards = [reward for at, reward in validations if since <= at <= step]
        if last is not None and len(rewards) > last and max(rewards[-last:]) <= max(rewards[:-last]):
            return f"{last} validations without a better reward than {max(rewards[:-last]):.3f}"
        return None

    def since(self) -> int:
        """Return the step at which the current order started."""
        changes = self.changes()
        return changes[-1].step if changes else 0

    def begin(self, change: Change) -> None:
        """Record the start of the next curriculum."""
        write_text(self.of_number(len(self.changes()) + 1) / BEGUN, json.dumps(asdict(change)) + "\n")

    def make(self, number: int) -> None:
        """Make curriculum `number` from its complete rollouts; if no order can be made, keep the old one."""
        folder, changes = self.of_number(number), self.changes()
        config = self._config(number, changes, step=changes[number - 1].step)
        kept = None
        try:
            curriculum.run(config)
        except NoOrder as error:
            kept = str(error)
            notice(f"{folder}: no new order could be made ({kept}); training continues in the old order")
        result = _result(folder / ROLLOUTS, success=config["success"], samples=self.settings.samples, kept=kept)
        write_text(folder / RESULT, json.dumps(asdict(result)) + "\n")
        notice(f"pass rates: {shown(result)}")

    def follow(self, planned: PlannedTasks) -> None:
        """Insert all complete curricula's orders into a plan."""
        for number, change in enumerate(self.changes(), start=1):
            result = self.result(number)
            if result is not None and result.kept is None:
                planned.follow(change.drawn, TaskFile(self.of_number(number) / CURRICULUM, repeats=True))

    def _config(self, number: int, changes: Sequence[Change], *, step: int) -> dict[str, Any]:
        """Return the config of `nemo-ext curriculum` that makes curriculum `number` for the steps after `step`."""
        drawn = changes[number - 1].drawn if changes else 0
        before = [earlier for earlier in range(1, number) if (result := self.result(earlier)) and result.kept is None]
        previous, begun = (self.of_number(before[-1]), changes[before[-1] - 1].drawn) if before else (self.first, 0)
        steps = int(json.loads((previous / STATS).read_bytes())["steps"]) if previous else 0
        inherited = _stats(self.first) if self.first else {}
        return {
            **compose("curriculum", ["prompts=?", "output=?", "exhausted=repeat"]),
            **{key: value for key, value in inherited.items() if key not in (*OF_A_RUN, "exhausted")},
            **self.settings.curriculum,
            "output": str(self.of_number(number)),
            "prompts": [str(self.folder / TASKS)],
            "rollouts": [str(self.of_number(number) / ROLLOUTS)],
            "previous": str(previous) if previous else None,
            "previous_steps": min(steps, ceil((drawn - begun) / self.prompts)) if previous else None,
            "batch": self.prompts,
            "steps": self.steps - step,
        }


def shown(result: Result) -> str:
    """Format a result as one line for the log."""
    return (
        f"{result.pass_rate:.3f} on average over {result.tasks:,} tasks, {result.solved[-1]:,} always solved, "
        f"{result.solved[0]:,} never"
    )


def _result(rollouts: Path, *, success: float, samples: int, kept: str | None) -> Result:
    successes: Counter[str] = Counter()
    with rollouts.open() as file:
        for line in map(json.loads, file):
            successes[line["id"]] += line["reward"] >= success
    tasks = Counter(successes.values())
    return Result(
        tasks=len(successes),
        pass_rate=sum(successes.values()) / (samples * len(successes)),
        solved=[tasks[count] for count in range(samples + 1)],
        kept=kept,
    )


def _stats(curriculum: Path) -> dict[str, Any]:
    """Return the settings that the curriculum in a folder was made with."""
    settings: dict[str, Any] = json.loads((curriculum / STATS).read_bytes())["settings"]
    return settings
