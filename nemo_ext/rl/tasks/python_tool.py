r"""Mathematics that is easy with a computer and tedious without one, in four levels, for the environment `python_tool`.

1  the digits of a large number      2  primes in an interval
3  solutions of a congruence         4  ways to pay an amount
"""

from collections.abc import Callable, Iterator

import numpy as np

from nemo_ext.chat.sample import Message, ToolCall
from nemo_ext.job.seeds import generator
from nemo_ext.rl.task import Task
from nemo_ext.rl.tasks import indexed_levels, whole
from nemo_ext.rl.worlds.python_tool import NAME, TOOL


def tasks(count: int, *, seed: int, level: int | None = None) -> Iterator[Task]:
    """Generate problems at levels 1 to 4.

    Raises:
        ValueError: the level is out of range.
    """
    for index, task_level in indexed_levels(count, level, LEVELS):
        question, _, answer = _problem(seed, task_level, index)
        yield Task(
            id=f"{NAME}/{seed}/{task_level}/{index}",
            environment=NAME,
            prompt=(Message(role="user", content=f"{question} Put the answer in \\boxed{{}}."),),
            reference={"answer": str(answer)},
            tools=(TOOL.schema,),
            domain=NAME,
        )


def solution(task: Task) -> tuple[ToolCall, ...]:
    """Return the calls that compute the answer: the second call prints a variable that the first one sets."""
    _, seed, level, index = task.id.split("/")
    _, code, _ = _problem(int(seed), int(level), int(index))
    return tuple(ToolCall(name=TOOL.name, arguments={"code": text}) for text in (code, "answer"))


def _problem(seed: int, level: int, index: int) -> tuple[str, str, int]:
    return _LEVELS[level - 1](generator(seed, NAME, level, index))


def _digits(random: np.random.Generator) -> tuple[str, str, int]:
    base, power = whole(random, 2, 99), whole(random, 20, 200)
    return (
        f"What is the sum of the digits of {base}^{{{power}}}?",
        f"answer = sum(map(int, str({base} ** {power})))",
        sum(map(int, str(base**power))),
    )


def _primes(random: np.random.Generator) -> tuple[str, str, int]:
    first = whole(random, 100, 20_000)
    last = first + whole(random, 100, 2_000)
    code = (
        "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))\n\n"
        f"answer = sum(is_prime(n) for n in range({first}, {last} + 1))"
    )
    count = sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(first, last + 1))
    return f"How many prime numbers are there from {first} to {last}, both included?", code, count


def _congruence(random: np.random.Generator) -> tuple[str, str, int]:
    modulus, power = whole(random, 50, 400), whole(random, 2, 4)
    residue = pow(whole(random, 1, modulus - 1), power, modulus)
    question = f"How many integers x with 0 <= x < {10 * modulus} satisfy x^{power} = {residue} modulo {modulus}?"
    code = f"answer = sum(pow(x, {power}, {modulus}) == {residue} for x in range({10 * modulus}))"
    return question, code, sum(pow(x, power, modulus) == residue for x in range(10 * modulus))


def _payments(random: np.random.Generator) -> tuple[str, str, int]:
    coins = sorted({1, *(whole(random, 2, 25) for _ in range(3))})
    amount = whole(random, 50, 300)
    code = (
        f"ways = [1] + [0] * {amount}\nfor coin in {coins}:\n    for total in range(coin, {amount} + 1):\n"
        "        ways[total] += ways[total - coin]\nanswer = ways[-1]"
    )
    ways = [1] + [0] * amount
    for coin in coins:
        for total in range(coin, amount + 1):
            ways[total] += ways[total - coin]
    values = ", ".join(map(str, coins[:-1])) + f" and {coins[-1]}"
    question = (
        f"In how many ways can an amount of {amount} be paid with coins worth {values}, regardless of their order?"
    )
    return question, code, ways[-1]


_LEVELS: tuple[Callable[[np.random.Generator], tuple[str, str, int]], ...] = (
    *(_digits, _primes, _congruence),
    _payments,
)
LEVELS = len(_LEVELS)
