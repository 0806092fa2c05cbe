"""Checks that a response contains short answers such as codes, names and words, as RULER does (arXiv 2404.06654).

RULER scores the share of answers that occur anywhere. Here, listing everything or repeating the context does not pay
off, because responses must be short and naming known wrong answers lowers the score.
"""

import functools
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import checked, checked_whole
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict

MAX_CHARACTERS = 2000
"""Maximum length of an answer in characters."""


_MARKS = str.maketrans({"\u2010": "-", "\u2011": "-", "\u2212": "-", "\u2018": "'", "\u2019": "'", "\u02bc": "'"})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Strings that a correct response contains.

    Attributes:
        answers: the strings.
        all: whether all of them must occur, rather than just one.
        wrong: strings that a correct response must not contain.
        whole_words: whether an occurrence counts only if no letter or digit is adjacent to it.
    """

    answers: tuple[str, ...]
    all: bool = False
    wrong: tuple[str, ...] = ()
    whole_words: bool = True

    def __post_init__(self) -> None:
        for key in ("answers", "wrong"):
            if not all(map(normal, strings := getattr(self, key))):
                raise ValueError(f"reference.{key}={list(strings)!r}: expected non-empty strings")
        if not self.answers:
            raise ValueError("reference.answers=[]: expected at least one string")
        if both := set(map(normal, self.answers)) & set(map(normal, self.wrong)):
            raise ValueError(f"reference.wrong: {min(both)!r} is also in reference.answers; remove it from one of them")


def check(reference: Mapping[str, Any]) -> Reference:
    """Parse a task's reference: {answers: one string or a list, all: false, wrong: [strings], whole_words: true}.

    Raises:
        ValueError: the reference is invalid; the message names the key and the accepted values.
    """
    given: dict[str, JsonValue] = dict(reference)
    for key in ("answers", "wrong"):
        if isinstance(one := given.get(key), str):
            given[key] = [one]
    return checked(Reference, given, where="reference", strict=True)


def verify(response: Response, reference: Reference, *, max_characters: int = MAX_CHARACTERS) -> Verdict:
    """Return the verdict `correct` if the response contains the expected strings and no wrong ones.

    With `all`, the score is the number of expected strings found, divided by the number of expected strings plus the
    number of wrong ones found. A response of more than `max_characters` characters is wrong.
    """
    if not response.answer:
        return Verdict.wrong("no answer")
    if len(response.answer) > max_characters:
        return Verdict.wrong(f"too long: more than {max_characters} characters", response.answer[:200])
    text = normal(response.answer)
    answers = dict.fromkeys(map(normal, reference.answers))
    named = [wanted for wanted in answers if _occurs(wanted, text, reference.whole_words)]
    wrong = [
        wanted for wanted in dict.fromkeys(map(normal, reference.wrong)) if _occurs(wanted, text, reference.whole_words)
    ]
    shown = ", ".join(named + wrong)[:200] or None
    if not named:
        return Verdict.wrong("names a wrong answer" if wrong else "names no answer", shown)
    if not reference.all:
        return Verdict.wrong("also names a wrong answer", shown) if wrong else Verdict.correct(shown)
    score = len(named) / (len(answers) + len(wrong))
    if score == 1:
        return Verdict.correct(shown)
    return Verdict.wrong(
        f"names {len(named)} of {len(answers)} answers and {len(wrong)} wrong ones", shown, score=score
    )


def environment(*, max_characters: int = MAX_CHARACTERS) -> Environment:
    """Create the environment `contains`, for responses that must contain given strings.

    Args:
        max_characters: maximum length of an answer; longer ones are wrong.

    Raises:
        ValueError: a setting is out of range.
    """
    checked_whole("max_characters", max_characters, least=1)
    return Environment(name="contains", check=check, verify=functools.partial(verify, max_characters=max_characters))


def normal(text: str) -> str:
    """Normalize a string for comparison: case, character widths, quotes, dashes, commas in numbers and white space."""
    plain = _THOUSANDS.sub("", unicodedata.normalize("NFKC", text).translate(_MARKS))
    return " ".join(plain.casefold().split())


def _occurs(sought: str, text: str, whole_words: bool) -> bool:
    """Return whether `sought` occurs in `text`; both are normalized."""
    return bool(_pattern(sought).search(text)) if whole_words and sought in text else sought in text


@functools.lru_cache(maxsize=10_000)
def _pattern(sought: str) -> re.Pattern[str]:
    # No adjacent letter or digit (underscores are Markdown), and no longer number: 12 is not in 3.12 or 12.5.
    before, after = r"(?<![^\W_])", r"(?![^\W_])"
    if sought[:1].isdigit():
        before += r"(?<!\d[.,])(?<!(?<!\.)\.)(?<!(?<![^\W_])-)(?<![/^])"
    if sought[-1:].isdigit():
        after += r"(?![./^]\d)"
    return re.compile(before + re.escape(sought) + after)
