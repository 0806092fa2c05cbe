"""Filters that recipes' templates and expressions have beside Jinja's own; they compute, and reach no file, no network.

They are filters alone (`answer | tagged('score')`), since a row may have a column with the name of any of them.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from nemo_ext.chat.formats import template_messages
from nemo_ext.data.text.words import words_of
from nemo_ext.job.records import strict_json
from nemo_ext.job.seeds import generator, uniform
from nemo_ext.job.templates import Templates
from nemo_ext.rl.answers import fences, final_answer, last_boxed, normal
from nemo_ext.rl.verifiers.code import TAGS
from nemo_ext.rl.verifiers.refusal import refuses
from nemo_ext.synthesis.translation import lines, unmasked

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_SHINGLE = 3


def tagged(text: str | None, name: str) -> str:
    """What stands between the last <name> and </name>, without white space around it; "" if there is none."""
    found = all_tagged(text, name)
    return found[-1] if found else ""


def all_tagged(text: str | None, name: str) -> list[str]:
    """What stands between each <name> and </name>."""
    mark = re.escape(name)
    return [each.strip() for each in re.findall(rf"<{mark}>((?:(?!<{mark}>).)*?)</{mark}>", text or "", re.DOTALL)]


def number(text: str | None) -> float | None:
    """The first number in a text; None if there is none."""
    found = _NUMBER.search(text or "")
    return float(found.group()) if found else None


def json_of(text: str | None) -> Any:
    """Value of a JSON text, or of one in a code block; None if it is none that can be kept."""
    try:
        value = strict_json(code(text) or text or "")
        orjson.dumps(value)  # no halves of characters, nothing deeper than a file holds
    except (ValueError, TypeError, RecursionError):
        return None
    return value


def code(text: str | None, language: str = "") -> str:
    """The last code block of a language, whatever it is called, or the last one without a language; "" if none."""
    names, found = TAGS.get(language, {language}), dict[str, str]()
    for said, inner, _, _ in fences(text or ""):
        found[language if said in names else said if language else ""] = f"{inner}\n" if inner else ""
    return found.get(language) or found.get("", "")


def parses(text: str | None) -> bool:
    """True if a text is a Python program; it is not run."""
    try:
        ast.parse(text or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text)


def final(text: str | None) -> str:
    r"""The final answer of a solution: in \boxed{}, or behind "the answer is"; "" if there is none."""
    return last_boxed(text or "") or final_answer(text or "") or ""


def in_box(asked: str | Sequence[Mapping[str, Any]]) -> Any:
    r"""A question, or messages with one, that asks for its final answer in \boxed{}, unless it names a box itself."""
    if not isinstance(asked, str):
        *before, last = template_messages(asked, "messages")
        return [*before, {**last, "content": in_box(last["content"])}]
    return asked if r"\boxed" in asked else f"{asked}\n\nPut the final answer in \\boxed{{}}."


def words(text: str | None) -> int:
    """Number of words; a character of a script without spaces is one."""
    return len(words_of(text or ""))


def mean(values: Iterable[Any]) -> float | None:
    """Mean of numbers and truth values, nulls left out; None of nothing."""
    known = [float(value) for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def majority(values: Iterable[Any], least: float = 1) -> Any:
    """The most frequent of the values, empty ones left out; None if two are, or fewer than `least` have it.

    Texts are compared without letter case, white space and punctuation at their ends.
    """
    given = [value for value in values if value not in (None, "")]
    counted = Counter(_plain(value) for value in given).most_common(2)
    tied = len(counted) == 2 and counted[0][1] == counted[1][1]
    if not counted or tied or counted[0][1] < least:
        return None
    return next(value for value in given if _plain(value) == counted[0][0])


def overlap(one: str | None, other: str | None) -> float:
    """Jaccard similarity of the word 3-grams of two texts, from 0 to 1."""
    first, second = _shingles(one or ""), _shingles(other or "")
    return len(first & second) / len(first | second) if first | second else 1.0


def language(text: str | None) -> str:
    """ISO 639-1 code of a text's language, by py3langid."""
    from nemo_ext.data.sft.filters.language import identifier

    return str(identifier().classify(text or "")[0])


def shuffled(values: Sequence[Any], *names: Any) -> list[Any]:
    """The values in an order that the names decide: choices | shuffled(seed, id)."""
    order = generator(0, *map(str, names)).permutation(len(values))
    return [values[place] for place in order]


def picked(values: Sequence[Any], *names: Any) -> Any:
    """One of the values, which the names decide."""
    return values[int(generator(0, *map(str, names)).integers(len(values)))]


def chance(name: Any, *names: Any) -> float:
    """A number from 0 to below 1, which the names decide: id | chance(seed, 'turns') < 0.1."""
    return uniform(0, *map(str, (name, *names)))


def within(low: float, high: float, *names: Any) -> int:
    """A whole number from `low` to `high`, which the names decide; small ones are as likely as large (log-uniform)."""
    share = generator(0, *map(str, names)).random()
    return round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))


def chat(
    asked: str | Sequence[Mapping[str, Any]],
    answer: str | None,
    reasoning: str | None = None,
    system: str | None = None,
) -> list[dict[str, Any]]:
    """Messages of a question, or of a conversation up to one, and its answer."""
    before = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(each) for each in asked]
    last = {"role": "assistant", "content": answer or ""} | ({"reasoning_content": reasoning} if reasoning else {})
    return [*([{"role": "system", "content": system}] if system else []), *before, last]


def piece(text: str, characters: int, *names: Any) -> str:
    """A contiguous part of a text of at most so many characters, from a place that the names decide to a space."""
    if len(text) <= characters:
        return text
    start = int(chance(*names) * (len(text) - characters))
    start = text.find(" ", start, start + characters // 4) + 1 or start
    part = text[start : start + characters]
    return part[: part.rfind(" ", characters // 2)] if " " in part[characters // 2 :] else part


def records(columns: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Rows of columns of the same length: {'text': texts, 'score': scores} | records."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def filled(first: Sequence[str], others: Sequence[str], words_wanted: int, avoid: str, *names: Any) -> list[str]:
    """Documents of about so many words in an order that the names decide: all of the first, and others as they fit.

    Args:
        first: documents that are taken.
        others: documents that may be, if they do not hold the text `avoid`, such as the answer.
        words_wanted: number of words.
        avoid: see there.
        names: what decides the order.
    """
    taken, size = list(first), sum(map(words, first))
    for other in others:
        if avoid.lower() in other.lower():
            continue
        if size + (more := words(other)) <= words_wanted and other not in taken:
            taken.append(other)
            size += more
    return shuffled(taken, *names)


def _plain(value: Any) -> Any:
    return normal(value) if isinstance(value, str) else value


def _shingles(text: str) -> set[tuple[str, ...]]:
    found = words_of(text)
    size = min(_SHINGLE, len(found))
    return {tuple(found[place : place + size]) for place in range(len(found) - size + 1)} if size else set()


TEMPLATES = Templates(
    filters={
        each.__name__: each
        for each in (
            *(
                tagged,
                all_tagged,
                number,
                json_of,
                code,
                parses,
                final,
                in_box,
                words,
                mean,
                majority,
                overlap,
                language,
            ),
            *(shuffled, picked, chance, within, chat, piece, records, filled, refuses, lines, unmasked),
        )
    }
)
