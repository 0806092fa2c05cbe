"""Jinja filters for the templates and expressions in recipes: pure functions, without access to files or network.

They can only be used as filters (`answer | tagged('score')`), because rows may have columns with the same names.
"""

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
from nemo_ext.rl.answers import final_answer, last_boxed, normal
from nemo_ext.rl.verifiers import structured_output
from nemo_ext.rl.verifiers.refusal import refuses
from nemo_ext.synthesis.source_code import code, code_blocks, lean_excluded, lint_score, parses
from nemo_ext.synthesis.translation import lines, unmasked

_MARK = re.compile(r"#{1,6}|={2,6}")
_TO_THE_END = 7
"""Level of a heading without markup, which is above all levels with markup."""
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_SHINGLE = 3


def tagged(text: str | None, name: str) -> str:
    """Return the content of the last <name>...</name>, without surrounding whitespace; "" if there is none."""
    return (all_tagged(text, name) or [""])[-1]


def all_tagged(text: str | None, name: str) -> list[str]:
    """Return the contents of all <name>...</name>, without surrounding whitespace."""
    tag = re.escape(name)
    return [inner.strip() for inner in re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text or "", re.DOTALL)]


def number(text: str | None) -> float | None:
    """Return the first number in a string; None if there is none."""
    match = _NUMBER.search(text or "")
    return float(match.group()) if match else None


def json_of(text: str | None) -> Any:
    """Parse JSON from a string's last code block, else from the whole string; None if it is invalid.

    Valid JSON that cannot be stored in a row (lone surrogates, excessive nesting) also gives None.
    """
    try:
        value = strict_json(code(text) or text or "")
        orjson.dumps(value)  # no lone surrogates, no excessive nesting
    except (ValueError, TypeError, RecursionError):
        return None
    return value


def valid_schema(schema: Any) -> bool:
    """Whether a value is a JSON schema that the environment `structured_output` accepts."""
    try:
        structured_output.check({"schema": schema})
    except ValueError:
        return False
    return True


def final(text: str | None) -> str:
    r"""Return a solution's final answer, from \boxed{} or after "the answer is"; "" if there is none."""
    return last_boxed(text or "") or final_answer(text or "") or ""


def in_box(asked: str | Sequence[Mapping[str, Any]]) -> Any:
    r"""Append a request for the final answer in \boxed{} to a question or to the last message, unless it has one."""
    if not isinstance(asked, str):
        *before, last = template_messages(asked, "messages")
        return [*before, {**last, "content": in_box(last["content"])}]
    return asked if r"\boxed" in asked else f"{asked}\n\nPut the final answer in \\boxed{{}}."


def without_sections(text: str, *names: str) -> str:
    """Remove the sections with these headings, as Markdown (`## Notes`), wiki text (`== Notes ==`) or a line alone.

    A section ends before the next Markdown or wiki heading of the same or a higher level. If its own heading is a line
    alone, it ends before any such heading.
    """
    kept, level = list[str](), 0
    for line in text.splitlines(keepends=True):
        heading = line.strip()
        mark = match.group() if (match := _MARK.match(heading)) else ""
        title = heading.removeprefix(mark).rstrip("=").strip()
        if mark and len(mark) <= level:
            level = 0
        if not level and title.lower() in map(str.lower, names):
            level = len(mark) if mark else _TO_THE_END
        if not level:
            kept.append(line)
    return "".join(kept)


def words(text: str | None) -> int:
    """Count the words; in scripts without spaces, each character counts as a word."""
    return len(words_of(text or ""))


