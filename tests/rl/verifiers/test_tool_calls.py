"""Calls must be exactly the expected ones."""

import json
from typing import Any

import pytest

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.chat.tool_calls import read_openai_calls
from nemo_ext.rl.environments import make
from nemo_ext.rl.verifiers.tool_calls import Order, check, verify
from tests.json_lines import read_jsonl
from tests.rl.gym_data import gym_data
from tests.rl.verdicts import verdict_on

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
        },
    }
]
ROME, OSLO = ({"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Oslo"))


def call(city: Any, **more: Any) -> ToolCall:
    return ToolCall(name="weather", arguments={"city": city, **more})


def outcome(*made: ToolCall, order: Order = "any", expected: Any = (ROME, OSLO), tools: Any = TOOLS) -> str:
    reference = check({"expected": list(expected), "order": order, "tools": tools})
    return verify(Response(text="", tool_calls=made), reference).outcome


def test_all_and_no_other() -> None:
    assert outcome(call("Rome"), call("Oslo")) == "correct"
    assert outcome(call("Oslo"), call("Rome")) == "correct"
    assert outcome(call("Rome")) == "wrong"
    assert outcome(call("Rome"), call("Rome")) == "wrong"
    assert outcome(call("Rome"), call("Oslo"), call("Oslo")) == "wrong"
    assert outcome(call("Rome"), call("oslo")) == "wrong"


def test_order_as_given() -> None:
    assert outcome(call("Rome"), call("Oslo"), order="as_given") == "correct"
    assert outcome(call("Oslo"), call("Rome"), order="as_given") == "wrong"


def test_arguments_are_json() -> None:
    expected = [{"name": "weather", "arguments": {"city": "Rome", "days": 1}}]

    assert outcome(call("Rome", days=1.0), expected=expected) == "correct"
    assert outcome(call("Rome"), expected=expected) == "correct"  # the schema's default
    assert outcome(call("Rome"), expected=expected, tools=None) == "wrong"
    assert outcome(call("Rome", days=True), expected=expected) == "wrong"
    assert outcome(call("Rome", days=True), expected=expected, tools=None) == "wrong"
    assert outcome(call("Rome", days=2), expected=expected) == "wrong"
    assert outcome(call("Rome", days=[[1]]), expected=expected, tools=None) == "wrong"


def test_no_call_is_expected() -> None:
    reference = check({"expected": []})

    assert verify(parse_response("It rains."), reference).outcome == "correct"
    assert verify(parse_response(""), reference).outcome == "wrong"
    assert verify(parse_response('<TOOLCALL>[{"name": "weather"'), reference).outcome == "wrong"


def test_calls_in_raw_text() -> None:
    environment = make("tool_calls", {"style": "llama_nemotron"})
    reference = {"expected": [ROME], "tools": TOOLS}
    text = f"<TOOLCALL>[{json.dumps(ROME)}]</TOOLCALL>"

    assert verdict_on(environment, text, reference).outcome == "correct"
    assert verdict_on(environment, f"<think>{text}</think>", reference).outcome == "wrong"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({}, "expected"),
        ({"expected": [ROME], "ordr": "any"}, "order"),
        ({"expected": [ROME], "order": "sorted"}, r"reference\.order must be any or as_given"),
        ({"expected": ROME}, r"reference\.expected must be a list"),
        ({"expected": [{"name": 3, "arguments": {}}]}, r"reference\.expected.*name"),
        ({"expected": [{"name": "wether", "arguments": {}}], "tools": TOOLS}, r"reference\.expected\[0\].*declared"),
        ({"expected": [], "tools": [{}]}, r"reference\.tools\[0\]"),
    ],
)
def test_bad_references(reference: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(reference)


def test_an_unknown_style() -> None:
    with pytest.raises(ValueError, match="style must be one of"):
        make("tool_calls", {"style": "xml"})


@pytest.mark.gym
def test_agrees_with_xlam_fc() -> None:
    folder = gym_data("xlam_fc")
    expected = {
        json.dumps(record["responses_create_params"]["input"][-1]["content"]): record["expected_answers"]
        for record in read_jsonl(folder / "example.jsonl")
    }
    compared, refused = [], []
    for record in read_jsonl(folder / "example_rollouts.jsonl"):
        asked = json.dumps(record["responses_create_params"]["input"][-1]["content"])
        made = read_openai_calls([item for item in record["response"]["output"] if item["type"] == "function_call"])
        try:
            reference = check({"expected": expected[asked], "tools": record["responses_create_params"]["tools"]})
        except ValueError as error:
            # A number is expected where the declared tool takes text, so that no call can be right: Gym gives 0.
            refused.append((str(error), record["reward"]))
            continue
        verdict = verify(Response(text="", answer="-", tool_calls=made.calls), reference)
        compared.append((verdict.score, record["reward"]))

    assert [("is not of type 'string'" in error, reward) for error, reward in refused] == [(True, 0)]
    assert len(compared) >= 4 and {reward for _, reward in compared} == {0, 1}
    assert [ours for ours, _ in compared] == [theirs for _, theirs in compared]


@pytest.mark.gym
def test_agrees_with_single_step_tool_use() -> None:
    compared = []
    for record in read_jsonl(gym_data("single_step_tool_use_with_argument_comparison") / "example_rollouts.jsonl"):
        action = record["expected_action"]
        expected = [action] if action["type"] == "function_call" else []
        wanted = [{"name": each["name"], "arguments": each["arguments"]} for each in expected]
        made = read_openai_calls([item for item in record["response"]["output"] if item["type"] == "function_call"])
        verdict = verify(Response(text="", answer="-", tool_calls=made.calls), check({"expected": wanted}))
        compared.append((verdict.score, record["reward"]))

    assert len(compared) >= 5 and {reward for _, reward in compared} == {0, 1}
    assert [ours for ours, _ in compared] == [theirs for _, theirs in compared]


@pytest.mark.parametrize(
    ("a", "right"), [({"k": 5}, True), ({"k": 6}, False), ({}, False), (5, False), ({"k": 5, "l": 1}, False)]
)
def test_accepted_values_of_objects_within_lists(a: Any, right: bool) -> None:
    """A single accepted value may be given without a list around it."""
    reference = check({"accepted": [{"name": "f", "arguments": {"a": [{"k": 5}]}}]})
    response = Response(text="", tool_calls=(ToolCall(name="f", arguments={"a": a}),))

    assert (verify(response, reference).outcome == "correct") == right
