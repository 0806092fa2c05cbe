"""Checks of what a user wrote in a config: every message names the key, what it holds and what it may hold."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import cast


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of an error message on an unknown word: the nearest known one, and all of them."""
    known = sorted(words)
    close = difflib.get_close_matches(word, known, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(known)}"


def check_keys(config: Mapping[str, object], known: Sequence[str], *, required: Sequence[str], where: str) -> None:
    """Raises ValueError for a key that is not known, with the nearest one, or a required one that is not there."""
    for key in config:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}: {nearest(str(key), known)}")
    for key in required:
        if key not in config:
            raise ValueError(f"{where}: the key {key!r} is missing")


def checked_whole(name: str, value: object, *, least: int | None = None) -> int:
    """The value, if it is a whole number of at least `least`; else ValueError."""
    # False and True are ints, but nobody means 0 and 1 by them.
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return value
    raise ValueError(f"{name} must be a whole number{'' if least is None else f' of at least {least}'}, not {value!r}")


def checked_share(name: str, value: object, *, below_one: bool = False) -> float:
    """The value, if it is a number from 0 to 1; else ValueError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= cast(float, value) <= 1 and not (below_one and value == 1):
        return float(cast(float, value))
    raise ValueError(f"{name} must be a share from 0 to {'below ' if below_one else ''}1, not {value!r}")