def mean(values: Iterable[Any]) -> float | None:
    """Return the mean of numbers and booleans, ignoring nulls; None if there are none."""
    known = [float(value) for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def majority(values: Iterable[Any], least: float = 1) -> Any:
    """Return the most frequent non-empty value; None in a tie, or if it occurs fewer than `least` times.

    Strings are compared without letter case, LaTeX fonts, extra whitespace and a final period.
    """
    votes = [value for value in values if value not in (None, "")]
    counted = Counter(_plain(value) for value in votes).most_common(2)
    tied = len(counted) == 2 and counted[0][1] == counted[1][1]
    if not counted or tied or counted[0][1] < least:
        return None
    return next(value for value in votes if _plain(value) == counted[0][0])


def overlap(one: str | None, other: str | None) -> float:
    """Return the Jaccard similarity of two strings' word 3-grams, from 0 to 1."""
    first, second = _shingles(one or ""), _shingles(other or "")
    return len(first & second) / len(first | second) if first | second else 1.0


def language(text: str | None) -> str:
    """Detect a string's language with py3langid; return its ISO 639-1 code."""
    from nemo_ext.data.sft.filters.language import identifier

    return str(identifier().classify(text or "")[0])


def shuffled(values: Sequence[Any], *names: Any) -> list[Any]:
    """Return the values in a random order, seeded by `names`: choices | shuffled(seed, id)."""
    order = generator(0, *map(str, names)).permutation(len(values))
    return [values[place] for place in order]


def picked(values: Sequence[Any], *names: Any) -> Any:
    """Draw one of the values at random, seeded by `names`."""
    return values[int(generator(0, *map(str, names)).integers(len(values)))]


def chance(name: Any, *names: Any) -> float:
    """Draw a random number from [0, 1), seeded by `name` and `names`: id | chance(seed, 'turns') < 0.1."""
    return uniform(0, *map(str, (name, *names)))


def within(low: float, high: float, *names: Any) -> int:
    """Draw a log-uniform random integer from `low` to `high`, seeded by `names`."""
    share = generator(0, *map(str, names)).random()
    return round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))))


def chat(
    asked: str | Sequence[Mapping[str, Any]],
    answer: str | None,
    reasoning: str | None = None,
    system: str | None = None,
) -> list[dict[str, Any]]:
    """Return the messages of a question, or of a conversation that ends in one, followed by its answer.

    `reasoning` is added to the answer's message, and `system` becomes the first message; both may be empty.
    """
    before = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(each) for each in asked]
    last = {"role": "assistant", "content": answer or ""} | ({"reasoning_content": reasoning} if reasoning else {})
    return [*([{"role": "system", "content": system}] if system else []), *before, last]


def piece(text: str, characters: int, *names: Any) -> str:
    """Return an excerpt of at most `characters` characters, cut between words, at a random place seeded by `names`."""
    if len(text) <= characters:
        return text
    start = int(chance(*names) * (len(text) - characters))
    start = text.find(" ", start, start + characters // 4) + 1 or start
    part = text[start : start + characters]
    return part[: part.rfind(" ", characters // 2)] if " " in part[characters // 2 :] else part


def records(columns: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Convert columns of equal length to a list of rows: {'text': texts, 'score': scores} | records."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def filled(first: Sequence[str], others: Sequence[str], words_wanted: int, avoid: str, *names: Any) -> list[str]:
    """Return documents in random order: all of `first`, and those of `others` that fit into `words_wanted` words.

    Args:
        first: documents that are always included.
        others: candidates for the remaining words, tried in order.
        words_wanted: maximum total number of words, unless `first` alone has more.
        avoid: string such as the answer; candidates that contain it are excluded.
        names: seed of the order.
    """
    selected, size = list(first), sum(map(words, first))
    for other in others:
        if avoid.lower() in other.lower():
            continue
        if size + (more := words(other)) <= words_wanted and other not in selected:
            selected.append(other)
            size += more
    return shuffled(selected, *names)


def _plain(value: Any) -> Any:
    return normal(value) if isinstance(value, str) else value


def _shingles(text: str) -> set[tuple[str, ...]]:
    sequence = words_of(text)
    size = min(_SHINGLE, len(sequence))
    return {tuple(sequence[place : place + size]) for place in range(len(sequence) - size + 1)} if size else set()


TEMPLATES = Templates(
    filters={
        function.__name__: function
        for function in (
            *(tagged, all_tagged, number, json_of, code, code_blocks, parses, lint_score, final, in_box, words, mean),
            *(
                majority,
                lean_excluded,
                overlap,
                valid_schema,
                without_sections,
                language,
                shuffled,
                picked,
                chance,
                within,
                chat,
                piece,
                records,
                filled,
                refuses,
                lines,
                unmasked,
            ),
        )
    }
)
