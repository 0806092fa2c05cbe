"""Pass rates measured again while a run trains, and a new order of its tasks made from them.

"Once training progress plateaus, we re-profile the tasks using the best RL checkpoint and construct a new curriculum"
(Nemotron 3 Nano, section 3.2.2). What a plateau is, how often, and that training goes on from its newest weights are
(choice). No engine is known here; the pipeline `reprofile` does the same in separate jobs.

    RUN_DIR/curricula/tasks.jsonl        the tasks that are answered
    RUN_DIR/curricula/N/begun.json       where the Nth curriculum begins, why, and whose answers it is made of
    RUN_DIR/curricula/N/rollouts.jsonl   the answers
    RUN_DIR/curricula/N/                 what `nemo-ext curriculum` writes of them
    RUN_DIR/curricula/N/result.json      written last

Whether a new curriculum is due follows from a checkpoint alone, so a run that is killed between the checkpoint and
the new order makes it when it is resumed.
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
    """Where a new curriculum begins.

    Attributes:
        step: number of steps that were trained before it.
        drawn: number of tasks that were drawn before it.
        why: reason, for the report.
        checkpoint: name of the checkpoint whose answers it is made of.
    """

    step: int
    drawn: int
    why: str
    checkpoint: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the answers were.

    Attributes:
        tasks: number of tasks.
        pass_rate: mean of their pass rates.
        solved: number of tasks by how many of their answers were right, from 0 to all; `solved[0]` were never.
        kept: why the order stays as it was; None if there is a new one.
    """

    tasks: int
    pass_rate: float
    solved: Sequence[int]
    kept: str | None = None


