"""Suggestions for unknown words in error messages. Standard library only, so that it works before installation."""

import difflib
from collections.abc import Iterable


def nearest(word: str, words: Iterable[str]) -> str:
    """End of an error message about an unknown word: the nearest known word as a question, and all known words."""
    known = sorted(words)
    return f"{did_you_mean(word, known)} known: {', '.join(known) or 'none'}".lstrip()


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Nearest known word as a question, or "" if none is near; for lists of words that are too long to show."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else ""
