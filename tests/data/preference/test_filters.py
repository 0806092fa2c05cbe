from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.chat.template import Template, names
from nemo_ext.data.preference.filters import Filters, Lengths
from nemo_ext.data.preference.group import Generation, Group, Pair
from nemo_ext.data.preference.measure import lengths_of, rendered_pair
from nemo_ext.data.text.tokenizers import ByteTokenizer

PYTHON = {"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {}}}}
SHORT = Lengths(1, 1, 2)


def pair(chosen: Message, rejected: Message, **known: Any) -> Pair:
    group = Group(id="p", prompt=(Message(role="user", content="Why?"),), generations=(), **known)
    sides = (Generation(messages=(message,)) for message in (chosen, rejected))
    return Pair(id="p/delta", group=group, chosen=next(sides), rejected=next(sides), kind="delta")


def said(content: str = "", **known: Any) -> Message:
    return Message(role="assistant", content=content, **known)


CALL = said(tool_calls=(ToolCall(name="python", arguments={}),))


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 300))
def test_lengths_differ_by_less_than_the_limit(chosen: int, rejected: int, limit: int) -> None:
    reason = Filters(max_length_difference=limit).reason(pair(said("a"), said("b")), Lengths(5, chosen, rejected))

    assert reason == (None if abs(chosen - rejected) < limit else "length difference")


@pytest.mark.parametrize(
    ("tasks", "task", "turns", "dropped"),
    [
        ((), "math", 1, True),
        (("chat",), "math", 1, False),
        (("chat",), "chat", 1, True),
        (("chat", "multi_turn"), "math", 2, True),
        (("chat",), "math", 2, False),
    ],
)
def test_the_length_difference_is_limited_in_some_tasks(
    tasks: tuple[str, ...], task: str, turns: int, dropped: bool
) -> None:
    earlier = (Message(role="user", content="Hi"), said("Ho")) * (turns - 1)
    judged = pair(said("a"), said("b"), task=task)
    judged = replace(judged, group=replace(judged.group, prompt=earlier + judged.group.prompt))
    filters = Filters(max_length_difference=100, length_difference_tasks=tasks)

    assert (filters.reason(judged, Lengths(5, 200, 100)) is not None) == dropped


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        (Lengths(640, 2816, 1), None),
        (Lengths(641, 1, 1), "prompt too long"),
        (Lengths(640, 1, 2817), "prompt and answer too long"),
        (Lengths(640, 2817, 1), "prompt and answer too long"),
    ],
)
def test_domyns_limits_are_inclusive(lengths: Lengths, reason: str | None) -> None:
    assert Filters(max_prompt_tokens=640, max_tokens=3456).reason(pair(said("a"), said("b")), lengths) == reason


@pytest.mark.parametrize(
    ("chosen", "rejected", "key", "reason"),
    [
        (said(" \n"), said("b"), "empty_answers", "empty chosen answer"),
        (said("a"), said(reasoning="t"), "empty_answers", "empty rejected answer"),
        (said("a b", reasoning="s"), said("a\nb", reasoning="t"), "different_answers", "equal answers"),
        (said("a"), said("b", reasoning="t"), "same_mode", "reasoning in one answer only"),
        (CALL, said("b"), "declared_calls", "chosen answer calls an undeclared tool"),
    ],
)
def test_a_reason_can_be_switched_off(chosen: Message, rejected: Message, key: str, reason: str) -> None:
    judged = pair(chosen, rejected)
    others = {name: False for name in ("different_answers", "empty_answers", "declared_calls", "same_mode")}

    assert Filters(**(others | {key: True})).reason(judged, SHORT) == reason
    assert Filters(**others).reason(judged, SHORT) is None


def test_valid_pairs_are_kept() -> None:
    assert Filters().reason(pair(said("a"), said("b")), SHORT) is None
    assert Filters().reason(pair(CALL, said("b"), tools=(PYTHON,)), SHORT) is None
    assert Filters().reason(pair(said("b"), CALL), SHORT) is None, "a rejected answer may call an undeclared tool"


def test_lengths_include_all_texts() -> None:
    measured = pair(said("four", reasoning="ab"), said("largest"))

    assert lengths_of(measured, ByteTokenizer()) == Lengths(4, 6, 7)
    assert lengths_of(pair(said("é"), said("b")), ByteTokenizer()).chosen == 2
    assert lengths_of(pair(said("é"), said("b")), None).chosen == 1


@pytest.mark.parametrize("name", names())
def test_a_template_renders_one_prompt_and_the_answers_after_it(name: str) -> None:
    template = Template.load(name)
    rendered = pair(said("yes", reasoning="t"), said("no", reasoning="u"))

    question = Sample(id="q", messages=rendered.group.prompt)
    prompt, chosen, rejected = rendered_pair(question, rendered.chosen.messages, rendered.rejected.messages, template)

    assert "Why?" in prompt and "yes" not in prompt
    assert "yes" in chosen and "t" in chosen and chosen == chosen.rstrip("\n")
    assert "no" in rejected
    assert lengths_of(rendered, ByteTokenizer(), (prompt, chosen, rejected)).prompt == len(prompt.encode())
