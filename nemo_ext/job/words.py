"""The nearest known word, for error messages on unknown ones. The standard library alone, as before an installation."""

import difflib
from collections.abc import Iterable


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of an error message on an unknown word: the nearest known one, and all of them."""
    known = sorted(words)
    return f"{did_you_mean(word, known)} known: {', '.join(known) or 'none'}".lstrip()


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The nearest known word as a question; empty if none is near. For words that are too many to name all."""
    close = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {close[0]!r}?" if close else ""
