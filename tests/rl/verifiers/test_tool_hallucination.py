"""Tool calls are wrong if no tool is declared, whatever the answer is."""

import asyncio
from typing import Any

import pytest

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.data.preference.hallucination import CALL_PATTERNS
from nemo_ext.rl.environments import make
from nemo_ext.rl.verdict import Verdict
from tests.rl.verdicts import verdict_on

TOOLS = [{"type": "function", "function": {"name": "ring", "parameters": {"type": "object", "properties": {}}}}]
B = {"environment": "multiple_choice", "reference": {"answer": "B", "choices": 4}}
ATTEMPTS = [
    '<tool_call>{"name": "ring", "arguments": {}}</tool_call>',
    "<tool_call><function=ring></function></tool_call>",
    "<TOOLCALL>[",
    "<function_calls>ring()</function_calls>",
    '<invoke name="ring"></invoke>',
    "<|python_tag|>ring()",
    "[TOOL_CALLS] ring",
    "<｜tool▁calls▁begin｜>",
    "<|tool_call_begin|>functions.ring:0<|tool_call_end|>",
    "```tool_code\nring()\n```",
    "Action: ring\nAction Input: {}",
    'functions.ring({"how": "often"})',
    'to=functions.ring {"how": "often"}',
    '{"type": "tool_use", "id": "1", "name": "ring", "input": {}}',
    '{"name": "ring", "parameters": {}}',
    '{"arguments": {"how": {"often": 2}}, "name": "ring"}',
    '{"function": "ring", "arguments": {}}',
    '{"arguments": {}, "function": "ring"}',
    '{"tool": "ring", "input": "twice"}',
    '{"tool_input": {"often": 2}, "tool_name": "ring"}',
    '{"action": "ring", "action_input": {}}',
    '{"action_input": "twice", "action": "ring"}',
]
OTHERS = [
    "<function=bells.ring-once>{}</function>",
    "<tool_code>ring()</tool_code>",
    '{"id": "1", "name": "ring", "arguments": {}}',
    '{"type": "function", "name": "ring", "index": 0, "parameters": {}}',
    '{"type": "function", "function": {"name": "ring", "arguments": "{}"}}',
    '{"arguments": "{\\"often\\": 2}", "id": "1", "name": "ring"}',
    "functions.bells.ring-once( {} )",
    'commentary to=functions.ring <|constrain|>json<|message|>{"how": "often"}<|call|>',
    "to=functions.ring json\n{}",
    "to=python code<|message|>print(1)<|call|>",
    '{"id": 1, "tool": "ring", "why": "I must", "args": [2]}',
    '{"recipient_name": "functions.ring", "parameters": {}}',
]


def verdict(response: Response, reference: dict[str, Any], **settings: Any) -> Verdict:
    return verdict_on(make("tool_hallucination", settings), response, reference)


def test_every_format_is_tried() -> None:
    assert len(ATTEMPTS) == len(CALL_PATTERNS)


@pytest.mark.parametrize("attempt", ATTEMPTS + OTHERS)
def test_a_call_without_tools_is_wrong(attempt: str) -> None:
    right = r"The answer is \boxed{B}."

    assert verdict(parse_response(right), {"answer": B}).outcome == "correct"
    assert verdict(parse_response(f"{right} {attempt}"), {"answer": B}).outcome == "wrong"
    assert verdict(parse_response(f"<think>{attempt}</think>{right}"), {"answer": B}).outcome == "wrong"
    unseen = verdict(parse_response(f"<think>{attempt}</think>{right}"), {"answer": B}, search_reasoning=False)
    assert unseen.outcome == "correct"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "age": 5}',
        "Action: none.",
        "f(name, arguments)",
        "The functions. search(x) is one of them.",
        "It calls functions.search(query) with the word.",
        "exports.f = functions.runWith({timeoutSeconds: 300, memory: '1GB'}).https.onCall(f)",
        "I would set to=functions.search in the header, but have no tools.",
        "Add to=python to the list.",
        '{"name": "square", "input": 3, "output": 9}',
        '{"function": "x^2", "input": 3, "output": 9}',
        '{"tool": "hammer", "material": "steel"}',
        '{"name": "sum", "description": "adds", "parameters": {"type": "object", "properties": {}}}',
        '{"parameters": {"properties": {"a": {"type": "integer"}}}, "name": "sum"}',
        '{"name": "id", "in": "query", "parameters": []}',
        '{"name": "max", "arguments": 2, "complexity": "O(n)"}',
        '{"function": "linear", "arguments": ["x", "y"]}',
        '{"action": "buy", "input": "none"}',
        "The tool takes an input and the function its arguments.",
        'The key "tool" names it, and "input" is what it gets.',
    ],
)
def test_texts_that_only_look_like_calls(text: str) -> None:
    assert verdict(parse_response(rf"{text} \boxed{{B}}"), {"answer": B}).outcome == "correct"


