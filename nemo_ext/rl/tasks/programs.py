"""Small programming tasks with tests, in six levels and two styles, for the environment `code`.

Every task is one of its level's kinds with a different number in the statement, so that a memorized program does not
solve the next task. Style `function` requires a function; `stdin`, a program that reads one argument per line.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import generator
from nemo_ext.job.settings import checked_whole
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels

LEVELS = 6
Style = Literal["function", "stdin"]

_Draw = Callable[[np.random.Generator], list[Any]]
_READ = {"numbers": "[int(word) for word in input().split()]", "text": "input()", "number": "int(input())"}
_MOST_SAME = 0.7


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of task. K in its statement and solution stands for a number that differs between tasks.

    Attributes:
        level: level of its tasks.
        least: smallest value of K.
        most: largest value of K.
        draw: function that draws the arguments of a test.
        solution: function that solves the task; its docstring is the statement.
    """

    level: int
    least: int
    most: int
    draw: _Draw
    solution: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.solution.__name__

    @property
    def arguments(self) -> list[str]:
        return list(inspect.signature(self.solution).parameters)[:-1]

    def statement(self, number: int) -> str:
        return " ".join(str(self.solution.__doc__).split()).replace("K", str(number))


_KINDS: list[_Kind] = []


def _kind(level: int, least: int, most: int, draw: _Draw) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function as the solution of a kind of task; arguments are as in `_Kind`."""

    def listed(solution: Callable[..., Any]) -> Callable[..., Any]:
        _KINDS.append(_Kind(level, least, most, draw, solution))
        return solution

    return listed


def _whole(low: int, high: int, least: int = 0, most: int = 12) -> _Draw:
    def draw(random: np.random.Generator) -> list[Any]:
        return [random.integers(low, high + 1, random.integers(least, most + 1)).tolist()]

    return draw


def _letters(alphabet: str, least: int = 0, most: int = 16) -> _Draw:
    def draw(random: np.random.Generator) -> list[Any]:
        return ["".join(random.choice(list(alphabet), random.integers(least, most + 1)))]

    return draw


def _number(low: int, high: int) -> _Draw:
    return lambda random: [int(random.integers(low, high + 1))]


def _two_texts(random: np.random.Generator) -> list[Any]:
    return ["".join(random.choice(list("abc"), random.integers(1, 13))) for _ in range(2)]


def _brackets(random: np.random.Generator) -> list[Any]:
    """Draw the arguments of a test: one string of brackets, which is balanced in about half of all cases."""
    text, open = "", ""
    for _ in range(int(random.integers(1, 9))):
        if open and random.random() < 0.45:
            text, open = text + open[0], open[1:]
        else:
            pair = ("()", "[]")[random.integers(2)]
            text, open = text + pair[0], pair[1] + open
    text += open
    if random.random() < 0.4:
        place = random.integers(len(text))
        text = text[:place] + "([)]"[random.integers(4)] + text[place + 1 :]
    return [text]


@_kind(1, 2, 9, _whole(-40, 40))
def sum_of_multiples(numbers: list[int], K: int) -> Any:
    """the sum of those numbers that are divisible by K (0 if there are none)"""
    return sum(number for number in numbers if number % K == 0)


@_kind(1, 2, 30, _number(-50, 50))
def affine(number: int, K: int) -> Any:
    """K times the number, plus 3, if the number is even, and the number minus K if it is odd"""
    return K * number + 3 if number % 2 == 0 else number - K


@_kind(1, -10, 10, _whole(-20, 20))
def count_above(numbers: list[int], K: int) -> Any:
    """how many of the numbers are greater than K"""
    return sum(number > K for number in numbers)


@_kind(2, 2, 5, _letters("abcdefgh", 4, 24))
def every_kth(text: str, K: int) -> Any:
    """the text made of every Kth character of the text, the first one included"""
    return text[::K]


@_kind(2, 1, 25, _letters("abcmnoxyz", 1))
def shift_letters(text: str, K: int) -> Any:
    """the text, with each letter moved on by K places in the alphabet, from z on to a again"""
    return "".join(chr((ord(letter) - 97 + K) % 26 + 97) for letter in text)


@_kind(2, 2, 9, _number(0, 5000))
def digit_sum(number: int, K: int) -> Any:
    """the sum of the number's digits when it is written in base K"""
    total = 0
    while number:
        total += number % K
        number //= K
    return total


