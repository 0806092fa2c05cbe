"""Plan of the tasks for all training steps, made before a run starts.

A plan has `steps x prompts` items. Item i is the task in slot i % prompts of step i // prompts and depends only on i
and the settings. Engines read items in order, and a resumed run continues with the next one. Sources of tasks:

path: tasks.jsonl              all tasks, reshuffled every epoch, or in file order with `shuffle: false`
curriculum: DIRECTORY          the order made by `nemo-ext curriculum`
directory and blend            shares of task files, given as a tree like pre-training blends
                               (`data/blends/hierarchy.py`): the stream `math` is `<directory>/math.jsonl`; shares,
                               tiers, temperatures, caps and epochs count tasks instead of tokens; every step contains
                               each stream's quota

`reprofile` makes new orders during training (`nemo_ext.rl.reprofile`), which then replace the rest of the plan.

`adapt` changes a blend's shares during training (`nemo_ext.rl.adaptive`): `PlannedTasks.adaptive` then chooses each
prompt's file step by step, and the plan only determines the order within each file.

With a `thinking_share`, the plan sets the thinking mode of tasks that have none.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nemo_ext.data.blends.division import divide
from nemo_ext.data.blends.hierarchy import Group, Node, read_tree
from nemo_ext.data.blends.sizes import Size
from nemo_ext.data.curriculum.layout import CURRICULUM, STATS
from nemo_ext.data.curriculum.schedule import fixed, quotas
from nemo_ext.data.text.user_files import record_source
from nemo_ext.job.seeds import generator
from nemo_ext.job.settings import checked
from nemo_ext.rl.adaptive import AdaptiveShares
from nemo_ext.rl.settings import Adapt, TrainTasks
from nemo_ext.rl.task import Task

WHERE = "tasks.train"
"""Key of the settings of training tasks, for error messages."""
_SUFFIX = ".jsonl"
_OF_DATA = re.compile(r"\bdata\.(?=(?:directory|blend|streams)\b)")
SHARE_TOLERANCE = 0.02
"""Maximum difference from `thinking_share` of a file whose tasks set their own modes (choice)."""
MOST_SHOWN = 20
"""Maximum number of invalid tasks listed in an error message."""


class TaskFile:
    """A task file, parsed once.

    Args:
        path: JSONL or Parquet file with one task record per line; blank lines are skipped.
        repeats: True if ids may repeat, as in a curriculum that uses a domain more than once.

    Raises:
        ValueError: the file is missing or empty, or has invalid lines or duplicate ids, which the message lists.

    Attributes:
        places: location of each task, as "FILE:LINE".
    """

    def __init__(self, path: str | Path, *, repeats: bool = False) -> None:
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such task file; correct the path, or write it with `nemo-ext rl_tasks`")
        self.tasks: list[Task] = []
        self.places: list[str] = []
        problems: list[str] = []
        seen: dict[str, str] = {}
        for where, row in record_source((str(self.path),), None, "tasks").placed(strict=True):
            try:
                if isinstance(row, str):
                    raise ValueError(f"{where}: the record cannot be read ({row}); correct or remove it")
                task = Task.from_record(row, where)
            except ValueError as error:
                problems.append(str(error))
                continue
            if seen.setdefault(task.id, where) != where and not repeats:
                problems.append(f"{where}: duplicate id {task.id!r}, first used in {seen[task.id]}; rename one")
            self.tasks.append(task)
            self.places.append(where)
        _refuse(problems)
        if not self.tasks:
            raise ValueError(f"{self.path}: the file contains no tasks; write them with `nemo-ext rl_tasks`")

    def exclude(self, unwanted: Callable[[Task], bool], because: str) -> list[str]:
        """Remove the tasks for which `unwanted` is true and return their ids.

        Raises:
            ValueError: no task remains; the message ends in the reason `because`.
        """
        excluded = {row for row, task in enumerate(self.tasks) if unwanted(task)}
        if len(excluded) == len(self.tasks):
            raise ValueError(f"{self.path}: all of its {len(excluded):,} tasks are excluded, because {because}")
        ids = [self.tasks[row].id for row in sorted(excluded)]
        self.tasks = [task for row, task in enumerate(self.tasks) if row not in excluded]
        self.places = [place for row, place in enumerate(self.places) if row not in excluded]
        return ids


class PlannedTasks:
    """A run's tasks in training order.

    Args:
        files: mapping from stream names to task files.
        shares: mapping from stream names to their shares.
        steps: maximum number of batches that can be drawn.
        shuffle: whether tasks are reshuffled for every epoch over a file; otherwise file order is kept.
        adapt: settings of adaptive shares; None if the shares are constant.
        thinking_share: share of each file's draws in thinking mode, for tasks without a mode; None to set no modes.
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
        thinking_share: float | None = None,
    ) -> None:
        self.names = tuple(files)
        self.files = tuple(files.values())
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._shares = {name: float(shares[name]) for name in self.names}
        self._adapt = adapt
        self._thinking_share = None if thinking_share is None else Fraction(str(thinking_share))
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
                return self._in_mode(
                    file.tasks[(number - first) % len(file.tasks)], *divmod(number - first, len(file.tasks))
                )
        return self.nth(*self._drawn(number))

    def follow(self, first: int, file: TaskFile) -> None:
        """Replace all items from index `first` with a file's tasks in file order, repeated as needed."""
        self._later.append((first, file))

    def _drawn(self, number: int) -> tuple[int, int]:
        """Return an item's stream index and the number of earlier items of that stream."""
        step, slot = divmod(number, self._prompts)
        streams = self._slots(step)
        stream = int(streams[slot])
        return stream, int(self._before[step, stream] + (streams[:slot] == stream).sum())

    def _in_mode(self, task: Task, epoch: int, place: int) -> Task:
        """Return a task with the thinking mode for its place in the epoch, or unchanged if it already has a mode.

        The modes of the places shift by one per epoch, so that repeated tasks are seen in both modes.
        """
        if self._thinking_share is None or task.thinking is not None:
            return task
        off, number = 1 - self._thinking_share, epoch + place
        return replace(task, thinking=int((number + 1) * off) == int(number * off))

    def adaptive(self) -> AdaptiveShares | None:
        """Return adaptive shares in their initial state; None if the settings have no `adapt`."""
        return None if self._adapt is None else AdaptiveShares(self._shares, self._adapt, seed=self._seed)

    def nth(self, stream: int, number: int) -> Task:
        """Return the task at a position of a stream's order, as drawn by adaptive shares.

        Args:
            number: 0-based position; beyond the last task, the file is repeated in the order of its next epoch.
        """
        tasks = self.files[stream].tasks
        return self._in_mode(tasks[self._row(stream, number)], *divmod(number, len(tasks)))

    def exclude(self, unwanted: Callable[[Task], bool], because: str) -> list[str]:
        """Remove the tasks for which `unwanted` is true from all files and return their ids.

        Call this before training reads any task. If a file has no task left, the ValueError gives the reason `because`.
        """
        return [task_id for file in self.files for task_id in file.exclude(unwanted, because)]

    def environments(self) -> list[str]:
        """Return the sorted names of the tasks' environments."""
        return sorted({task.environment for file in self.files for task in file.tasks})

    def _row(self, stream: int, number: int) -> int:
        size = len(self.files[stream].tasks)
        epoch, at = divmod(number, size)
        return int(_order(self._seed, self.names[stream], epoch, size)[at]) if self._shuffle else at

    def _slots(self, step: int) -> npt.NDArray[np.int64]:
        """Return the stream index of each prompt in a step, `[prompts]`."""
        streams = np.repeat(np.arange(len(self.names)), self.quotas[step])
        # Streams are shuffled within a step because the batch may be sharded later.
        return generator(self._seed, "tasks", "step", str(step)).permutation(streams)


