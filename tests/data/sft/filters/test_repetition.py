from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_ext.chat.sample import Sample
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.repetition import Repetition, longest_run, repeated
from nemo_ext.data.text.words import ngram_hashes

Make = Callable[..., Sample]
Prose = Callable[..., str]


def test_a_loop_in_a_window_is_found_and_shown(texts: Callable[..., Texts], prose: Prose) -> None:
    loop = "but wait let me check the sum of the first two terms again "
    trace = prose(300) + " " + loop * 6 + prose(300, 1)

    dropped = Repetition().drop(texts("q", "a", trace))

    assert dropped is not None
    assert dropped.reason == "repeated-in-window"
    assert dropped.detail == "'but wait let me check the sum of the first two terms' 6 times within 600 words"
    assert Repetition(window_times=7, trajectory_times=None).drop(texts("q", "a", trace)) is None


def test_repetition_over_the_trajectory_counts_all_messages(chat: Make, prose: Prose) -> None:
    again = " the answer must be an even number greater than two but smaller than nine "
    trace = "".join(prose(700, seed) + again for seed in range(12))
    answer = "".join(prose(700, seed + 50) + again for seed in range(8))

    assert Repetition().reason(chat("q", answer, trace)) == "repeated"
    assert Repetition().reason(chat("q", "a", trace)) is None
    assert Repetition(trajectory_times=21).reason(chat("q", answer, trace)) is None
    assert Repetition().reason(chat(answer + trace, "a")) is None  # the user may


def test_a_text_that_consists_of_the_repetition(chat: Make) -> None:
    rule = Repetition(ngram=3, window=9, window_times=3)

    assert rule.reason(chat("q", "one two three " * 3)) == "repeated-in-window"
    assert rule.reason(chat("q", "one two three " * 2)) is None


def test_characters_in_a_row(chat: Make) -> None:
    rule = Repetition()

    assert rule.reason(chat("q", "so " + "!" * 400)) == "repeated-characters"
    assert rule.reason(chat("q", "哈哈" * 70)) == "repeated-characters"
    assert rule.reason(chat("q", "-" * 399)) is None
    assert Repetition(characters=None).reason(chat("q", "!" * 400)) is None


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="window=20 must be at least 36 words, as window_times=3 n-grams of ngram=12"):
        Repetition(window=20, window_times=3)


def occurs(words: list[int], length: int, times: int, window: int) -> set[int]:
    """Starts of n-grams that occur often enough, by exhaustive search."""
    found = set()
    for start in range(len(words) - length + 1):
        gram, place, count = words[start : start + length], start, 0
        while place + length <= min(len(words), start + window):
            if words[place : place + length] == gram:
                count, place = count + 1, place + length
            else:
                place += 1
        if count >= times:
            found.add(start)
    return found


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 3),
    st.integers(2, 4),
    st.one_of(st.none(), st.integers(3, 30)),
)
@example([0, 0, 0, 0, 1, 0, 0], 2, 3, 6)  # three in a window that overlap, and a third that does not is beyond it
def test_repetition_agrees_with_exhaustive_search(
    words: list[int], length: int, times: int, window: int | None
) -> None:
    grams = ngram_hashes(np.array(words, dtype=np.uint64), length)

    found = repeated(grams, np.arange(len(grams)), length=length, times=times, window=window)

    expected = occurs(words, length, times, window or 10**9)
    assert found == (min(expected) if expected else None)


@given(st.text("ab", max_size=12), st.integers(0, 60), st.text("abc", max_size=60), st.integers(32, 64))
def test_runs_agree_with_exhaustive_search(pattern: str, times: int, text: str, least: int) -> None:
    data = text[:20] + pattern * times + text[20:]
    longest = 0
    for period in range(1, 9):
        for start in range(len(data) - period):
            end = start
            while end + period < len(data) and data[end] == data[end + period]:
                end += 1
            longest = max(longest, end - start + period if end > start else 0)

    assert longest_run(data, least) == (longest if longest >= least else 0)
