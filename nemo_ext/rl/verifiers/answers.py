r"""Where in a response its answer stands: \boxed{}s, "the answer is" and choices. All in linear time."""

import re
import unicodedata
from collections.abc import Mapping

MAX_CHOICE = 10_000
"""Longest text that is taken for a choice, in characters."""

# One pass over the tokens that matter; an escaped character is none of them.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_MARKER = re.compile(
    r"(?:\banswer|\bchoice|\boption(?:[ \t]selected)?)[*_]{0,3}[ \t]*(?::|=|\bis\b)[*_]{0,3}:?|####", re.IGNORECASE
)
_WRAPPERS = ("text", "textbf", "textit", "mathrm", "mathbf", "mathit", "mbox", "rm", "bf")
_WRAPPED = re.compile(rf"\\(?:{'|'.join(_WRAPPERS)})\s*\{{([^{{}}]*)\}}")
_PAIRS = {"(": ")", "[": "]", "{": "}", "$": "$", '"': '"', "`": "`"}
_LETTERED = re.compile(r"[(\[]?([A-Za-z])[)\]]?[.:,\-\u2013]?\s+(\S.*)|([A-Za-z])[).:](\S.*)", re.DOTALL)


def boxes(text: str) -> list[tuple[int, int]]:
    r"""Where the contents of the \boxed{}s begin and end, by their ends; a box in a box comes before the outer one.

    Braces must balance, escaped ones (`\{`) aside; a box that does not close is none.
    """
    found, open_braces = [], []
    for token in _BRACES.finditer(text):
        mark = token.group()
        if mark.startswith(r"\boxed"):
            open_braces.append(token.end())
        elif mark == "{":
            open_braces.append(-1)
        elif mark == "}" and open_braces:
            begin = open_braces.pop()
            if begin >= 0:
                found.append((begin, token.start()))
    return found


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, with any boxes in it; None if there is none."""
    found = boxes(text)
    return text[slice(*found[-1])].strip() if found else None


def final_answer(text: str) -> str | None:
    """What follows the last "answer is", "Answer:", "Choice:", "Option selected:" or "####", to its sentence's end.

    None where there is no such phrase or nothing behind it.
    """
    end = None
    for marker in _MARKER.finditer(text):
        end = marker.end()
    if end is None:
        return None
    lines = text[end:].strip().split("\n", 1)
    sentence = lines[0].split(". ", 1)[0]
    return sentence.strip().strip("*_").strip().removesuffix(".").strip() or None


def bare(text: str) -> str | None:
    """The text itself if it is one line, without a full stop; else None."""
    stripped = text.strip().removesuffix(".").strip()
    return stripped if stripped and "\n" not in stripped else None


def unreadable(text: str) -> str | None:
    """Why a text is none that a person would write as an answer; None if it may be one.

    Control characters, halves of surrogate pairs, and digits other than 0 to 9, which Python would read as numbers.
    """
    if text.isascii() and text.isprintable():
        return None
    for character in text:
        kind = unicodedata.category(character)
        if kind == "Nd" and not character.isascii():
            return "digits other than 0 to 9"
        if kind in ("Cc", "Cf", "Cs", "Co", "Cn") and character not in "\t\n\r":
            return "characters that cannot be read"
    return None


def named_choices(text: str, choices: Mapping[str, str | None]) -> set[str]:
    """The letters of all choices that a text names, by letter, by text or by both ("B. Paris").

    Args:
        text: an answer alone: what a box holds or what follows "Answer:".
        choices: the text of each letter; None where it is not known.
    """
    if len(text) > MAX_CHOICE:
        return set()
    inner = _unwrap(text)
    # An upper-case letter is a choice's, whatever the choices' texts are.
    if len(inner) == 1 and inner in choices:
        return {inner}
    named = _by_text(inner, choices)
    if len(inner) == 1 and inner.isascii() and inner.upper() in choices:
        return named | {inner.upper()}
    lettered = _LETTERED.fullmatch(inner)
    if lettered and not named:
        letter = (lettered[1] or lettered[3]).upper()
        described = _by_text(_unwrap(lettered[2] or lettered[4]), choices)
        return {letter} | described if letter in choices and described else set()
    return named


def normal(text: str) -> str:
    """For comparing choices: without letter case, LaTeX's fonts and differences in white space."""
    return " ".join(_WRAPPED.sub(r"\1", text).casefold().split()).removesuffix(".").strip()


def _by_text(text: str, choices: Mapping[str, str | None]) -> set[str]:
    sought = normal(text)
    return {letter for letter, choice in choices.items() if choice is not None and sought and normal(choice) == sought}


def _unwrap(text: str) -> str:
    """Without fonts, brackets and punctuation around the whole."""
    inner = _WRAPPED.sub(r"\1", text).strip()
    while inner:
        before = inner
        inner = inner.strip("*_ \t\r\n").removesuffix(".").removesuffix(":").strip()
        if len(inner) > 1 and _PAIRS.get(inner[0]) == inner[-1] and inner[0] not in inner[1:-1]:
            inner = inner[1:-1].strip()
        elif inner.startswith("{{") and inner.endswith("}}"):
            inner = inner[1:-1]
        if inner == before:
            break
    return inner
