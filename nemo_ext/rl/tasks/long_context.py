"""Long-context problems, mostly as in RULER (arXiv 2404.06654, section 3), with generated instead of downloaded texts.

Columns: id, domain (the length), length, context, question, answers, wrong (strings that a correct answer must not
contain). `length` is the number of tokens per context, each counted as four characters, or several numbers used in
turn. Settings out of range raise ValueError.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from nemo_ext.job.seeds import generator
from nemo_ext.job.settings import checked_whole, nearest
from nemo_ext.rl.tasks.words import ADJECTIVES, NOUNS, PEOPLE, TOWNS, pick, sentences, unseen

CHARACTERS = 4
"""Number of characters counted as one token."""
LEAST = 128
"""Minimum length in tokens; a context only exceeds the requested length if its needles alone do."""
_DEPTHS = 10

Lengths = int | Sequence[int]
Asked = Literal["order", "total"]


def needles(
    count: int,
    *,
    seed: int,
    length: Lengths = 1024,
    keys: int = 1,
    values: int = 1,
    asked: int = 1,
) -> Iterator[dict[str, Any]]:
    """Generate questions about the codes of things, which are hidden in a long text: RULER's needles in a haystack.

    The position of the first requested code moves through the text from problem to problem (column `depth`, 0 to 1).

    Args:
        length: tokens per context, each counted as four characters, or several numbers used in turn.
        keys: number of things with codes (4 in RULER's multi-key task).
        values: number of codes per thing (4 in multi-value).
        asked: number of things in the question (4 in multi-query).
    """
    _check(1, 8, keys=keys, values=values, asked=asked)
    if asked > keys:
        raise ValueError(f"settings.asked={asked}: must be at most settings.keys={keys}")
    for number, tokens in _lengths(count, length):
        random = generator(seed, "needles", keys, values, asked, "sentences", tokens, number)
        places = random.permutation(len(ADJECTIVES) * len(NOUNS))[:keys]
        things = [f"{ADJECTIVES[place // len(NOUNS)]} {NOUNS[place % len(NOUNS)]}" for place in places]
        codes: set[str] = set()
        named = {thing: [_code(random, codes) for _ in range(values)] for thing in things}
        hidden = [f"The code of the {thing} is {code}." for thing, own in named.items() for code in own]
        sought = things[:asked]
        lines = _filled(sentences(random), tokens, sum(len(each) + 1 for each in hidden))
        depth = (number % _DEPTHS) / (_DEPTHS - 1)
        at = [round(depth * len(lines)), *map(int, random.integers(len(lines) + 1, size=len(hidden) - 1))]
        for place, needle in sorted(zip(at, hidden, strict=True), reverse=True):
            lines.insert(place, needle)
        things_asked = " and ".join(f"the {each}" for each in sought)
        question = (
            f"What is the code of {things_asked}? Answer with the code alone."
            if values * asked == 1
            else f"What are all the codes of {things_asked}? Answer with these codes alone."
        )
        answers = [code for each in sought for code in named[each]]
        yield _row("needles", seed, number, tokens, " ".join(lines), question, answers, codes) | {"depth": depth}


def variables(
    count: int, *, seed: int, length: Lengths = 1024, chains: int = 2, hops: int = 4
) -> Iterator[dict[str, Any]]:
    """Generate questions about variables assigned from each other: RULER's variable tracking (default: 4 hops).

    Args:
        length: tokens per context, each counted as four characters, or several numbers used in turn.
        chains: number of chains, each with a different value; the question is about the first.
        hops: number of assignments per chain after the first.
    """
    _check(1, 8, chains=chains, hops=hops)
    for number, tokens in _lengths(count, length):
        random = generator(seed, "variables", chains, hops, tokens, number)
        names: set[str] = set()
        codes: set[str] = set()
        variables_by_chain = [[unseen(random, names, 2).upper() for _ in range(hops + 1)] for _ in range(chains)]
        names = {name for chain in variables_by_chain for name in chain}
        statements = []
        for chain in variables_by_chain:
            sources = [_code(random, codes, digits=5), *chain[:-1]]
            statements.append([f"VAR {name} = {source}." for name, source in zip(chain, sources, strict=True)])
        value = statements[0][0].removesuffix(".").rpartition(" ")[2]
        lines = _filled(sentences(random), tokens, sum(len(line) + 1 for chain in statements for line in chain))
        for chain_lines in statements:  # each in its order
            places = sorted(map(int, random.choice(len(lines) + 1, size=hops + 1, replace=False)), reverse=True)
            for place, line in zip(places, reversed(chain_lines), strict=True):
                lines.insert(place, line)
        question = (
            f"Which variables have the value {value}, by themselves or because they were set to another that has it? "
            "Answer with their names alone."
        )
        yield _row("variables", seed, number, tokens, " ".join(lines), question, variables_by_chain[0], names)


def common_words(count: int, *, seed: int, length: Lengths = 1024, common: int = 5) -> Iterator[dict[str, Any]]:
    """Generate questions about the most frequent words in a long list: RULER's common words.

    Common words make up about a quarter of the list, and each is three times as frequent as any other word.

    Args:
        length: tokens per context, each counted as four characters, or several numbers used in turn.
        common: number of words that the question asks for.
    """
    _check(1, 10, common=common)
    words = NOUNS + PEOPLE
    others = 8 * common  # of which each takes a third of a common word's share
    for number, tokens in _lengths(count, length):
        random = generator(seed, "common_words", common, tokens, number)
        chosen = [words[place] for place in random.permutation(len(words))[: common + others]]
        times = max(1, tokens * CHARACTERS // (12 * (3 * common + others)))  # a numbered word has some 12 characters
        listed = [word for place, word in enumerate(chosen) for _ in range(times * 3 if place < common else times)]
        context = " ".join(f"{place}. {listed[each]}" for place, each in enumerate(random.permutation(len(listed)), 1))
        question = f"Which {common} words are most frequent in this list? Answer with these words alone."
        yield _row("common_words", seed, number, tokens, context, question, chosen[:common], chosen)


def documents(count: int, *, seed: int, length: Lengths = 1024, hops: int = 1) -> Iterator[dict[str, Any]]:
    """Generate questions about one to five of many short documents, in place of RULER's SQuAD and HotpotQA.

    Args:
        length: tokens per context, each counted as four characters, or several numbers used in turn.
        hops: number of documents needed for the answer, 1 to 5; from 3 on, they form a chain of teachers.
    """
    _check(1, 5, hops=hops)
    teachers = max(0, hops - 2)
    for number, tokens in _lengths(count, length):
        random = generator(seed, "documents", hops, tokens, number)
        seen = set(TOWNS)
        people: list[tuple[str, str, str]] = []
        texts: list[str] = []
        size = 0
        while size < tokens * CHARACTERS or len(people) < max(2, teachers + 1):
            person, house = f"{unseen(random, seen, 2)} {unseen(random, seen)}", unseen(random, seen, 4)
            town, work, thing = pick(random, TOWNS), pick(random, PEOPLE), pick(random, NOUNS)
            people.append((person, house, town))
            new = [
                f"{person} was born in {town} in {int(random.integers(1700, 1950))} and worked as a {work}.",
                f"The house of {house} was founded by {person}. It made every kind of {thing}.",
            ]
            if teachers and len(people) > 1:
                new.append(f"{person} learned everything from {people[-2][0]}.")
            texts += new
            size += sum(len(text) + 15 for text in new)
        place = int(random.integers(teachers, len(people)))
        (person, house, _), town = people[place], people[place - teachers][2]
        born = (
            f"{person} born" if hops == 1 else f"{'the teacher of ' * teachers}the founder of the house of {house} born"
        )
        shown = [texts[place] for place in random.permutation(len(texts))]
        context = "\n".join(f"Document {place}: {text}" for place, text in enumerate(shown, 1))
        question = f"In which town was {born}? Answer with the name of the town alone."
        yield _row("documents", seed, number, tokens, context, question, [town], TOWNS)


def deliveries(
    count: int, *, seed: int, length: Lengths = 1024, towns: int = 4, asked: Asked = "order"
) -> Iterator[dict[str, Any]]:
    """Generate questions about dated deliveries to towns in random order: which came third, or a town's total.

    Args:
        length: tokens per context, each counted as four characters, or several numbers used in turn.
        towns: number of towns, 3 to 8; each has one delivery for `order`, two to four for `total`.
        asked: `order` to ask which town comes at a position by date; `total` to ask for the sum of a town's deliveries.
    """
    _check(3, 8, towns=towns)
    if asked not in ("order", "total"):
        raise ValueError(f"settings.asked: unknown kind {asked!r}: {nearest(str(asked), ('order', 'total'))}")
    for number, tokens in _lengths(count, length):
        random = generator(seed, "deliveries", towns, asked, tokens, number)
        chosen = [TOWNS[place] for place in random.permutation(len(TOWNS))[:towns]]
        per_town = 1 if asked == "order" else int(random.integers(2, 5))
        days = random.permutation(np.arange(2, 366))[: towns * per_town]
        records = [
            (int(day), town, int(random.integers(11, 100)))
            for day, town in zip(days, [town for town in chosen for _ in range(per_town)], strict=True)
        ]
        hidden = [f"On day {day} of the year {town} received {barrels} barrels." for day, town, barrels in records]
        lines = _filled(sentences(random), tokens, sum(len(line) + 1 for line in hidden))
        for line in (hidden[place] for place in random.permutation(len(hidden))):
            lines.insert(int(random.integers(len(lines) + 1)), line)
        if asked == "order":
            place = int(random.integers(towns))
            answer, named = sorted(records)[place][1], chosen
            question = (
                f"Order the towns that received barrels by the day of the year. Which one is number {place + 1}, from "
                "the earliest? Answer with the name of the town alone."
            )
        else:
            totals = {town: sum(barrels for _, to, barrels in records if to == town) for town in chosen}
            answer = str(totals[chosen[0]])
            named = [str(number) for number in (*totals.values(), *(row[2] for row in records))]
            question = f"How many barrels did {chosen[0]} receive in all? Answer with the number alone."
        yield _row("deliveries", seed, number, tokens, " ".join(lines), question, [answer], named)


def _check(least: int, most: int, **settings: int) -> None:
    for key, value in settings.items():
        if checked_whole(f"settings.{key}", value, least=least) > most:
            raise ValueError(f"settings.{key}={value}: expected a whole number from {least} to {most}")


def _lengths(count: int, length: Lengths) -> Iterator[tuple[int, int]]:
    """Yield two numbers for each of `count` rows: its index among the rows of the same length, and that length."""
    lengths = [length] if isinstance(length, int) else list(length)
    for each in lengths:
        checked_whole("settings.length", each, least=LEAST)
    if not lengths:
        raise ValueError("settings.length: expected at least one length")
    for index in range(count):
        yield index // len(lengths), lengths[index % len(lengths)]


def _filled(filling: Iterator[str], tokens: int, taken: int) -> list[str]:
    """Return filler sentences, at least ten, that fill a context of `tokens` tokens less `taken` characters."""
    lines: list[str] = []
    left = tokens * CHARACTERS - taken
    while left > 0 or len(lines) < _DEPTHS:
        lines.append(next(filling))
        left -= len(lines[-1]) + 1
    return lines


def _row(
    name: str,
    seed: int,
    number: int,
    tokens: int,
    context: str,
    question: str,
    answers: Sequence[str],
    named: "Sequence[str] | set[str]",
) -> dict[str, Any]:
    return {
        "id": f"{name}/{seed}/{tokens}/{number}",
        "domain": str(tokens),
        "length": tokens,
        "context": context,
        "question": question,
        "answers": list(answers),
        "wrong": sorted(set(named) - set(answers)),
    }


def _code(random: np.random.Generator, seen: set[str], digits: int = 7) -> str:
    while (code := str(random.integers(10 ** (digits - 1), 10**digits))) in seen:
        continue
    seen.add(code)
    return code
