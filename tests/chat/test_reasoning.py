import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.reasoning import (
    Control,
    ReasoningReport,
    ReasoningSettings,
    mode_of,
    moves_to_share,
    stripped,
)
from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.chat.template import Template
from nemo_ext.data.sft.masks import ChatEncoder
from nemo_ext.data.text.tokenizers import ByteTokenizer

NOTHING = ReasoningSettings(strip=0, truncate=0)


def chat(name: str, *, trace: str | None = "trace", answer: str = "answer", task: str = "math") -> Sample:
    said = (Message(role="user", content="question"), Message(role="assistant", content=answer, reasoning=trace))
    return Sample(id=name, messages=said, source="made", task=task)


def first_characters(text: str, budgets: Sequence[int]) -> dict[int, str]:
    return {budget: text[:budget] for budget in budgets if len(text) > budget}


def controlled(samples: list[Sample], settings: ReasoningSettings) -> tuple[list[Sample], ReasoningReport]:
    control = Control(settings, truncate=first_characters)
    return [made for sample in samples for made in control.apply(sample)], control.report


def within_binomial_error(count: int, total: int, share: float) -> bool:
    return abs(count - share * total) <= 5 * math.sqrt(total * share * (1 - share)) + 1


SAMPLES = st.lists(
    st.builds(
        lambda trace, answer, task, thinking: replace(
            chat("", trace=trace, answer=answer, task=task), thinking=thinking
        ),
        st.sampled_from([None, "short", "a much longer trace"]),
        st.sampled_from(["answer", ""]),
        st.sampled_from(["math", "chat", ""]),
        st.sampled_from([None, True, False]),
    ),
    max_size=60,
).map(lambda samples: [replace(sample, id=str(number)) for number, sample in enumerate(samples)])
SETTINGS = st.builds(
    ReasoningSettings,
    strip=st.floats(0, 1),
    truncate=st.floats(0, 1),
    pair=st.floats(0, 1),
    seed=st.integers(0, 5),
    budgets=st.just((3, 8)),
)


@given(samples=SAMPLES, settings=SETTINGS, data=st.data())
def test_order_and_workers_do_not_matter(
    samples: list[Sample], settings: ReasoningSettings, data: st.DataObject
) -> None:
    made, report = controlled(samples, settings)
    shuffled = data.draw(st.permutations(samples))
    parts = [controlled(shuffled[::2], settings), controlled(shuffled[1::2], settings)]
    (first, counted), (second, others) = parts

    assert sorted(map(repr, made)) == sorted(map(repr, first + second))
    assert (counted.counts + others.counts, counted.truncated + others.truncated) == (report.counts, report.truncated)


@given(samples=SAMPLES, settings=SETTINGS)
def test_nothing_is_lost_and_only_traces_change(samples: list[Sample], settings: ReasoningSettings) -> None:
    made, report = controlled(samples, settings)
    first = [sample for sample in made if not sample.id.endswith("#off")]

    assert [sample.id for sample in first] == [sample.id for sample in samples]
    for before, after in zip(samples, first, strict=True):
        assert stripped(before) == stripped(after)
        for was, now in zip(before.messages, after.messages, strict=True):
            assert now.reasoning is None or (was.reasoning or "").startswith(now.reasoning)
    for sample in made:
        assert sample.thinking is any(message.reasoning is not None for message in sample.messages)
    pairs = [sample for sample in made if sample.id.endswith("#off")]
    assert all(sample.thinking is False for sample in pairs)
    assert len(pairs) == report.counts["samples paired"]
    assert report.counts["samples written"] == len(made)


def test_default_shares_are_reached() -> None:
    samples = [chat(str(number), trace="x" * 3000) for number in range(10_000)]
    made, report = controlled(samples, ReasoningSettings())
    assert within_binomial_error(report.counts["samples stripped"], len(samples), 0.10)
    on = [sample for sample in made if sample.thinking]
    lengths = Counter(len(sample.messages[1].reasoning or "") for sample in on)
    cut = len(on) - lengths.pop(3000)
    assert within_binomial_error(cut, len(on), 0.03)
    assert set(lengths) == {256, 512, 1024, 2048}  # of the budgets, those that the trace exceeds
    assert all(within_binomial_error(count, cut, 1 / 4) for count in lengths.values())
    assert all(sample.messages[1].content == "answer" for sample in made)