@dataclass
class Curricula:
    """The curricula of a run.

    Attributes:
        settings: settings.
        folder: where they are.
        first: folder of the curriculum that the run began with; None if it began without one.
        prompts: number of prompts per step.
        steps: number of steps of the run.
        tasks: tasks that are answered.
    """

    settings: Reprofile
    folder: Path
    first: Path | None
    prompts: int
    steps: int
    tasks: Sequence[Task] = field(default_factory=list)

    @classmethod
    def of(cls, train: Mapping[str, Any], run_dir: Path, *, prompts: int, steps: int) -> "Curricula | None":
        """The curricula of a run by its `tasks.train`; None if it measures no pass rates.

        Raises:
            ValueError: naming the setting.
        """
        read = checked(TrainTasks, train, "tasks.train")
        if read.reprofile is None:
            return None
        pyarrow_module()
        first = Path(read.curriculum).expanduser() if read.curriculum else None
        made = cls(read.reprofile, run_dir / CURRICULA, first, prompts, steps)
        try:
            curriculum_settings(made._config(1, (), step=0))
        except ValueError as error:
            raise ValueError(f"tasks.train.reprofile.curriculum: {error}") from None
        return made

    def read_tasks(self, planned: PlannedTasks) -> TaskFile:
        """Tasks to answer: of the prompts that the first curriculum was made of, else of the plan's files.

        Raises:
            ValueError: a file is not there any more, or two tasks have one id.
        """
        path = self.folder / TASKS
        if not self.changes():
            files = list(planned.files)
            if self.first is not None:
                given = _stats(self.first)["prompts"]
                try:
                    files = [TaskFile(file) for file in find_files(given, "prompts")]
                except ValueError as error:
                    made_of = f"{self.first} was made of {', '.join(given)}, which is answered again"
                    raise ValueError(f"tasks.train.reprofile: {made_of}: {error}") from error
            tasks = [task for file in files for task in file.tasks]
            (most, count), *_ = Counter(task.id for task in tasks).most_common(1)
            if count > 1:
                raise ValueError(f"tasks.train.reprofile: {count} tasks have the id {most!r}: give each its own")
            write_text(path, "".join(json.dumps(task.record(), ensure_ascii=False) + "\n" for task in tasks))
        return TaskFile(path)

    def changes(self) -> list[Change]:
        """Curricula that were begun, in order."""
        found: list[Change] = []
        while (path := self.of_number(len(found) + 1) / BEGUN).is_file():
            found.append(Change(**json.loads(path.read_bytes())))
        return found

    def result(self, number: int) -> Result | None:
        """Result of a curriculum, which counts from 1; None while it is not complete."""
        path = self.of_number(number) / RESULT
        return Result(**json.loads(path.read_bytes())) if path.is_file() else None

    def of_number(self, number: int) -> Path:
        """Folder of a curriculum, which counts from 1."""
        return self.folder / str(number)

    def forget_after(self, step: int) -> None:
        """Remove curricula that begin after a step, to which the run goes back for want of later checkpoints."""
        for number, change in enumerate(self.changes(), start=1):
            if change.step > step:
                notice(f"{self.of_number(number)}: begins at step {change.step}, training goes on from {step}: removed")
                shutil.rmtree(self.of_number(number))

    def due(self, step: int, validations: Iterable[tuple[int, float]]) -> str | None:
        """Why pass rates have to be measured after a step, or None if they have not.

        Args:
            step: number of steps that were trained.
            validations: step and reward of each validation so far.
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
        """Step at which the present order began."""
        changes = self.changes()
        return changes[-1].step if changes else 0

    def begin(self, change: Change) -> None:
        """Note that a curriculum begins."""
        write_text(self.of_number(len(self.changes()) + 1) / BEGUN, json.dumps(asdict(change)) + "\n")

    def make(self, number: int) -> None:
        """Make a curriculum of its answers, which are complete. Where there is none, the order stays as it is.

        Raises:
            ValueError: a file is at fault.
        """
        folder, changes = self.of_number(number), self.changes()
        config = self._config(number, changes, step=changes[number - 1].step)
        kept = None
        try:
            curriculum.run(config)
        except NoOrder as error:
            kept = str(error)
            notice(f"{folder}: no new order: {kept}; training goes on in the present one")
        made = _result(folder / ROLLOUTS, success=config["success"], samples=self.settings.samples, kept=kept)
        write_text(folder / RESULT, json.dumps(asdict(made)) + "\n")
        notice(f"pass rates: {shown(made)}")

    def follow(self, planned: PlannedTasks) -> None:
        """Put the orders of the complete curricula into a plan."""
        for number, change in enumerate(self.changes(), start=1):
            result = self.result(number)
            if result is not None and result.kept is None:
                planned.follow(change.drawn, TaskFile(self.of_number(number) / CURRICULUM, repeats=True))

    def _config(self, number: int, changes: Sequence[Change], *, step: int) -> dict[str, Any]:
        """Config of `nemo-ext curriculum`."""
        drawn = changes[number - 1].drawn if changes else 0
        before = [one for one in range(1, number) if (result := self.result(one)) and result.kept is None]
        previous, begun = (self.of_number(before[-1]), changes[before[-1] - 1].drawn) if before else (self.first, 0)
        had = int(json.loads((previous / STATS).read_bytes())["steps"]) if previous else 0
        inherited = _stats(self.first) if self.first else {}
        return {
            **compose("curriculum", ["prompts=?", "output=?", "exhausted=repeat"]),
            **{key: value for key, value in inherited.items() if key not in (*OF_A_RUN, "exhausted")},
            **self.settings.curriculum,
            "output": str(self.of_number(number)),
            "prompts": [str(self.folder / TASKS)],
            "rollouts": [str(self.of_number(number) / ROLLOUTS)],
            "previous": str(previous) if previous else None,
            "previous_steps": min(had, ceil((drawn - begun) / self.prompts)) if previous else None,
            "batch": self.prompts,
            "steps": self.steps - step,
        }


def shown(result: Result) -> str:
    """One line."""
    return (
        f"{result.pass_rate:.3f} on average over {result.tasks:,} tasks, {result.solved[-1]:,} always solved, "
        f"{result.solved[0]:,} never"
    )


def _result(rollouts: Path, *, success: float, samples: int, kept: str | None) -> Result:
    right: Counter[str] = Counter()
    with rollouts.open() as file:
        for line in map(json.loads, file):
            right[line["id"]] += line["reward"] >= success
    tasks = Counter(right.values())
    return Result(
        tasks=len(right),
        pass_rate=sum(right.values()) / (samples * len(right)),
        solved=[tasks[count] for count in range(samples + 1)],
        kept=kept,
    )


def _stats(curriculum: Path) -> dict[str, Any]:
    """Settings that a curriculum was made with."""
    found: dict[str, Any] = json.loads((curriculum / STATS).read_bytes())["settings"]
    return found
