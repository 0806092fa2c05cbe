r"""Arithmetic and algebra with one correct answer, in eight levels, for the environment `math`."""

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import numpy as np

from nemo_ext.chat.sample import Message
from nemo_ext.job.seeds import generator
from nemo_ext.job.settings import checked_whole, nearest
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels, whole

Format = Literal["boxed", "text", "bare"]
_ASKED = {
    "boxed": r"Put the answer in \boxed{}.",
    "text": 'End with "The answer is" and the answer.',
    "bare": "Write the answer alone.",
}


def tasks(
    count: int, *, seed: int, level: int | None = None, format: Format = "boxed", largest: int = 9
) -> Iterator[Task]:
    """Generate problems at levels 1 (sums of digits) to 8 (quadratic equations).

    Args:
        format: requested format of the answer; see `nemo_ext.rl.verifiers.math.Reference`.
        largest: largest number in a level-1 sum; level 1 has `(largest + 1)^2` questions.

    Raises:
        ValueError: the level or format is unknown, or `largest` is below 1.
    """
    if format not in _ASKED:
        raise ValueError(f"settings.format: unknown format {format!r}: {nearest(str(format), _ASKED)}")
    checked_whole("settings.largest", largest, least=1)
    if largest != 9 and level not in (None, 1):
        raise ValueError(
            f"settings.largest={largest} applies only to level=1, not to level={level}: remove one of them"
        )
    for index, task_level in indexed_levels(count, level, LEVELS):
        question, _, answer = _problem(seed, task_level, index, largest)
        yield Task(
            id=f"arithmetic/{seed}/{task_level}{'' if largest == 9 else f'-{largest}'}/{index}",
            environment="math",
            prompt=(Message(role="user", content=f"{question} {_ASKED[format]}"),),
            reference={"answer": answer, "format": format},
            domain="arithmetic",
        )


def solution(task: Task) -> str:
    """Return the correct answer with its derivation, for training and tests."""
    _, seed, level, index = task.id.split("/")
    number, _, largest = level.partition("-")
    _, work, answer = _problem(int(seed), int(number), int(index), int(largest or 9))
    return {"boxed": f"{work}\n\n\\boxed{{{answer}}}", "text": f"{work}\n\nThe answer is {answer}", "bare": answer}[
        task.reference["format"]
    ]


def _problem(seed: int, level: int, index: int, largest: int) -> tuple[str, str, str]:
    random = generator(seed, "arithmetic", level, index)
    return _digits(random, largest) if level == 1 else _LEVELS[level - 2](random)


def _digits(random: np.random.Generator, largest: int) -> tuple[str, str, str]:
    return _calculated(f"{whole(random, 0, largest)} + {whole(random, 0, largest)}")


def _sums(random: np.random.Generator) -> tuple[str, str, str]:
    sign = "+-"[whole(random, 0, 1)]
    return _calculated(f"{whole(random, 10, 99)} {sign} {whole(random, 10, 99)}")


def _products(random: np.random.Generator) -> tuple[str, str, str]:
    first, second = whole(random, 2, 99), whole(random, 2, 12)
    if whole(random, 0, 1):
        return f"What is {first * second} / {second}?", f"{first} * {second} = {first * second}", str(first)
    return _calculated(f"{first} * {second}")


def _brackets(random: np.random.Generator) -> tuple[str, str, str]:
    inner = f"{whole(random, 2, 20)} {'+-'[whole(random, 0, 1)]} {whole(random, 2, 20)}"
    return _calculated(f"{whole(random, 2, 12)} * ({inner}) - {whole(random, 2, 50)}")


def _linear(random: np.random.Generator) -> tuple[str, str, str]:
    factor, x, offset = whole(random, 2, 12), whole(random, -12, 12), whole(random, 1, 30)
    right = factor * x + offset
    work = f"{factor}x = {right} - {offset} = {right - offset}, so x = {x}."
    return f"Solve {factor}x + {offset} = {right} for x.", work, str(x)


def _fractions(random: np.random.Generator) -> tuple[str, str, str]:
    left, right = whole(random, 2, 12), whole(random, 2, 12)
    right += left == right
    first, second = whole(random, 1, 20), whole(random, 1, 20)
    x = Fraction(second - first, left - right)
    work = f"({left} - {right})x = {second} - {first}, so x = {second - first} / {left - right} = {x}."
    return f"Solve {left}x + {first} = {right}x + {second} for x.", work, _latex(x)


def _system(random: np.random.Generator) -> tuple[str, str, str]:
    x, y, factor = whole(random, -9, 9), whole(random, -9, 9), whole(random, 2, 6)
    total, other = x + y, factor * x - y
    question = f"Solve x + y = {total} and {factor}x - y = {other}. Give (x, y)."
    work = f"The sum of both is {factor + 1}x = {total + other}, so x = {x} and y = {total} - ({x}) = {y}."
    return question, work, f"({x}, {y})"


def _quadratic(random: np.random.Generator) -> tuple[str, str, str]:
    first = whole(random, -9, 8)
    second = whole(random, first + 1, 9)
    linear, constant = -(first + second), first * second
    question = f"Find all solutions of x^2 {_signed(linear)}x {_signed(constant)} = 0. Give them as a set {{a, b}}."
    work = f"The left side is (x {_signed(-first)})(x {_signed(-second)})."
    return question, work, rf"\{{{first}, {second}\}}"


_LEVELS = (_sums, _products, _brackets, _linear, _fractions, _system, _quadratic)
LEVELS = 1 + len(_LEVELS)


def _calculated(expression: str) -> tuple[str, str, str]:
    # eval is safe here: the expression was generated from digits, signs and brackets.
    value = eval(expression, {"__builtins__": {}})
    return f"What is {expression}?", f"{expression} = {value}", str(value)


def _latex(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return rf"{sign}\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def _signed(number: int) -> str:
    return f"{'-' if number < 0 else '+'} {abs(number)}"
