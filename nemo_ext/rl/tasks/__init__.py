"""Generators of tasks for trying every environment without external data.

Each module has `tasks(count, *, seed, level=None) -> Iterator[Task]`, `solution(task)`, which returns a correct answer,
and `LEVELS`, the number of difficulty levels. Level 1 is the easiest; without a level, tasks cycle through all levels.
A task depends only on the seed, the level and its index, so a larger count starts with the same tasks.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nemo_ext.job.settings import checked_whole, nearest
from nemo_ext.rl.task import Task

GENERATORS: Mapping[str, str] = {
    "arithmetic": "nemo_ext.rl.tasks.arithmetic",
    "tables": "nemo_ext.rl.tasks.tables",
    "schemas": "nemo_ext.rl.tasks.schemas",
    "programs": "nemo_ext.rl.tasks.programs",
    "instructions": "nemo_ext.rl.tasks.instructions",
    "conversations": "nemo_ext.rl.tasks.conversations",
    "long_documents": "nemo_ext.rl.tasks.long_documents",
    "tool_calls": "nemo_ext.rl.tasks.tool_calls",
    "workplace": "nemo_ext.rl.tasks.workplace",
    "bank": "nemo_ext.rl.tasks.bank",
    "python_tool": "nemo_ext.rl.tasks.python_tool",
}


def generate(name: str, count: int, *, seed: int, level: int | None = None, **settings: Any) -> Iterator[Task]:
    """Generate tasks with the generator `name`; `settings` are its other keyword arguments.

    Raises:
        ValueError: the generator is unknown, or a number is out of range.
    """
    if name not in GENERATORS:
        raise ValueError(f"unknown task generator {name!r}: {nearest(name, GENERATORS)}")
    checked_whole("count", count, least=0)
    made: Iterator[Task] = importlib.import_module(GENERATORS[name]).tasks(count, seed=seed, level=level, **settings)
    return made


def whole(random: np.random.Generator, least: int, most: int) -> int:
    """Draw an integer from `least` to `most`, both included."""
    return int(random.integers(least, most, endpoint=True))


def indexed_levels(count: int, level: int | None, levels: int) -> Iterator[tuple[int, int]]:
    """Yield the index and level of each task: the requested level, or all levels in turn if it is None.

    Raises:
        ValueError: the level is out of range.
    """
    if level is not None and checked_whole("level", level, least=1) > levels:
        raise ValueError(f"level={level}: expected a level from 1 to {levels}")
    for index in range(count):
        yield index, index % levels + 1 if level is None else level
