"""The task of each training step, decided before a run begins.

A plan has `steps x prompts` items. Item i is the task in place i % prompts of step i // prompts, a function of the
settings and i alone: engines read it in order, and a run that is resumed goes on with the next task. Three kinds:

path: tasks.jsonl              all tasks in an order drawn anew every epoch, or in the file's with `shuffle: false`
curriculum: DIRECTORY          the order that `nemo-ext curriculum` made
directory and blend            shares of task files, in the tree of pre-training blends (`data/blends/hierarchy.py`):
                               the stream `math` is `<directory>/math.jsonl`; shares, tiers, temperatures, caps and
                               epochs count tasks in place of tokens; every step has each stream's quota

With `reprofile` the order is made anew while the run trains (`nemo_ext.rl.reprofile`): the plan is followed by others.

With `adapt` the shares of a blend follow what its files still teach (`nemo_ext.rl.adaptive`). Which file a prompt is
from is then decided step by step, by `PlannedTasks.adaptive`; the order within each file stays the plan's.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.blends.division import divide
from nemo_ext.data.blends.hierarchy import Node, read_tree
from nemo_ext.data.blends.sizes import Size
from nemo_ext.data.curriculum.layout import CURRICULUM, STATS
from nemo_ext.data.curriculum.schedule import fixed, quotas
from nemo_ext.data.text.user_files import record_source
from nemo_ext.job.seeds import generator
from nemo_ext.job.settings import checked
from nemo_ext.rl.adaptive import AdaptiveShares
from nemo_ext.rl.settings import Adapt, TrainTasks
from nemo_ext.rl.task import Task

_SUFFIX = ".jsonl"
MOST_SHOWN = 20
"""Largest number of wrong tasks that an error lists."""


class TaskFile:
    """Tasks of a file, parsed once.

    Args:
        path: JSONL or Parquet file, one task record per line; blank lines are skipped.
        repeats: True if a task may occur again, as in a curriculum that begins a domain anew.

    Raises:
        ValueError: there is no such file or no task in it, or listing all lines that are no task or have an id again.

    Attributes:
        tasks: its tasks.
        places: the file and line of each, as "FILE:LINE".
    """

    def __init__(self, path: str | Path, *, repeats: bool = False) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file of tasks")
        self.tasks: list[Task] = []
        self.places: list[str] = []
        problems: list[str] = []
        seen: dict[str, str] = {}
        for where, row in record_source((str(self.path),), None, "tasks").placed(strict=True):
            try:
                if isinstance(row, str):
                    raise ValueError(f"{where}: {row}")
                task = Task.of(row, where)
            except ValueError as error:
                problems.append(str(error))
                continue
            if seen.setdefault(task.id, where) != where and not repeats:
                problems.append(f"{where}: the id {task.id!r} is there twice, first in {seen[task.id]}")
            self.tasks.append(task)
            self.places.append(where)
        _refuse(problems)
        if not self.tasks:
            raise ValueError(f"{self.path}: there are no tasks in it")

    def leave_out(self, unwanted: Callable[[Task], bool]) -> list[str]:
        """Drop the unwanted tasks; returns their ids.

        Raises:
            ValueError: none is left.
        """
        gone = {row for row, task in enumerate(self.tasks) if unwanted(task)}
        if len(gone) == len(self.tasks):
            raise ValueError(f"{self.path}: all of its {len(gone):,} tasks are left out")
        ids = [self.tasks[row].id for row in sorted(gone)]
        self.tasks = [task for row, task in enumerate(self.tasks) if row not in gone]
        self.places = [place for row, place in enumerate(self.places) if row not in gone]
        return ids


class PlannedTasks:
    """Tasks of a run in training order.

    Args:
        files: task files by the stream's name.
        shares: shares of the streams by name.
        steps: number of batches that may be drawn.
        prompts: number of prompts per step.
        seed: seed of all orders.
        shuffle: draw the order of a file anew for every pass over it; otherwise keep the file's order.
        adapt: settings of adaptive shares; None for the given ones.
    """

    def __init__(
        self,
        files: Mapping[str, TaskFile],
        shares: Mapping[str, Fraction],
        *,
        steps: int,
        prompts: int,
        seed: int,
        shuffle: bool = True,
        adapt: Adapt | None = None,
    ) -> None:
        self.names = tuple(files)
        self.files = tuple(files.values())
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._shares = {name: float(shares[name]) for name in self.names}
        self._adapt = adapt
        self._later: list[tuple[int, TaskFile]] = []
        self.quotas = quotas(fixed(self._shares, self.names), batch=prompts, steps=steps)
        self._before = np.concatenate([np.zeros((1, len(self.names)), dtype=np.int64), np.cumsum(self.quotas, axis=0)])

    def __len__(self) -> int:
        return len(self.quotas) * self._prompts

    def __getitem__(self, number: int) -> Task:
        if not 0 <= number < len(self):
            raise IndexError(number)
        for first, file in reversed(self._later):
            if number >= first:
                return file.tasks[(number - first) % len(file.tasks)]
        stream, row = self.place(number)
        return self.files[stream].tasks[row]

    def follow(self, first: int, file: TaskFile) -> None:
        """From an item on, the tasks are those of another file in its order, begun again at its end."""
        self._later.append((first, file))

    def place(self, number: int) -> tuple[int, int]:
        """Index of an item's stream, and of the task in its file; of the plan before `follow`."""
        step, slot = divmod(number, self._prompts)
        streams = self._slots(step)
        stream = int(streams[slot])
        return stream, self._row(stream, int(self._before[step, stream] + (streams[:slot] == stream).sum()))

    def adaptive(self) -> AdaptiveShares | None:
        """Shares that adapt, as they are before the first step; None if the settings have no `adapt`."""
        return None if self._adapt is None else AdaptiveShares(self._shares, self._adapt, seed=self._seed)

    def nth(self, stream: int, number: int) -> Task:
        """Task with a number in the order of a stream, which `AdaptiveShares.draw` gives; a file is begun again."""
        return self.files[stream].tasks[self._row(stream, number)]

    def leave_out(self, unwanted: Callable[[Task], bool]) -> list[str]:
        """Drop unwanted tasks of the files before training reads any; returns their ids."""
        return [one for file in self.files for one in file.leave_out(unwanted)]

    def environments(self) -> list[str]:
        """Names of the environments of all tasks, sorted."""
        return sorted({task.environment for file in self.files for task in file.tasks})

    def _row(self, stream: int, number: int) -> int:
        size = len(self.files[stream].tasks)
        epoch, at = divmod(number, size)
        return int(_order(self._seed, self.names[stream], epoch, size)[at]) if self._shuffle else at

    def _slots(self, step: int) -> npt.NDArray[np.int64]:
        """Stream index of each prompt of a step, `[prompts]`."""
        streams = np.repeat(np.arange(len(self.names)), self.quotas[step])
        # Streams are mixed within a step, since the batch may be sharded later.
        return generator(self._seed, "tasks", "step", str(step)).permutation(streams)


