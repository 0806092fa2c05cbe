from typing import Any

import pytest

from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.sft.filters.structural import Structural

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


def user(text: str = "q") -> Message:
    return Message(role="user", content=text)


def says(text: str = "a", reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=text, reasoning=reasoning)


def calls(*given: ToolCall) -> Message:
    return Message(role="assistant", tool_calls=given)


def answer(identifier: str | None = None) -> Message:
    return Message(role="tool", content="2", tool_call_id=identifier)


GOOD = ToolCall(name="add", arguments={"x": 1}, id="a")
SYSTEM = Message(role="system", content="s")


def reason(*messages: Message, tools: tuple[dict[str, Any], ...] = (ADD,), **settings: Any) -> str | None:
    return Structural(**settings).reason(Sample(id="1", messages=messages, tools=tools))


def test_valid_conversations_are_kept() -> None:
    assert reason(user(), says()) is None
    assert reason(SYSTEM, says("Hello"), user(), says("a", "so"), user(), says()) is None
    assert reason(user(), calls(GOOD, GOOD), answer("a"), answer("a"), calls(GOOD), answer(), says()) is None
    assert reason(user(), calls(GOOD)) is None
    assert reason(user("what does <think> mean?"), says()) is None


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((user(), user(), says()), "role-order"),
        ((user(), says(), says()), "role-order"),
        ((user(), calls(GOOD), user(), says()), "role-order"),
        ((user(),), "no-assistant"),
        ((SYSTEM,), "no-assistant"),
        ((user(), says(), user()), "ends-without-assistant"),
        ((user(), calls(GOOD), answer()), "ends-without-assistant"),
        ((user(" "), says()), "empty-user"),
        ((user(), says(" \n")), "empty-assistant"),
        ((user(), says("", "only a trace")), "empty-assistant"),
        ((user(), says("so</think>a")), "think-tags"),
        ((user(), says("a", "so <think> again")), "think-tags"),
        ((user(), answer(), says()), "tool-answer-without-call"),
        ((user(), calls(GOOD), answer(), answer(), says()), "tool-answer-without-call"),
        ((user(), calls(GOOD), answer("b"), says()), "tool-answer-without-call"),
        ((user(), calls(ToolCall(name="sub"))), "unknown-tool"),
        ((user(), calls(ToolCall(name="add", arguments={"x": "1"}))), "bad-arguments"),
        ((user(), calls(ToolCall(name="add"))), "bad-arguments"),
        ((user(), calls(ToolCall(name="add", arguments={"x": 1, "y": 1}))), "bad-arguments"),
    ],
)
def test_reasons(messages: tuple[Message, ...], expected: str) -> None:
    assert reason(*messages) == expected


def test_undeclared_tools_and_invalid_schemas() -> None:
    wrong = {"type": "function", "function": {"name": "add", "parameters": {"type": "number-ish"}}}
    remote = {"type": "function", "function": {"name": "add", "parameters": {"$ref": "http://127.0.0.1:9/s.json"}}}
    pattern = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"x": {"pattern": "("}}}}}
    call = calls(ToolCall(name="add", arguments={"x": "1"}))

    assert reason(user(), calls(GOOD), tools=()) == "no-tools-declared"
    assert [reason(user(), call, tools=(tool,)) for tool in (wrong, remote, pattern)] == ["bad-tool-schema"] * 3
    assert reason(user(), call, tools=(wrong,), arguments=False) is None
    assert reason(user(), call, tools=({"type": "function", "function": {"name": "add"}},)) is None


def test_checks_can_be_disabled_and_the_detail_has_the_place() -> None:
    assert reason(user(), says(), user(), end_with_assistant=False) is None
    dropped = Structural().drop(
        Texts(Sample(id="1", messages=(user(), calls(ToolCall(name="add", arguments={"x": "1"}))), tools=(ADD,)))
    )
    assert dropped is not None
    assert dropped.detail == "messages[1] calls add: $.x: '1' is not of type 'integer'"