@_kind(3, 3, 12, _whole(-60, 60, 1))
def distinct_residues(numbers: list[int], K: int) -> Any:
    """the remainders of the numbers divided by K (each from 0 to below K), without repetition, in increasing order"""
    return sorted({number % K for number in numbers})


@_kind(3, 1, 9, _whole(0, 30, 1))
def rotate(numbers: list[int], K: int) -> Any:
    """the numbers moved K places to the left in a circle"""
    turn = K % len(numbers) if numbers else 0
    return numbers[turn:] + numbers[:turn]


@_kind(3, 1, 3, _letters("ab", 1, 20))
def runs(text: str, K: int) -> Any:
    """the number of runs of at least K equal characters next to each other (a run is as long as it can be)"""
    runs, start = 0, 0
    for index in range(1, len(text) + 1):
        if index == len(text) or text[index] != text[start]:
            runs += index - start >= K
            start = index
    return runs


@_kind(4, 3, 8, _whole(-40, 40, 3))
def most_frequent_residue(numbers: list[int], K: int) -> Any:
    """the remainder on division by K (from 0 to below K) that most of the numbers have; of several, the smallest"""
    counts: dict[int, int] = {}
    for number in numbers:
        counts[number % K] = counts.get(number % K, 0) + 1
    return min(counts, key=lambda residue: (-counts[residue], residue))


@_kind(4, 4, 12, _whole(0, 12, 4, 16))
def pairs_with_sum(numbers: list[int], K: int) -> Any:
    """how many pairs of positions i < j there are whose numbers have the sum K"""
    pairs = 0
    seen: dict[int, int] = {}
    for number in numbers:
        pairs += seen.get(K - number, 0)
        seen[number] = seen.get(number, 0) + 1
    return pairs


@_kind(4, 2, 5, _whole(-20, 20, 2))
def largest_window(numbers: list[int], K: int) -> Any:
    """the largest sum of K numbers next to each other; 0 if there are fewer than K numbers"""
    return max((sum(numbers[i : i + K]) for i in range(len(numbers) - K + 1)), default=0)


@_kind(5, 1, 4, _brackets)
def balanced(text: str, K: int) -> Any:
    """true if the brackets are balanced and never more than K of them are open at once, else false"""
    open: list[str] = []
    for bracket in text:
        if bracket in "([":
            open.append(bracket)
            if len(open) > K:
                return False
        elif not open or open.pop() + bracket not in ("()", "[]"):
            return False
    return not open


@_kind(5, 2, 9, _number(1, 60))
def josephus(number: int, K: int) -> Any:
    """the place, counted from 0, of the last one left when as many people as the number says stand in a circle and
    every Kth is sent away, counting on from the one sent away last"""
    place = 0
    for people in range(2, number + 1):
        place = (place + K) % people
    return place


@_kind(5, 1, 3, _letters("abcd", 1, 24))
def longest_with_kinds(text: str, K: int) -> Any:
    """the length of the longest piece of the text in which at most K different letters occur"""
    best, start = 0, 0
    counts: dict[str, int] = {}
    for index, letter in enumerate(text):
        counts[letter] = counts.get(letter, 0) + 1
        while len(counts) > K:
            counts[text[start]] -= 1
            if not counts[text[start]]:
                del counts[text[start]]
            start += 1
        best = max(best, index - start + 1)
    return best


@_kind(6, 3, 20, _number(0, 60))
def coins(number: int, K: int) -> Any:
    """in how many ways the number can be written as a sum of any number of 1s, 2s, 5s and Ks, whatever their order"""
    ways = [1] + [0] * number
    for coin in sorted({1, 2, 5, K}):
        for total in range(coin, number + 1):
            ways[total] += ways[total - coin]
    return ways[number]


@_kind(6, 1, 9, _two_texts)
def common_subsequence(text: str, other: str, K: int) -> Any:
    """K times the length of the longest common subsequence of the two texts"""
    best = [0] * (len(other) + 1)
    for letter in text:
        before = 0
        for index, second in enumerate(other, 1):
            kept = best[index]
            best[index] = before + 1 if letter == second else max(kept, best[index - 1])
            before = kept
    return K * best[-1]


@_kind(6, 2, 4, _whole(-10, 30, 1, 14))
def no_neighbours(numbers: list[int], K: int) -> Any:
    """the largest sum of numbers of which no two are less than K places apart; 0 if it is best to take none"""
    best = [0]
    for index, number in enumerate(numbers):
        best.append(max(best[-1], number + best[max(0, index + 1 - K)]))
    return best[-1]