@pytest.mark.parametrize(
    "unit",
    [
        '"arguments":{',
        '"arguments":1,',
        '"arguments":{},"b":2,',
        '"name":"a",',
        '{"a":1,',
        '"a":1,',
        "Action:",
        '"',
        '"tool":1,',
        '{"input":1,',
        "functions.a(",
        "to=python ",
    ],
)
def test_a_long_text_is_searched_in_one_pass(unit: str) -> None:
    text = '{"b":1,' + unit * (200_000 // len(unit))

    assert verdict(parse_response(rf"{text} \boxed{{B}}"), {"answer": B}).outcome == "correct"


def test_the_engines_calls_count() -> None:
    response = Response(text="B", answer=r"\boxed{B}", tool_calls=(ToolCall(name="ring"),))

    assert verdict(response, {"answer": B}).outcome == "wrong"
    assert verdict(response, {"answer": B, "tools": TOOLS}).outcome == "correct"


def test_the_answers_own_check_decides() -> None:
    assert verdict(parse_response(r"\boxed{C}"), {"answer": B}).outcome == "wrong"
    assert verdict(parse_response("I cannot know."), {}).outcome == "correct"
    assert verdict(parse_response(""), {}).outcome == "wrong"
    assert verdict(parse_response("<think>So"), {}).outcome == "wrong"


def test_undeclared_tools_are_wrong() -> None:
    call = '<tool_call>{"name": "sing", "arguments": {}}</tool_call>'

    assert verdict(parse_response(call), {"tools": TOOLS}).outcome == "wrong"
    assert verdict(parse_response(call + "<tool_call>"), {"tools": TOOLS}).outcome == "wrong"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"tool": []}, "tools"),
        ({"answer": "B"}, r"reference\.answer='B'"),
        ({"answer": {"environment": "maths", "reference": {}}}, "did you mean 'math'"),
        ({"answer": {"environment": "bank", "reference": {}}}, "cannot check one answer on its own"),
        ({"answer": {"environment": "tool_hallucination", "reference": {}}}, "cannot check one answer on its own"),
        (
            {"answer": {"environment": "tool_calls", "reference": {}}},
            r"reference\.answer\.reference is invalid for environment tool_calls: reference",
        ),
    ],
)
def test_bad_references(reference: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("tool_hallucination").check(reference)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="search_reasoning"):
        make("tool_hallucination", {"search_reasoning": 1})
    with pytest.raises(ValueError, match="environments"):
        make("tool_hallucination", {"environments": {"maths": {}}})


def test_a_judge_of_answers_is_checked_before_a_run(endpoint: Any, reply: Any) -> None:
    endpoint.reply = lambda payload: reply(body=b'{"data": [{"id": "other"}]}')
    judge = {"endpoint": endpoint.url, "model": "judge"}
    made = make("tool_hallucination", {"environments": {"judge": {"judge": judge}}})
    assert made.reach is not None

    with pytest.raises(ValueError, match=r"unknown model 'judge'"):
        asyncio.run(made.reach())
    with pytest.raises(ValueError, match=r"reference\.answer\.environment=\['math'\]"):
        made.check({"answer": {"environment": ["math"], "reference": {}}})