def plan_tasks(
    settings: Mapping[str, Any] | TrainTasks, *, steps: int, prompts: int, spare: int = 0, where: str = "tasks.train"
) -> PlannedTasks:
    """Tasks of a run, from the settings described in the module's docstring.

    Args:
        settings: a `TrainTasks`.
        steps: number of steps of the run.
        prompts: number of prompts per step.
        spare: batches that may be drawn beyond one per step; after its last step a curriculum begins again.

    Raises:
        ValueError: naming the key or the file and line.
    """
    read = settings if isinstance(settings, TrainTasks) else checked(TrainTasks, settings, where)
    given = [key for key in ("path", "curriculum", "directory") if getattr(read, key) is not None]
    if len(given) != 1:
        raise ValueError(f"{where}: give one of path, curriculum, or directory with a blend, not {given or 'none'}")
    if read.directory is not None:
        return _blended(read, steps=steps + spare, prompts=prompts, where=where)
    if read.curriculum is None:
        path, shuffle = Path(str(read.path)), read.shuffle
    else:
        path, shuffle = _curriculum(Path(read.curriculum), prompts=prompts, where=where), False
    file = TaskFile(path, repeats=read.curriculum is not None)
    if read.curriculum is not None and steps * prompts > len(file.tasks):
        has = len(file.tasks) // prompts
        raise ValueError(f"{where}.curriculum: it has {has} steps, the run {steps}: make them fit")
    name = path.stem
    return PlannedTasks(
        {name: file}, {name: Fraction(1)}, steps=steps + spare, prompts=prompts, seed=read.seed, shuffle=shuffle
    )


