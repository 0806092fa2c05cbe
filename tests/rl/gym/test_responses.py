"""Conversion of responses from model servers."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.rl.gym.responses import last_turn, read_answer


def test_a_parsed_trace_is_used(openai: SimpleNamespace) -> None:
    response = read_answer(openai.response(openai.thought("so ..."), openai.said("4"), usage=openai.usage(9))).response

    assert (response.thinking, response.answer, response.tokens, response.finished) == ("so ...", "4", 9, True)
    assert response.text.count("<think>") == response.text.count("</think>") == 1


def test_text_quoted_in_a_trace_is_not_an_answer(openai: SimpleNamespace) -> None:
    response = read_answer(openai.response(openai.thought(r"</think> \boxed{4}"), openai.said("5"))).response

    assert response.answer == "5"


def test_a_trace_that_was_cut_off_has_no_end(openai: SimpleNamespace) -> None:
    cut = openai.response(openai.thought("so"), incomplete_details={"reason": "max_output_tokens"})

    response = read_answer(cut).response

    assert (response.thinking, response.answer, response.finished) == ("so", "", False)
    assert "</think>" not in response.text


def test_tags_in_the_text_are_parsed_if_the_server_parses_none(openai: SimpleNamespace) -> None:
    assert read_answer(openai.response(openai.said("<think>so</think>4"))).response.answer == "4"
    assert read_answer(openai.response(openai.said("so"))).response.answer == "so"
    assert read_answer(openai.response(openai.said("so")), thinking_opened=True).response.answer == ""
    hidden = {"type": "reasoning", "id": "rs_1", "summary": []}
    assert read_answer(openai.response(hidden, openai.said("4"))).response.thinking is None


def test_calls_are_read_separately(openai: SimpleNamespace) -> None:
    items = [openai.called("find", '{"name": "Ada"}', "a"), openai.called("find", '{"name": ', "b")]

    answered = read_answer(openai.response(openai.said("I look."), *items))

    assert [(call.name, call.id) for call in answered.response.tool_calls] == [("find", "a")]
    assert list(answered.unreadable) == ["b"] and "JSON" in answered.unreadable["b"]


def test_calls_beyond_the_maximum_are_ignored(openai: SimpleNamespace) -> None:
    items = [openai.called("find", "{}", str(number)) for number in range(200)]

    answered = read_answer(openai.response(*items))

    assert len(answered.response.tool_calls) == 64 and list(answered.unreadable) == ["64"]


def test_the_last_turn_follows_the_last_tool_result(openai: SimpleNamespace) -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": "1"}
    answered = openai.response(openai.said("I look."), openai.called("find", "{}"), output, openai.said("Ada."))

    assert read_answer(last_turn(answered)).response.answer == "Ada."
    assert last_turn(openai.response(openai.said("Ada."))) == openai.response(openai.said("Ada."))


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KINDS = st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "other"])
ITEMS = st.fixed_dictionaries(
    {"type": KINDS},
    optional={key: JSON for key in ("content", "summary", "role", "name", "arguments", "call_id", "text")},
)


@given(st.lists(ITEMS | JSON, max_size=4), JSON, JSON)
def test_no_output_raises(output: list[Any], usage: Any, details: Any) -> None:
    answered = read_answer(last_turn({"output": output, "usage": usage, "incomplete_details": details}))

    assert answered.response.answer == answered.response.answer.strip()
