"""Short answers that must occur in a response: codes, names and words, as RULER (arXiv 2404.06654) scores them.

RULER counts the share of answers found anywhere. Here an answer that lists everything or repeats its context does not
win: it may not be long, and naming what is known to be wrong lowers the score.
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
"""Most characters of an answer."""


_MARKS = str.maketrans({"\u2010": "-", "\u2011": "-", "\u2212": "-", "\u2018": "'", "\u2019": "'", "\u02bc": "'"})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Texts that a right answer names.

    Attributes:
        answers: the texts.
        all: whether all of them must occur; else one of them.
        wrong: texts that a right answer does not name.
        whole_words: whether a text counts only where no letter or digit touches it.
    """

    answers: tuple[str, ...]
    all: bool = False
    wrong: tuple[str, ...] = ()
    whole_words: bool = True

    def __post_init__(self) -> None:
        for key in ("answers", "wrong"):
            if not all(map(normal, getattr(self, key))):
                raise ValueError(f"{key}: expected texts that are not empty")
        if not self.answers:
            raise ValueError("answers: expected one text at least")
        if both := set(map(normal, self.answers)) & set(map(normal, self.wrong)):
            raise ValueError(f"wrong: {min(both)!r} is an answer too")


def check(reference: Mapping[str, Any]) -> Reference:
    """Parse a task's reference: {answers: [texts] or one, all: false, wrong: [texts], whole_words: true}.

    Raises:
        ValueError: naming the key, what it holds and what it may hold.
    """
    given: dict[str, JsonValue] = dict(reference)
    for key in ("answers", "wrong"):
        if isinstance(one := given.get(key), str):
            given[key] = [one]
    return checked(Reference, given, where="reference", strict=True)


def verify(response: Response, reference: Reference, *, max_characters: int = MAX_CHARACTERS) -> Verdict:
    """Correct if the answer names what it should and nothing wrong.

    With `all`, the score is the number of right texts named, over that of all right texts and the wrong ones named.
    """
    if not response.answer:
        return Verdict.wrong("no answer")
    if len(response.answer) > max_characters:
        return Verdict.wrong(f"too long: more than {max_characters} characters", response.answer[:200])
    text = normal(response.answer)
    answers = dict.fromkeys(map(normal, reference.answers))
    found = [each for each in answers if _occurs(each, text, reference.whole_words)]
    wrong = [each for each in dict.fromkeys(map(normal, reference.wrong)) if _occurs(each, text, reference.whole_words)]
    shown = ", ".join(found + wrong)[:200] or None
    if not found:
        return Verdict.wrong("another answer" if wrong else "no answer is named", shown)
    if not reference.all:
        return Verdict.wrong("a wrong answer is named too", shown) if wrong else Verdict.correct(shown)
    score = len(found) / (len(answers) + len(wrong))
    if score == 1:
        return Verdict.correct(shown)
    return Verdict.wrong(f"{len(found)} of {len(answers)} named, and {len(wrong)} wrong ones", shown, score=score)


def environment(*, max_characters: int = MAX_CHARACTERS) -> Environment:
    """The environment `contains`.

    Args:
        max_characters: most characters of an answer; a longer one is wrong.

    Raises:
        ValueError: a setting out of range.
    """
    checked_whole("max_characters", max_characters, least=1)
    return Environment(name="contains", check=check, verify=functools.partial(verify, max_characters=max_characters))


def normal(text: str) -> str:
    """Form for comparing: no letter case, no widths of characters, plain marks, no commas in numbers, single spaces."""
    plain = _THOUSANDS.sub("", unicodedata.normalize("NFKC", text).translate(_MARKS))
    return " ".join(plain.casefold().split())


def _occurs(sought: str, text: str, whole_words: bool) -> bool:
    """Whether a text occurs in another, both in their normal form."""
    return bool(_pattern(sought).search(text)) if whole_words and sought in text else sought in text


@functools.lru_cache(maxsize=10_000)
def _pattern(sought: str) -> re.Pattern[str]:
    # No letter or digit beside it (an underscore is Markdown's), nor more of a number: 12 is not in 3.12 or 12.5.
    before, after = r"(?<![^\W_])", r"(?![^\W_])"
    if sought[:1].isdigit():
        before += r"(?<!\d[.,])(?<!(?<!\.)\.)(?<!(?<![^\W_])-)(?<![/^])"
    if sought[-1:].isdigit():
        after += r"(?![./^]\d)"
    return re.compile(before + re.escape(sought) + after)
