r"""Verifier for multiple choice: one choice must be named by letter or text, in \boxed{}, after "Answer:" or alone."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nemo_ext.chat.response import Response
from nemo_ext.job.settings import check_keys, nearest
from nemo_ext.rl.answers import MAX_CHOICE, bare, boxes, final_text, named_choices, named_in_sentences, normal
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict

Format = Literal["any", "boxed", "text", "letter"]
MAX_CHOICES = len(string.ascii_uppercase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    r"""Correct choice, and the format of the response's answer.

    Attributes:
        answer: letter of the correct choice.
        choices: mapping from letters to texts; None if a text is unknown because only the number of choices is given.
        format: where the response names its choice: `boxed`, in \boxed{}; `text`, after the last "Answer:" or "answer
            is"; `letter`, in \boxed{} and only by its letter, as in NeMo Gym's strict_single_letter_boxed; `any`, in
            \boxed{} if there is a box, else after "Answer:", else anywhere in a one-line answer.
    """

    answer: str
    choices: Mapping[str, str | None]
    format: Format = "any"


def check(reference: Mapping[str, Any]) -> Reference:
    """Parse a task's reference: {answer: "B", choices: a list of texts or their number, format: any}.

    Raises:
        ValueError: the reference is invalid; the message names the key and the accepted values.
    """
    check_keys(reference, ("answer", "choices", "format"), required=("answer", "choices"), where="reference")
    choices, form = reference["choices"], reference.get("format", "any")
    number = choices if isinstance(choices, int) and not isinstance(choices, bool) else None
    if number is None and isinstance(choices, list | tuple) and all(isinstance(text, str) for text in choices):
        number = len(choices)
    if number is None or not 2 <= number <= MAX_CHOICES:
        shown = repr(choices)[:200]
        raise ValueError(f"reference.choices={shown}: expected a list of 2 to {MAX_CHOICES} strings, or their number")
    letters = string.ascii_uppercase[:number]
    texts: list[str | None] = [None] * number if isinstance(choices, int) else list(choices)
    if empty := [letter for letter, text in zip(letters, texts, strict=True) if text is not None and not text.strip()]:
        raise ValueError(f"reference.choices: choice {empty[0]} must not be empty")
    for letter, text in zip(letters, texts, strict=True):
        if text is not None and len(text) > MAX_CHOICE:
            raise ValueError(
                f"reference.choices: choice {letter} must have at most {MAX_CHOICE} characters, not {len(text)}"
            )
    normals = [normal(text) for text in texts if text is not None]
    if len(set(normals)) < len(normals):
        raise ValueError(f"reference.choices={repr(choices)[:200]}: two choices are the same; make them distinct")
    answer = reference["answer"]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
        raise ValueError(f"reference.answer={answer!r}: expected a letter from {letters[0]} to {letters[-1]}")
    if form not in get_args(Format):
        raise ValueError(f"reference.format: unknown format {form!r}: {nearest(str(form), get_args(Format))}")
    return Reference(answer=answer, choices=dict(zip(letters, texts, strict=True)), format=form)


def verify(response: Response, reference: Reference) -> Verdict:
    """Return the verdict `correct` if the response names the correct choice and no other.

    All boxes must name the same choice.
    """
    text, form = response.answer, reference.format
    if not text:
        return Verdict.wrong("no answer")
    # "" means no text; None, an unknown text, would allow any text after the letter.
    choices = dict.fromkeys(reference.choices, "") if form == "letter" else reference.choices
    candidates = [] if form == "text" else [(content, named_choices(content, choices)) for content in _boxed(text)]
    if not candidates and form in ("any", "text"):
        if final := final_text(text):
            candidates = [(final, named_in_sentences(final, choices))]
        elif form == "any" and (line := bare(text)):
            candidates = [(line, named_choices(line, choices))]
    if not candidates:
        return Verdict.wrong(f"no answer in the format {form}")
    named: set[str] = set()
    for content, letters in candidates:
        if not letters:
            return Verdict.wrong("no choice is named", content.strip()[:200])
        named |= letters
    if len(named) > 1:
        return Verdict.wrong("more than one choice is named", ", ".join(sorted(named)))
    (letter,) = named
    return Verdict.correct(letter) if letter == reference.answer else Verdict.wrong("different choice", letter)


def environment() -> Environment:
    """Create the environment `multiple_choice`, for questions with lettered choices."""
    return Environment(name="multiple_choice", check=check, verify=verify)


def _boxed(text: str) -> list[str]:
    """Return the contents of all boxes that are not inside another box; a box that contains another names no choice."""
    outer: list[tuple[int, int]] = []
    for begin, end in boxes(text):
        while outer and outer[-1][0] > begin:
            outer.pop()
        outer.append((begin, end))
    return [text[begin : min(end, begin + MAX_CHOICE + 1)] for begin, end in outer]
