r"""Questions about small tables with four choices each, in five levels, for the environment `multiple_choice`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels

LETTERS = "ABCD"
_TOPICS = (
    ("City", ("Arden", "Belmora", "Corvin", "Daleth", "Estrel", "Fenwick", "Garrow", "Hollin")),
    ("Product", ("Lamp", "Chair", "Kettle", "Carpet", "Mirror", "Blanket", "Shelf", "Clock")),
    ("Student", ("Amara", "Bruno", "Chiara", "Dinesh", "Elif", "Farid", "Greta", "Hiroshi")),
)
_COLUMNS = {
    "City": ("Population", "Schools", "Parks"),
    "Product": ("Price", "Stock", "Returns"),
    "Student": ("Points", "Absences", "Books"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with names in the first column and distinct integers in each of the others."""

    kind: str
    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray  # [rows, columns]

    def markdown(self) -> str:
        """Return the table in Markdown, as shown in the prompt."""
        rows = [[self.kind, *self.columns], ["---"] * (1 + len(self.columns))]
        rows += [[name, *map(str, values)] for name, values in zip(self.names, self.values, strict=True)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


Question = tuple[str, str, Sequence[str]]
"""A question, its answer, and candidates for wrong choices."""


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate questions at levels 1 (look up a number) to 5 (a column's value where another column is largest)."""
    for index, task_level in indexed_levels(count, level, LEVELS):
        random = generator(seed, "tables", task_level, index)
        table = _table(random, rows=int(random.integers(3, 4 + task_level)))
        question, answer, wrong = _LEVELS[task_level - 1](random, table)
        choices, right = _choices(random, answer, wrong)
        listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
        content = f"{table.markdown()}\n\n{question}\n\n{listed}\n\nPut the letter of the answer in \\boxed{{}}."
        yield Task(
            id=f"tables/{seed}/{task_level}/{index}",
            environment="multiple_choice",
            prompt=(Message(role="user", content=content),),
            reference={"answer": LETTERS[right], "choices": choices},
            domain="tables",
        )


def solution(task: Task) -> str:
    """Return the correct answer, for training and tests."""
    letter = task.reference["answer"]
    return f"The answer is {task.reference['choices'][LETTERS.index(letter)]}.\n\n\\boxed{{{letter}}}"


def _table(random: np.random.Generator, *, rows: int) -> Table:
    kind, names = _TOPICS[random.integers(len(_TOPICS))]
    values = np.stack([random.choice(np.arange(1, 100), size=rows, replace=False) for _ in _COLUMNS[kind]], axis=1)
    shown = tuple(names[place] for place in random.permutation(len(names))[:rows])
    return Table(kind=kind, names=shown, columns=_COLUMNS[kind], values=values)


def _look_up(random: np.random.Generator, table: Table) -> Question:
    row, column = int(random.integers(len(table.names))), _column(random, table)
    question = f"What is the number of {table.columns[column]} for {table.names[row]}?"
    return question, str(table.values[row, column]), _numbers(table)


def _extreme(random: np.random.Generator, table: Table) -> Question:
    column, most = _column(random, table), bool(random.integers(2))
    best = (np.argmax if most else np.argmin)(table.values[:, column])
    question = f"Which {table.kind} has the {'largest' if most else 'smallest'} number of {table.columns[column]}?"
    return question, table.names[int(best)], [*table.names, "None of them"]


def _count(random: np.random.Generator, table: Table) -> Question:
    column = _column(random, table)
    limit = int(random.choice(table.values[:, column]))
    answer = int((table.values[:, column] > limit).sum())
    question = f"How many have a number of {table.columns[column]} above {limit}?"
    return question, str(answer), [str(number) for number in range(len(table.names) + 1)]


def _difference(random: np.random.Generator, table: Table) -> Question:
    first, second = map(int, random.choice(len(table.names), size=2, replace=False))
    column = _column(random, table)
    answer = abs(int(table.values[first, column]) - int(table.values[second, column]))
    named = f"{table.names[first]} and {table.names[second]}"
    question = f"What is the difference between {named} in their numbers of {table.columns[column]}?"
    near = [str(answer + step) for step in (-10, -2, -1, 1, 2, 10) if answer + step > 0]
    return question, str(answer), near


def _where(random: np.random.Generator, table: Table) -> Question:
    first, second = map(int, random.choice(len(table.columns), size=2, replace=False))
    row = int(np.argmax(table.values[:, first]))
    question = (
        f"What is the number of {table.columns[second]} for the {table.kind} "
        f"with the largest number of {table.columns[first]}?"
    )
    return question, str(table.values[row, second]), [str(value) for value in table.values[:, second]] + _numbers(table)


_LEVELS = (_look_up, _extreme, _count, _difference, _where)
LEVELS = len(_LEVELS)


def _choices(random: np.random.Generator, answer: str, wrong: Sequence[str]) -> tuple[list[str], int]:
    """Return `answer` and three different wrong choices in random order, and the index of `answer`."""
    others = [choice for choice in dict.fromkeys(wrong) if choice != answer]
    picked = [others[place] for place in random.permutation(len(others))[: len(LETTERS) - 1]]
    right = int(random.integers(len(LETTERS)))
    return [*picked[:right], answer, *picked[right:]], right


def _column(random: np.random.Generator, table: Table) -> int:
    return int(random.integers(len(table.columns)))


def _numbers(table: Table) -> list[str]:
    return [str(value) for value in table.values.flat]