def tasks(
    count: int, *, seed: int, level: int | None = None, style: Style | None = None, tests: int = 8
) -> Iterator[Task]:
    """Generate Python tasks for the environment `code`.

    Args:
        style: style of all tasks; None to alternate after each round of levels.
        tests: number of tests per task.

    Raises:
        ValueError: the level or style is unknown, or there are fewer than two tests.
    """
    checked_whole("settings.tests", tests, least=2)
    if style not in (None, "function", "stdin"):
        raise ValueError(f"settings.style must be function, stdin or null, not {style!r}")
    for index, chosen in indexed_levels(count, level, LEVELS):
        # A round of all levels in one style, then one in the other.
        turn = index // (LEVELS if level is None else 1)
        task_style: Style = style or ("function" if turn % 2 == 0 else "stdin")
        kind, number, random = _drawn(seed, chosen, index)
        yield _task(f"programs-{seed}-{chosen}-{index}", kind, number, task_style, tests, random)


def solution(task: Task) -> str:
    """Return a correct answer to a task."""
    seed, level, index = task.id.removeprefix("programs-").rsplit("-", 2)
    kind, number, _ = _drawn(int(seed), int(level), int(index))
    source = _source(kind, number)
    if task.reference["style"] == "stdin":
        source += _reading(kind)
    return f"```python\n{source}\n```"


def _drawn(seed: int, level: int, index: int) -> tuple[_Kind, int, np.random.Generator]:
    """Return a task's kind, its number K, and the random generator that its tests are drawn from."""
    random = generator(seed, "programs", level, index)
    kinds = [kind for kind in _KINDS if kind.level == level]
    kind = kinds[random.integers(len(kinds))]
    return kind, int(random.integers(kind.least, kind.most + 1)), random


def _task(id: str, kind: _Kind, number: int, style: Style, tests: int, random: np.random.Generator) -> Task:
    calls: list[tuple[list[Any], Any]] = []
    while len(calls) < tests:
        args = kind.draw(random)
        expected = kind.solution(*args, number)
        # Inputs differ, and no single answer is correct for most of them.
        same = sum(other == expected for _, other in calls)
        if random.random() < 0.002 or (all(args != other for other, _ in calls) and same < _MOST_SAME * tests):
            calls.append((args, expected))
    signature = f"{kind.name}({', '.join(kind.arguments)})"
    goal = kind.statement(number)
    reference: dict[str, Any] = {"language": "python", "style": style}
    if style == "function":
        prompt = f"Write a Python function `{signature}` that returns {goal}. {_shapes(kind)}"
        reference["function"] = kind.name
        reference["tests"] = [{"args": args, "expected": expected} for args, expected in calls]
    else:
        prompt = (
            f"Write a Python program that reads {_lines(kind)} and prints {goal}. Numbers in a list, read or printed, "
            "are separated by blanks on one line, which is empty if there are none; true and false are printed so."
        )
        reference["tests"] = [{"input": _input(args), "output": _output(expected)} for args, expected in calls]
    return Task(
        id=id,
        environment="code",
        prompt=(Message(role="user", content=f"{prompt} Answer with one ```python block."),),
        reference=reference,
        domain="programs",
    )


def _source(kind: _Kind, number: int) -> str:
    """Return the source code of a kind's solution, with `number` in place of K."""
    _, _, body = inspect.getsource(kind.solution).split('"""', 2)
    # A negative number gets parentheses, which keep the precedence of operators.
    literal = str(number) if number >= 0 else f"({number})"
    return f"def {kind.name}({', '.join(kind.arguments)}):{body.rstrip().replace('K', literal)}"


def _reading(kind: _Kind) -> str:
    reads = "".join(f"{name} = {_READ.get(name, 'input()')}\n" for name in kind.arguments)
    return (
        f"\n\n{reads}result = {kind.name}({', '.join(kind.arguments)})\n"
        "if isinstance(result, list):\n    print(*result)\n"
        "elif isinstance(result, bool):\n    print(str(result).lower())\nelse:\n    print(result)"
    )


def _shapes(kind: _Kind) -> str:
    said = {"numbers": "`numbers` is a list of integers.", "number": "`number` is an integer."}
    return " ".join(said.get(name, f"`{name}` is a text.") for name in kind.arguments)


def _lines(kind: _Kind) -> str:
    said = {"numbers": "a list of numbers", "number": "a number", "text": "a text", "other": "another text"}
    return " and, on the next line, ".join(said[name] for name in kind.arguments)


def _input(args: Sequence[Any]) -> str:
    return "".join(f"{_output(argument)}\n" for argument in args)


def _output(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