def validation_tasks(path: str | Path) -> PlannedTasks:
    """All tasks of a file once, in its order; raises as `TaskFile`."""
    file = TaskFile(path)
    return PlannedTasks(
        {"validation": file}, {"validation": Fraction(1)}, steps=len(file.tasks), prompts=1, seed=0, shuffle=False
    )


def check_references(planned: Iterable[PlannedTasks], check: Callable[[Task], object]) -> None:
    """Check every task's reference before a run of days begins.

    Args:
        planned: tasks to check.
        check: function that raises ValueError for a task that its environment cannot verify.

    Raises:
        ValueError: listing all such tasks with their file and line.
    """
    problems: dict[str, None] = {}
    for file in (file for tasks in planned for file in tasks.files):
        for task, place in zip(file.tasks, file.places, strict=True):
            try:
                check(task)
            except ValueError as error:
                problems[f"{place}: task {task.id}: {error}"] = None
    _refuse(list(problems))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = f"\nand {len(problems) - MOST_SHOWN:,} more" if len(problems) > MOST_SHOWN else ""
        raise ValueError("\n".join(problems[:MOST_SHOWN]) + more)


@functools.lru_cache(maxsize=256)
def _order(seed: int, name: str, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Order of a file's tasks in one pass over them."""
    return generator(seed, "tasks", name, epoch).permutation(size)


def _blended(settings: TrainTasks, *, steps: int, prompts: int, where: str) -> PlannedTasks:
    root = read_tree({"directory": settings.directory, "blend": settings.blend, "streams": settings.streams})
    adapt = settings.adapt
    for leaf in root.leaves():
        for key in ("source", "tokens"):
            if getattr(leaf, key) is not None:
                raise ValueError(f"{leaf.where}.{key}: a stream of tasks is the file <directory>/<name>{_SUFFIX}")
    files: dict[str, TaskFile] = {}
    problems: list[str] = []
    for leaf in root.leaves():
        try:
            files[leaf.name] = TaskFile(Path(f"{leaf.prefix}{_SUFFIX}"))
        except ValueError as error:
            problems.append(str(error))
    _refuse(problems)
    sizes = {name: Size(tokens=len(file.tasks), known="files") for name, file in files.items()}
    shares = divide(root, sizes, tokens=steps * prompts)
    if adapt is not None and any(node.cap_epochs is not None for node in _nodes(root)):
        raise ValueError(f"{where}.adapt: shares that adapt cannot keep a cap_epochs: leave one of them out")
    if adapt is not None and len([share for share in shares.values() if share]) < 2:
        raise ValueError(f"{where}.adapt: only {next(iter(shares))} has a share: give others to choose from")
    return PlannedTasks(files, shares, steps=steps, prompts=prompts, seed=settings.seed, adapt=adapt)


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _curriculum(directory: Path, *, prompts: int, where: str) -> Path:
    stats = directory / STATS
    if not stats.is_file():
        raise ValueError(f"{where}.curriculum: {stats} is not there: make it with `nemo-ext curriculum`")
    batch = json.loads(stats.read_bytes())["settings"]["batch"]
    if batch != prompts:
        raise ValueError(f"{where}.curriculum: its steps have {batch} prompts, the run's {prompts}: make them equal")
    return directory / CURRICULUM
