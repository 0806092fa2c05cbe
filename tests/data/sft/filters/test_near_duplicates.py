from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.near_duplicates import NearDuplicates, Sketches, first_of_each

Make = Callable[..., Texts]
Prose = Callable[..., str]


def changed(text: str, share: float, seed: int) -> str:
    """The text with a share of its words replaced, in one block: similarity about (1 - share) / (1 + share)."""
    words = text.split()
    count = round(share * len(words))
    start = int(np.random.default_rng(seed).integers(0, len(words) - count))
    return " ".join(words[:start] + [f"new{seed}x{number}" for number in range(count)] + words[start + count :])


def test_only_similar_samples_are_found(texts: Make, prose: Prose) -> None:
    rule = NearDuplicates()
    base = [prose(200, seed) for seed in range(100)]
    near = [changed(text, 0.05, seed) for seed, text in enumerate(base)]  # similarity 0.87
    far = [changed(text, 0.25, seed) for seed, text in enumerate(base)]  # 0.58
    samples = [texts(text[: len(text) // 2], text[len(text) // 2 :]) for text in base + near + far]

    found = rule.duplicate_of(rule.sketch(samples))

    assert found[:100].tolist() == [-1] * 100
    assert np.mean(found[100:200] == np.arange(100)) > 0.9
    assert found[200:].tolist() == [-1] * 100


def test_sketches_do_not_depend_on_the_batch_and_texts_without_words_are_not_duplicates(
    texts: Make, prose: Prose
) -> None:
    rule = NearDuplicates()
    samples = [texts(prose(30, 1)), texts("!", "?"), texts("?", "!"), texts("hi", "ho"), texts("Hi!", "ho.")]

    whole = rule.sketch(samples)
    alone = Sketches.joined([rule.sketch([sample]) for sample in samples])

    assert np.array_equal(whole.bands, alone.bands)
    assert np.array_equal(whole.slots, alone.slots)
    assert rule.duplicate_of(whole).tolist() == [-1, -1, -1, -1, 3]
    assert rule.sketch([]).bands.shape == (0, 21)
    assert rule.duplicate_of(rule.sketch([])).tolist() == []


def test_the_first_is_kept(texts: Make, prose: Prose) -> None:
    rule = NearDuplicates()
    sketches = rule.sketch([texts(prose(50, seed)) for seed in (1, 2, 1, 2, 1)])

    assert rule.duplicate_of(sketches).tolist() == [-1, -1, 0, 1, 0]


def test_comparison_by_prompts_only(texts: Make, prose: Prose) -> None:
    samples = [texts(prose(50, 1), prose(90, 2)), texts(prose(50, 1), prose(90, 3))]

    assert NearDuplicates().duplicate_of(NearDuplicates().sketch(samples)).tolist() == [-1, -1]
    rule = NearDuplicates(prompts=True)
    assert rule.duplicate_of(rule.sketch(samples)).tolist() == [-1, 0]


@given(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), max_size=30))
def test_dropped_samples_are_similar_to_an_earlier_kept_one_and_kept_ones_are_not(rows: list[list[int]]) -> None:
    # Bands are parts of the slots, so all samples with an equal part are compared.
    rule = NearDuplicates(slots=16, rows=4, threshold=0.5)
    slots = np.repeat(np.array(rows, dtype=np.uint8).reshape(-1, 4), 4, axis=1)
    bands = (np.array(rows, dtype=np.uint32).reshape(-1, 4) + 1) * np.uint32(5)

    found = rule.duplicate_of(Sketches(bands, slots))

    least = 0.5 + 0.5 / 256

    def alike(one: int, other: int) -> bool:
        return bool((slots[one] == slots[other]).mean() >= least)

    kept = np.flatnonzero(found < 0).tolist()
    for sample in np.flatnonzero(found >= 0).tolist():
        original = int(found[sample])
        assert found[original] == -1
        assert original < sample
        assert alike(original, sample)
    assert not any(alike(one, other) for one in kept for other in kept if one < other)


def test_very_many_identical_samples_are_compared_with_the_first_only() -> None:
    rule = NearDuplicates()
    sketches = Sketches(np.full((50_000, 21), 7, np.uint32), np.zeros((50_000, 128), np.uint8))

    assert rule.duplicate_of(sketches).tolist() == [-1] + [0] * 49_999


@given(st.lists(st.integers(0, 9), max_size=30))
def test_first_ids(ids: list[int]) -> None:
    first = first_of_each(np.array(ids, dtype=np.uint64)).tolist()

    assert first == [ids.index(number) for number in ids]


def agent(number: int, *, system: str, query: str, answer: str = "done", words: int = 40) -> Texts:
    """A question, a call, a tool's answer and an answer; question and answer are the same in all samples."""
    call = ToolCall(name="sql", arguments={"query": query})
    shared = " ".join(f"shared{place}" for place in range(words))
    messages = [Message(role="system", content=system)] if system else []
    messages += [Message(role="user", content=f"please answer {shared}"), Message(role="assistant", tool_calls=(call,))]
    messages += [Message(role="tool", content=answer), Message(role="assistant", content="Here it is.")]
    return Texts(Sample(id=str(number), messages=tuple(messages)))


def test_calls_tools_answers_and_system_messages_distinguish_samples(prose: Prose) -> None:
    rule, calls = NearDuplicates(), [prose(30, seed) for seed in range(20)]
    same = [agent(n, system="Be brief.", query=calls[0]) for n in range(2)]
    by_call = [agent(n, system="Be brief.", query=calls[n]) for n in range(20)]
    by_answer = [agent(n, system="Be brief.", query="select 1", answer=calls[n]) for n in range(20)]
    by_system = [agent(n, system=f"You are agent {n}.", query=calls[0]) for n in range(20)]

    assert rule.duplicate_of(rule.sketch(same)).tolist() == [-1, 0]
    for samples in (by_call, by_answer, by_system):
        assert rule.duplicate_of(rule.sketch(samples)).tolist() == [-1] * 20


def test_a_long_shared_system_message_makes_no_samples_similar(prose: Prose) -> None:
    rule, system = NearDuplicates(), prose(3000, 99)

    samples = [agent(n, system=system, query=prose(30, n), words=5) for n in range(20)]

    assert rule.duplicate_of(rule.sketch(samples)).tolist() == [-1] * 20


def test_more_rows_than_slots_are_refused() -> None:
    with pytest.raises(ValueError, match=r"near_duplicates\.rows=40 must be at most near_duplicates\.slots=32"):
        NearDuplicates(slots=32, rows=40)
