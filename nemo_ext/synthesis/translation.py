"""Line-by-line translation: masks code, XML, LaTeX and addresses, which must not be translated, and restores them.

Nemotron 3 Nano, section 3.1.2 (multilingual): "translates inputs line-by-line and skips non-translatable content like
code, XML tags, URLs".
"""

import re
from collections.abc import Sequence
from typing import Any

_FENCE = re.compile(r"(`{3,}|~{3,})([^`]*)$")
_SET_OFF = (("$$", "$$"), ("\\[", "\\]"))
_ASIDE = re.compile(
    r"`[^`\n]+`|\$\$[^$\n]+\$\$|\$(?!\s)[^$\n]*[^$\s\n]\$(?!\d)|\\\(.{0,500}?\\\)|\\\[.{0,500}?\\\]"
    r"|</?[A-Za-z][^<>\n]*>|\bhttps?://[^\s<>\"')\]]*[^\s<>\"')\].,;:!?]|\b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+"
    r"|\\[A-Za-z]+(?:\{[^{}\n]*\})+|\\[A-Za-z]+"
)
_PREFIX = re.compile(r"\s*(?:(?:[-*+>]|#{1,6}|\d{1,3}[.)])\s+)*")
"""Markdown markers of lists, headings and quotations at the start of a line."""
_MODE = re.compile(r"\s*(?:(?:detailed )?thinking (?:on|off)|/(?:no_)?think)\s*", re.IGNORECASE)
_MARK = re.compile(r"\u27e6(\d+)\u27e7")


def lines(text: str) -> list[dict[str, Any]]:
    """Split a string into lines, each as {line, masked, aside, translate, closed}.

    `masked` is the line with a mark (a number in double brackets) for each untranslatable fragment; `aside` lists the
    fragments. `translate` is false in code blocks and displayed formulas, for lines that switch the reasoning mode, and
    for lines without letters outside `aside`. `closed` is false for all lines if any block is left open.
    """
    entries, state = [], _Block()
    for line in text.split("\n"):
        inside = state.takes(line) or _MODE.fullmatch(line) is not None
        taken = _MARK.search(line) is not None  # marks in the text itself would be ambiguous
        start = _prefix(line)
        masked, aside = (line, []) if inside or taken else _masked(line[start:])
        translate = not inside and not taken and any(map(str.isalpha, _MARK.sub("", masked)))
        entries.append({"line": line, "masked": masked.strip(), "aside": aside, "translate": translate})
    return [{**entry, "closed": not state.open} for entry in entries]


class _Block:
    """State of the line parser: in a code block, in a displayed formula, or in neither."""

    def __init__(self) -> None:
        self._fence, self._end, self._depth = "", "", 0

    @property
    def open(self) -> bool:
        """Whether the parser is inside a block."""
        return bool(self._fence or self._end or self._depth)

    def takes(self, line: str) -> bool:
        """Advance by a line, and return whether the line belongs to a block, including its first and last line."""
        text = line.strip()
        mark = _FENCE.match(text)
        if self._fence:
            if mark and mark[1].startswith(self._fence) and not mark[2].strip():
                self._fence = ""
            return True
        if self._end:
            self._end = "" if self._end in text else self._end
            return True
        steps = text.count("\\begin{") - text.count("\\end{")
        if self._depth or (text.startswith("\\begin{") and steps):
            self._depth = max(0, self._depth + steps)
            return True
        if mark:
            self._fence = mark[1]
            return True
        for begin, end in _SET_OFF:
            if text.startswith(begin) and end not in text[len(begin) :]:
                self._end = end
                return True
        return False


def _masked(text: str) -> tuple[str, list[str]]:
    """Return the string with numbered marks in place of untranslatable fragments, and the list of these fragments."""
    aside: list[str] = []

    def put(piece: re.Match[str]) -> str:
        aside.append(piece.group())
        return f"\u27e6{len(aside) - 1}\u27e7"

    return _ASIDE.sub(put, text), aside


def _prefix(line: str) -> int:
    match = _PREFIX.match(line)
    return match.end() if match else 0


def unmasked(text: str, line: str, aside: Sequence[str]) -> str | None:
    """Restore a translated line's fragments, prefix and whitespace; return None if marks or table bars do not match.

    Args:
        text: translation of the masked line.
        line: the original line.
        aside: the fragments of the original line.
    """
    text = text.strip()
    marks = sorted(int(number) for number in _MARK.findall(text))
    if marks != list(range(len(aside))) or "\n" in text or not text:
        return None
    after = len(line) - len(line.rstrip())
    whole = line[: _prefix(line)] + _MARK.sub(lambda mark: aside[int(mark[1])], text) + (line[-after:] if after else "")
    return whole if whole.count("|") == line.count("|") else None