def plan_tasks(
    settings: Mapping[str, Any] | TrainTasks,
    *,
    steps: int,
    prompts: int,
    spare: int = 0,
    thinking_share: float | None = None,
) -> PlannedTasks:
    """Plan a run's training tasks from the settings that the module's docstring describes.

    Args:
        settings: a `TrainTasks`, or a mapping with its keys.
        spare: number of additional batches that can be drawn; a curriculum repeats after its last step.
        thinking_share: share of each file's prompts in thinking mode; None for the modes that the tasks set.

    Raises:
        ValueError: a setting or a task is invalid; the message names the key, or the file and line.
    """
    train = settings if isinstance(settings, TrainTasks) else checked(TrainTasks, settings, WHERE)
    given = [key for key in ("path", "curriculum", "directory") if getattr(train, key) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{WHERE}: set exactly one of path, curriculum and directory (with a blend), not "
            f"{' and '.join(given) or 'none'}"
        )
    if train.directory is not None:
        return _blended(train, steps=steps + spare, prompts=prompts, thinking_share=thinking_share)
    if train.curriculum is None:
        path, shuffle = Path(str(train.path)), train.shuffle
    else:
        path, shuffle = _curriculum(Path(train.curriculum), prompts=prompts), False
    file = TaskFile(path, repeats=train.curriculum is not None)
    if train.curriculum is not None and steps * prompts > len(file.tasks):
        has = len(file.tasks) // prompts
        raise ValueError(
            f"{WHERE}.curriculum has {has} steps, fewer than the run's {steps}; make a longer one with `nemo-ext "
            "curriculum`, or lower rl.schedule.steps"
        )
    check_thinking_share([file], thinking_share)
    name = path.stem
    return PlannedTasks(
        {name: file},
        {name: Fraction(1)},
        steps=steps + spare,
        prompts=prompts,
        seed=train.seed,
        shuffle=shuffle,
        thinking_share=thinking_share,
    )


