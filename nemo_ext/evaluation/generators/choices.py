"""Generated multiple-choice questions about numbers, alphabetical order, word groups, opposites, sequences and orders.

Columns of a row: id, domain (the kind), question, choices (strings), gold (index of the correct choice, from 0), letter
(of the correct choice), listed (lines "A. ..."), continuations (the choices with a leading space).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from nemo_ext.job.seeds import generator
from nemo_ext.job.settings import nearest
from nemo_ext.rl.tasks.words import NOUNS, pick, unseen

LETTERS = "ABCD"
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "animals": ("cat", "dog", "horse", "cow", "sheep", "rabbit", "wolf", "bear", "lion", "mouse"),
    "colours": ("red", "blue", "green", "yellow", "purple", "brown", "black", "white", "pink", "grey"),
    "fruit": ("apple", "pear", "banana", "cherry", "grape", "lemon", "peach", "plum", "mango", "melon"),
    "tools": ("hammer", "saw", "drill", "wrench", "chisel", "screwdriver", "pliers", "shovel", "rake", "axe"),
    "clothes": ("shirt", "coat", "hat", "sock", "glove", "scarf", "skirt", "jacket", "belt", "sweater"),
    "instruments": ("piano", "violin", "flute", "drum", "trumpet", "guitar", "harp", "cello", "oboe", "clarinet"),
    "metals": ("iron", "copper", "gold", "silver", "tin", "lead", "zinc", "nickel", "aluminium", "platinum"),
}
_OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("open", "closed"), ("early", "late"),
    ("rich", "poor"), ("fast", "slow"), ("strong", "weak"), ("full", "empty"), ("old", "young"), ("wet", "dry"),
    ("loud", "quiet"), ("heavy", "light"), ("hard", "soft"), ("deep", "shallow"), ("left", "right"), ("win", "lose"),
    ("begin", "end"), ("buy", "sell"), ("push", "pull"), ("true", "false"), ("first", "last"), ("sweet", "bitter"),
)  # fmt: skip

Made = tuple[str, str, Sequence[str]]
"""Question, correct choice, and three wrong choices."""


def choices(count: int, *, seed: int, kinds: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """Generate questions with four choices, cycling through the kinds.

    Args:
        kinds: kinds to generate, from `KINDS`; None for all.

    Raises:
        ValueError: a kind is unknown.
    """
    wanted = list(KINDS) if kinds is None else [kinds] if isinstance(kinds, str) else list(kinds)
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise ValueError(f"settings.kinds: unknown kind {unknown[0]!r}: {nearest(str(unknown[0]), KINDS)}")
    if not wanted:
        raise ValueError(f"settings.kinds is empty: expected one or more of {', '.join(KINDS)}")
    for index in range(count):
        kind, number = wanted[index % len(wanted)], index // len(wanted)
        random = generator(seed, "choices", kind, number)
        question, right, wrong = KINDS[kind](random)
        gold = int(random.integers(len(LETTERS)))
        texts = [*wrong[:gold], right, *wrong[gold:]]
        yield {
            "id": f"choices/{seed}/{kind}/{number}",
            "domain": kind,
            "question": question,
            "choices": texts,
            "gold": gold,
            "letter": LETTERS[gold],
            "listed": "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=True)),
            "continuations": [f" {text}" for text in texts],
        }


def _largest(random: np.random.Generator) -> Made:
    most = 10 ** int(random.integers(2, 6))
    least = bool(random.integers(2))
    numbers = sorted(map(int, random.choice(most, size=4, replace=False)), reverse=not least)
    right, *wrong = map(str, numbers)
    return f"Which of these numbers is the {'smallest' if least else 'largest'}?", right, wrong


def _alphabet(random: np.random.Generator) -> Made:
    last = bool(random.integers(2))
    right, *wrong = sorted(_several(random, NOUNS, 4), reverse=last)
    return f"Which of these words comes {'last' if last else 'first'} in the dictionary?", right, wrong


def _odd_one_out(random: np.random.Generator) -> Made:
    common, other = _several(random, tuple(_GROUPS), 2)
    return (
        "Which of these does not belong with the others?",
        pick(random, _GROUPS[other]),
        _several(random, _GROUPS[common], 3),
    )


def _opposite(random: np.random.Generator) -> Made:
    pairs = [_OPPOSITES[place] for place in random.permutation(len(_OPPOSITES))[:5]]
    turned = [pair[::-1] if random.integers(2) else pair for pair in pairs]
    (first, second), (third, right), *others = turned
    return f"{first} is to {second} as {third} is to what?", right, [other for other, _ in others]


def _sequence(random: np.random.Generator) -> Made:
    begin, step = int(random.integers(1, 50)), int(random.integers(2, 13))
    shown = [begin + step * place for place in range(4)]
    right = begin + 4 * step
    wrong = [str(right + off) for off in ((-1, 1, step) if random.integers(2) else (-2, 1, 2 * step))]
    return f"Which number comes next: {', '.join(map(str, shown))}?", str(right), wrong


def _order(random: np.random.Generator) -> Made:
    seen: set[str] = set()
    people = [unseen(random, seen, 2) for _ in range(4)]
    facts = [f"{older} is older than {younger}." for older, younger in pairwise(people)]
    youngest = bool(random.integers(2))
    right, *wrong = people[::-1] if youngest else people
    premises = " ".join(facts[place] for place in random.permutation(len(facts)))
    wrong = [wrong[place] for place in random.permutation(len(wrong))]
    return f"{premises} Who is the {'youngest' if youngest else 'oldest'}?", right, wrong


KINDS: Mapping[str, Callable[[np.random.Generator], Made]] = {
    "largest": _largest,
    "alphabet": _alphabet,
    "odd_one_out": _odd_one_out,
    "opposite": _opposite,
    "sequence": _sequence,
    "order": _order,
}


def _several(random: np.random.Generator, words: Sequence[str], number: int) -> list[str]:
    """Draw `number` distinct words at random."""
    return [words[place] for place in random.permutation(len(words))[:number]]
