"""Filter of repetition: n-grams within a window or over the whole trajectory, or runs of one character pattern.

Nemotron 3 Nano, section 3.1.3: "We then aggressively filter reasoning traces exhibiting pathological repetition, such
as repeated n-grams within a sliding window or across the entire trajectory". The paper gives no numbers.
"""

from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.sft.filters.base import Drop, Filter, Texts
from nemo_ext.data.text.words import Hashes, words_of
from nemo_ext.job.settings import STRICT

_LONGEST_PERIOD = 8

Times = Annotated[int, Field(ge=2)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Repetition(Filter):
    """Filter of repeated, non-overlapping n-grams in the assistant's answers and reasoning. All numbers are (choice).

    Each tool call is judged separately, since all calls to a tool begin alike.

    Attributes:
        ngram: number of words in an n-gram.
        window: number of words in the window.
        window_times: number of occurrences of an n-gram within a window at which a sample is dropped; None to disable.
        trajectory_times: the same limit within all of the assistant's texts together, and within a single tool call.
        characters: length in bytes of a run of a pattern of at most 8 bytes at which a sample is dropped; None to
            disable.
    """

    name: ClassVar[str] = "repetition"
    ngram: PositiveInt = 12
    window: PositiveInt = 600
    window_times: Times | None = 6
    trajectory_times: Times | None = 20
    characters: Annotated[int, Field(ge=32)] | None = 400

    def __post_init__(self) -> None:
        if self.window_times is not None and self.window < self.ngram * self.window_times:
            raise ValueError(
                f"window={self.window} must be at least {self.ngram * self.window_times} words, as window_times="
                f"{self.window_times} n-grams of ngram={self.ngram} words must fit"
            )

    def drop(self, texts: Texts) -> Drop | None:
        if self.characters is not None:
            for index in texts.assistant + texts.calls:
                if (length := longest_run(texts.spoken[index].text, self.characters)) >= self.characters:
                    return Drop("repeated-characters", f"{length} bytes")
        rules = [("repeated-in-window", self.window_times, self.window), ("repeated", self.trajectory_times, None)]
        least = min((times for _, times, _ in rules if times), default=len(texts.words.hashes) + 1)
        for judged in (texts.assistant, *([call] for call in texts.calls)):
            if sum(len(texts.words.hashes_of(text)) for text in judged) < self.ngram * least:
                continue  # too short for that many
            grams, places = texts.words.ngrams(self.ngram, texts=judged)
            ordered = np.sort(grams)
            if not (ordered[least - 1 :] == ordered[: max(0, len(ordered) - least + 1)]).any():
                continue  # the usual case
            for reason, times, window in rules:
                place = repeated(grams, places, length=self.ngram, times=times, window=window) if times else None
                if times and place is not None:
                    words = [word for text in texts.spoken for word in words_of(text.text)]
                    within = f" within {window} words" if window else ""
                    return Drop(reason, f"{' '.join(words[place : place + self.ngram])!r} {times} times{within}")
        return None


def repeated(
    grams: Hashes, places: npt.NDArray[np.int64], *, length: int, times: int, window: int | None
) -> int | None:
    """Find the first n-gram that occurs `times` times without overlap; return its first word's index, or None.

    Args:
        grams: [n-grams] hashes.
        places: [n-grams] indices of their first words, ascending.
        window: maximum number of words from the start of the first to the end of the last occurrence; None for no
            limit.
    """
    if len(grams) <= length * (times - 1):
        return None
    order = np.argsort(grams, kind="stable")
    sorted_grams, at = grams[order], places[order]
    same = sorted_grams[times - 1 :] == sorted_grams[: 1 - times]
    if window is not None:
        same &= at[times - 1 :] - at[: 1 - times] <= window - length
    if not same.any():
        return None
    # From each place, jump `times - 1` times to the next non-overlapping occurrence; `axis` separates the n-grams.
    group = np.cumsum(np.concatenate([[0], sorted_grams[1:] != sorted_grams[:-1]]))
    axis = group * (int(places[-1]) + 2 * length) + at
    after = np.append(np.searchsorted(axis, axis + length), len(axis))
    reached = np.arange(len(axis))
    for _ in range(times - 1):
        reached = after[reached]
    inside = reached < len(axis)
    last = np.minimum(reached, len(axis) - 1)
    found = inside & (group[last] == group)
    if window is not None:
        found &= at[last] - at <= window - length
    return int(at[found].min()) if found.any() else None


def longest_run(text: str, least: int) -> int:
    """Return the length in bytes of the longest run of a pattern of at most 8 bytes; 0 if below `least`."""
    whole = text.encode()
    # A run of `least` bytes covers at least one of these places, where the next bytes repeat within a period.
    probes = range(0, len(whole) - _LONGEST_PERIOD, least // 2)
    ends = 2 * _LONGEST_PERIOD
    if not any(whole.find(whole[at : at + _LONGEST_PERIOD], at + 1, at + ends) >= 0 for at in probes):
        return 0
    data = np.frombuffer(whole, dtype=np.uint8)
    longest = 0
    for period in range(1, min(_LONGEST_PERIOD, len(data) - 1) + 1):
        breaks = np.flatnonzero(data[period:] != data[:-period])
        edges = np.concatenate([[-1], breaks, [len(data) - period]])
        run = int(np.diff(edges).max()) - 1
        longest = max(longest, run + period if run else 0)
    return longest if longest >= least else 0