def test_decisions_for_different_purposes_are_independent() -> None:
    samples = [chat(str(number), trace="x" * 3000) for number in range(10_000)]
    _, report = controlled(samples, ReasoningSettings(strip=0.5, truncate=0.5, pair=0.5))

    assert within_binomial_error(report.counts["samples paired"], 10_000, 0.5)
    assert within_binomial_error(report.counts["samples stripped"], 10_000 - report.counts["samples paired"], 0.5)
    assert within_binomial_error(report.truncated.total(), report.counts["traces"], 0.5)


def test_decisions_depend_on_seed_source_and_id() -> None:
    samples = [chat(str(number)) for number in range(200)]

    def modes(samples: list[Sample], seed: int = 1) -> list[bool | None]:
        made, _ = controlled(samples, ReasoningSettings(strip=0.5, truncate=0, seed=seed))
        return [sample.thinking for sample in made]

    assert modes(samples) == modes(samples)
    assert modes(samples) != modes(samples, seed=2)
    assert modes(samples) != modes([replace(sample, source="other") for sample in samples])


def test_a_trace_without_an_answer_is_not_stripped() -> None:
    made, report = controlled([chat("a", answer=" ")], ReasoningSettings(strip=1, truncate=0))
    assert [sample.thinking for sample in made] == [True]
    assert report.counts["samples not stripped: an answer would be empty"] == 1

    call = Message(role="assistant", reasoning="trace", tool_calls=(ToolCall(name="f"),))
    made, _ = controlled([replace(chat("a"), messages=(call,))], ReasoningSettings(strip=1, truncate=0))
    assert made[0].messages == (replace(call, reasoning=None),)


def test_a_mode_that_contradicts_the_data_is_corrected_and_counted() -> None:
    said_on, said_off = replace(chat("a", trace=None), thinking=True), replace(chat("b"), thinking=False)

    made, report = controlled([said_on, said_off], NOTHING)

    assert [sample.thinking for sample in made] == [False, False]
    assert made[1].messages[1].reasoning is None
    assert report.counts["samples marked on without a trace, now off"] == 1
    assert report.counts["samples marked off with a trace, which is removed"] == 1


def test_budgets_are_in_tokens_of_the_model() -> None:
    encoder = ChatEncoder(Template.load("domyn"), ByteTokenizer())
    control = Control(ReasoningSettings(strip=0, truncate=1, budgets=(5, 100)), truncate=encoder.truncated)

    (made,) = control.apply(chat("a", trace="größe"))

    assert made.messages[1].reasoning == "grö"  # six bytes would be "größ" without its last half
    assert control.report.truncated == {5: 1}


@given(
    on=st.integers(0, 60),
    fixed=st.integers(0, 20),
    off=st.integers(0, 60),
    share=st.sampled_from([0.0, 0.15, 0.23, 0.5, 0.538, 0.9, 1.0]),
)
def test_a_share_is_reached_with_as_few_changes_as_possible(on: int, fixed: int, off: int, share: float) -> None:
    stripped_of_on, dropped_of_fixed, dropped_of_off = moves_to_share(on, fixed, off, share)

    assert 0 <= stripped_of_on <= on and 0 <= dropped_of_fixed <= fixed and 0 <= dropped_of_off <= off
    thinking = on + fixed - stripped_of_on - dropped_of_fixed
    without = off + stripped_of_on - dropped_of_off
    dropped = dropped_of_fixed + dropped_of_off
    if on + fixed == 0 and share > 0:
        assert (thinking, without) == (0, off)
    elif on + fixed > share * (on + fixed + off):
        if round((on + fixed) - share * (on + fixed + off)) <= on:  # enough of them can be stripped
            assert dropped == 0
            assert abs(thinking - share * (thinking + without)) <= 0.5
        else:
            assert without == on + off
            assert abs(thinking - share * without / (1 - share)) <= 0.5
    else:
        assert thinking == on + fixed
        assert abs(thinking / share - (thinking + without)) <= 0.5 if share else True


def test_an_unset_mode_follows_the_traces() -> None:
    samples = [chat("a"), chat("b", trace=None), chat("c", answer="")]

    assert [sample.thinking for sample in samples] == [None] * 3
    assert [mode_of(sample) for sample in samples] == ["on", "off", "fixed"]


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="strip"):
        ReasoningSettings(strip=10)
    with pytest.raises(ValueError, match="budgets"):
        ReasoningSettings(budgets=(0,))
    with pytest.raises(ValueError, match="requires a tokenizer"):
        Control(ReasoningSettings())
