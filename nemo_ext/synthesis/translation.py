"""Texts in lines, and lines with marks in place of what is not to be translated: code, XML, LaTeX, addresses.

Nemotron 3 Nano, section 3.1.2 (multilingual): "translates inputs line-by-line and skips non-translatable content like
code, XML tags, URLs".
"""

import itertools
import re
from collections.abc import Sequence
from typing import Any

_FENCE = re.compile(r"\s*(```|~~~)")
_MATH_OPENS, _MATH_CLOSES = re.compile(r"\s*(\$\$|\\\[|\\begin\{)"), re.compile(r"(\$\$|\\\]|\\end\{[^}]*\})\s*$")
_ASIDE = re.compile(
    r"`[^`\n]+`|\$\$[^$\n]+\$\$|\$[^$\n]*[^$\s\n]\$|\\\(.*?\\\)|\\\[.*?\\\]"
    r"|</?[A-Za-z][^<>\n]*>|\bhttps?://[^\s<>\"')\]]*[^\s<>\"')\].,;:!?]|\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
    r"|\\[A-Za-z]+(?:\{[^{}\n]*\})+|\\[A-Za-z]+"
)
_MARK = re.compile(r"\u27e6(\d+)\u27e7")


def lines(text: str) -> list[dict[str, Any]]:
    """The lines of a text, each as {line, masked, aside, translate}.

    `masked` has a mark (a number in double brackets) for each piece of `aside`. `translate` is false for lines of code
    blocks and displayed formulas, and for those without a letter outside `aside`.
    """
    made, fence, formula = [], "", False
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        inside = bool(fence) or formula
        if mark and not formula:
            fence = "" if fence == mark[1] else fence or mark[1]
            inside = True
        elif not fence and (formula or _MATH_OPENS.match(line)):
            opened = _MATH_OPENS.match(line)
            rest = line[opened.end() :] if opened and not formula else line
            inside, formula = True, not _MATH_CLOSES.search(rest)
        taken = _MARK.search(line) is not None  # a mark of its own could not be told apart
        aside = [] if inside or taken else [found.group() for found in _ASIDE.finditer(line)]
        marks = (f"\u27e6{number}\u27e7" for number in itertools.count())
        masked = _ASIDE.sub(lambda _, marks=marks: next(marks), line) if aside else line  # type: ignore[misc]
        plain = _MARK.sub("", masked)
        made.append(
            {
                "line": line,
                "masked": masked.strip(),
                "aside": aside,
                "translate": not inside and not taken and any(map(str.isalpha, plain)),
            }
        )
    return made


def unmasked(text: str, line: str, aside: Sequence[str]) -> str | None:
    """A translated line with its pieces put back, and the white space around the line; None if a mark is amiss.

    Args:
        text: translation of the masked line.
        line: the line before.
        aside: its pieces.
    """
    text = text.strip()
    if sorted(int(number) for number in _MARK.findall(text)) != list(range(len(aside))) or "\n" in text or not text:
        return None
    whole = _MARK.sub(lambda mark: aside[int(mark[1])], text)
    before, after = len(line) - len(line.lstrip()), len(line) - len(line.rstrip())
    return line[:before] + whole + (line[-after:] if after else "")