def check_thinking_share(files: Iterable[TaskFile], share: float | None) -> None:
    """Raise ValueError if the thinking modes set by a file's tasks contradict `share`; None accepts all modes."""
    for file in files:
        modes = [task.thinking for task in file.tasks if task.thinking is not None]
        differing = 0 if share is None else abs(sum(modes) - share * len(modes))
        if differing > max(1, SHARE_TOLERANCE * len(modes)):
            actual = sum(modes) / len(modes)
            raise ValueError(
                f"{file.path}: {actual:.1%} of the tasks with a thinking mode have it on, but "
                f"rl.thinking_share={share}; remove `thinking` from the tasks, so that the run sets it, or set "
                f"rl.thinking_share to their share ({actual:.3g}, or null)"
            )


def validation_tasks(path: str | Path) -> PlannedTasks:
    """Plan all tasks of a file once, in file order; raises the same errors as `TaskFile`."""
    file = TaskFile(path)
    return PlannedTasks(
        {"validation": file}, {"validation": Fraction(1)}, steps=len(file.tasks), prompts=1, seed=0, shuffle=False
    )


def check_references(planned: Iterable[PlannedTasks], check: Callable[[Task], object]) -> None:
    """Check all tasks' references before training starts.

    Args:
        planned: plans whose tasks are checked.
        check: function that raises ValueError for a task that its environment cannot verify.

    Raises:
        ValueError: the environment cannot verify some tasks; the message lists them with file and line.
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
    """Return the permutation of a file's tasks for one epoch, `[size]`."""
    return generator(seed, "tasks", name, epoch).permutation(size)


def read_blend(settings: Mapping[str, Any]) -> Group:
    """Read the tree of a blend of tasks; raise ValueError if it is invalid."""
    try:
        return read_tree(settings)
    except ValueError as error:
        raise ValueError(_OF_DATA.sub(f"{WHERE}.", str(error))) from None


def _blended(settings: TrainTasks, *, steps: int, prompts: int, thinking_share: float | None) -> PlannedTasks:
    root = read_blend({"directory": settings.directory, "blend": settings.blend, "streams": settings.streams})
    adapt = settings.adapt
    for leaf in root.leaves():
        for key in ("source", "tokens"):
            if getattr(leaf, key) is not None:
                place = _OF_DATA.sub(f"{WHERE}.", leaf.where)
                raise ValueError(
                    f"{place}.{key} is not supported, as a stream is always the file <directory>/<name>{_SUFFIX}; "
                    "remove it"
                )
    files: dict[str, TaskFile] = {}
    problems: list[str] = []
    for leaf in root.leaves():
        try:
            files[leaf.name] = TaskFile(Path(f"{leaf.prefix}{_SUFFIX}"))
        except ValueError as error:
            problems.append(str(error))
    _refuse(problems)
    check_thinking_share(files.values(), thinking_share)
    sizes = {name: Size(tokens=len(file.tasks), known="files") for name, file in files.items()}
    shares = divide(root, sizes, tokens=steps * prompts)
    if adapt is not None and _is_capped(root):
        raise ValueError(f"{WHERE}.adapt cannot respect cap_epochs in {WHERE}.blend; remove one of the two")
    if adapt is not None and sum(map(bool, shares.values())) < 2:
        raise ValueError(f"{WHERE}.adapt requires at least two streams with a share above 0; add one or remove adapt")
    return PlannedTasks(
        files,
        shares,
        steps=steps,
        prompts=prompts,
        seed=settings.seed,
        adapt=adapt,
        thinking_share=thinking_share,
    )


def _is_capped(node: Node) -> bool:
    return node.cap_epochs is not None or any(map(_is_capped, node.children))


def _curriculum(directory: Path, *, prompts: int) -> Path:
    stats = directory / STATS
    if not stats.is_file():
        raise ValueError(f"{WHERE}.curriculum: {stats} does not exist; make it with `nemo-ext curriculum`")
    batch = json.loads(stats.read_bytes())["settings"]["batch"]
    if batch != prompts:
        raise ValueError(
            f"{WHERE}.curriculum has {batch} prompts per step, but the run has {prompts}; make it with "
            f"curriculum.batch={prompts}, or set rl.prompts_per_step={batch}"
        )
    return directory / CURRICULUM
