"""Questions about long generated texts, in eight levels, for the environment `contains`.

1  one of two codes                         2  two of four codes
3  a fact from two of many documents        4  variables assigned from each other
5  the most frequent words of a list        6  the order of dated events
7  a sum over scattered amounts             8  a fact from five of many documents

The texts come from `nemo_ext.rl.tasks.long_context`; the setting `length` is in tokens of four characters.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from nemo_ext.chat.sample import Message
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels, long_context
from nemo_ext.rl.tasks.long_context import Lengths

LENGTH = 4096
_ROWS: tuple[Callable[..., Iterator[Mapping[str, Any]]], ...] = (
    partial(long_context.needles, keys=2),
    partial(long_context.needles, keys=4, asked=2),
    partial(long_context.documents, hops=2),
    long_context.variables,
    long_context.common_words,
    partial(long_context.deliveries, towns=6),
    partial(long_context.deliveries, asked="total"),
    partial(long_context.documents, hops=5),
)
LEVELS = len(_ROWS)


def tasks(count: int, *, seed: int, level: int | None = None, length: Lengths = LENGTH) -> Iterator[Task]:
    """Generate questions at levels 1 to 8.

    Args:
        length: number of tokens per text, or several numbers used in turn within each level.

    Raises:
        ValueError: the level or length is out of range.
    """
    rows: dict[int, Iterator[Mapping[str, Any]]] = {}
    for _, task_level in indexed_levels(count, level, LEVELS):
        if task_level not in rows:
            rows[task_level] = _ROWS[task_level - 1](count, seed=seed, length=length)
        row = next(rows[task_level])
        tokens, number = row["id"].split("/")[-2:]
        yield Task(
            id=f"long_documents/{seed}/{task_level}/{tokens}/{number}",
            environment="contains",
            prompt=(Message(role="user", content=f"{row['context']}\n\n{row['question']}"),),
            reference={"answers": row["answers"], "wrong": row["wrong"], "all": True},
            domain="long_documents",
        )


def solution(task: Task) -> str:
    """Return the correct answer, without a sentence around it."""
    return ", ".join(task.reference["answers"])
