import contextlib
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.formats import (
    REORDERED,
    WITHOUT_ANSWER,
    WITHOUT_CALL,
    FormatError,
    detect,
    template_messages,
    thinking_mode,
    to_record,
    to_sample,
)
from nemo_ext.chat.sample import Message, Sample, ToolCall, openai_messages

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def messages(record: dict[str, Any], **options: Any) -> tuple[Message, ...]:
    return to_sample(record, id="1", **options).messages


def test_openai_messages_with_a_trace_and_a_call_whose_arguments_are_text_or_an_object() -> None:
    record = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Add.",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1, "y": 1}'}},
                    {"name": "add", "arguments": {"x": 2}},
                ],
            },
            {"role": "tool", "content": "2", "tool_call_id": "a"},
            {"role": "assistant", "content": "2"},
        ],
        "tools": [ADD],
    }

    sample = to_sample(record, id="1", source="s", task="math", language="en", thinking=True)

    assert sample == Sample(
        id="1",
        messages=(
            Message(role="system", content="Be brief."),
            Message(role="user", content="1+1?"),
            Message(
                role="assistant",
                reasoning="Add.",
                tool_calls=(
                    ToolCall(name="add", arguments={"x": 1, "y": 1}, id="a"),
                    ToolCall(name="add", arguments={"x": 2}),
                ),
            ),
            Message(role="tool", content="2", tool_call_id="a"),
            Message(role="assistant", content="2"),
        ),
        tools=(ADD,),
        source="s",
        task="math",
        language="en",
        thinking=True,
    )


def test_sharegpt_calls_are_added_to_the_assistant_s_message_and_tools_may_be_text() -> None:
    record = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "gpt", "value": "<think>Add.</think>Let me see."},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"x": 1}}'},
            {"from": "observation", "value": {"sum": 2}},
            {"from": "gpt", "value": "2"},
        ],
        "tools": json.dumps([ADD["function"]]),
    }

    sample = to_sample(record, id="1")

    assert sample.tools == (ADD,)
    assert sample.messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="1+1?"),
        Message(
            role="assistant",
            content="Let me see.",
            reasoning="Add.",
            tool_calls=(ToolCall(name="add", arguments={"x": 1}),),
        ),
        Message(role="tool", content='{"sum": 2}'),
        Message(role="assistant", content="2"),
    )


def test_nemo_s_chat_format_and_detection_of_formats() -> None:
    turns = [{"from": "User", "value": "q"}, {"from": "Assistant", "value": "a"}]
    record = {"system": "", "mask": "User", "conversations": turns}

    assert messages(record) == (Message(role="user", content="q"), Message(role="assistant", content="a"))
    assert detect(record) == "nemo" == detect({"conversations": turns})
    assert detect({"conversations": [{"from": "human", "value": "q"}]}) == "sharegpt"
    assert detect({"conversations": [{"role": "user", "content": "q"}]}) == "openai" == detect({"messages": []})
    with pytest.raises(FormatError, match=r"mask='Assistant' is not supported"):
        to_sample(record | {"mask": "Assistant"}, id="1")


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>\nSo.\n</think>\n\nYes", "So.", "Yes"),
        (" <think></think>Yes", None, "Yes"),
        ("<think>\n\n</think>\n\nYes", None, "Yes"),
        ("Yes", None, "Yes"),
        ("no</think>Yes", "no", "Yes"),
        ("\nSo.\n</think>\n\nYes", "So.", "Yes"),
        ("</think>Yes", None, "Yes"),
        ("Well <think>So.</think>", None, "Well <think>So.</think>"),
    ],
)
def test_a_trace_at_the_start_of_the_content(content: str, reasoning: str | None, answer: str) -> None:
    record = {"messages": [{"role": "assistant", "content": content}]}

    assert messages(record) == (Message(role="assistant", content=answer, reasoning=reasoning),)
    (message,) = messages({"messages": [{"role": "assistant", "content": content, "reasoning_content": "own"}]})
    assert (message.content, message.reasoning) == (content, "own")


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"role": "asistant", "content": ""}, r"messages\[1\].role='asistant' is not a role; did you mean 'assistant'"),
        ({"content": ""}, r"messages\[1\].role: expected a role \(system, user, .*\), not nothing"),
        ({"role": "user"}, r"messages\[1\].content: expected a string, not nothing"),
        ({"role": "assistant"}, r"messages\[1\].content: expected a string, not nothing"),
        ({"role": "user", "content": 3}, r"messages\[1\].content: expected a string, not an int"),
        ({"role": "user", "content": "\ud800"}, r"messages\[1\].content: cannot be encoded as UTF-8 \(surr"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"messages\[1\].content\[0\]: a part of type 'image_url'",
        ),
        ({"role": "system", "content": "x"}, r"messages\[1\]: a system message must come first"),
        ({"role": "assistant", "content": "x", "weight": 0}, r"messages\[1\].weight=0"),
        ({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, r"reasoning_content and reasoning differ"),
        ({"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}, r"only an assistant may call tools"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            r"messages\[1\].tool_calls\[0\].arguments: expected JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]},
            r"tool_calls\[0\].arguments: expected an object, not a list",
        ),
        ({"role": "assistant", "tool_calls": [{"arguments": {}}]}, r"tool_calls\[0\].name: expected the name"),
        ("hi", r"messages\[1\]: expected an object, not a str"),
    ],
)
def test_an_error_has_the_path_in_the_record(turn: object, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        to_sample({"messages": [{"role": "user", "content": "q"}, turn]}, id="1")


def test_invalid_records_are_refused() -> None:
    with pytest.raises(
        FormatError, match=r"expected a list in messages or conversations; the record's keys are \['text'\]"
    ):
        to_sample({"text": "x"}, id="1")
    with pytest.raises(FormatError, match="messages is empty"):
        to_sample({"messages": []}, id="1")
    with pytest.raises(FormatError, match=r"tools\[0\]: expected"):
        to_sample({"messages": [{"role": "user", "content": "q"}], "tools": [{"type": "function"}]}, id="1")
    with pytest.raises(FormatError, match="conversations: expected a list, not nothing"):
        to_sample({"messages": [{"role": "user", "content": "q"}]}, id="1", format="sharegpt")


def test_empty_traces_are_removed_and_counted() -> None:
    changed: Counter[str] = Counter()
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "a", "reasoning_content": ""},
        {"role": "assistant", "content": "<think>\n</think>a"},
        {"role": "assistant", "content": "<think>real</think>a", "reasoning_content": " "},
        {"role": "assistant", "content": "a", "reasoning": "real", "thinking": ""},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "real\n</think>\n\na"},
    ]

    found = messages({"messages": turns}, changed=changed)

    assert [message.reasoning for message in found] == [None, None, "real", "real", None, "real"]
    assert {message.content for message in found} == {"a"}
    assert changed == {"empty traces removed": 2, "traces without an opening tag": 1}


def test_ignored_keys_are_counted() -> None:
    ignored: Counter[str] = Counter()
    to_sample({"messages": [{"role": "user", "content": "q", "name": "Ann", "score": None}]}, id="1", ignored=ignored)
    to_sample({"conversations": [{"from": "User", "value": "q", "label": "x"}]}, id="1", ignored=ignored)

    assert ignored == {"messages[].name": 1, "conversations[].label": 1}


def test_spellings_of_modes() -> None:
    assert [thinking_mode(mode, "m") for mode in (None, True, "on", "Thinking Off", "detailed thinking on")] == [
        None,
        True,
        True,
        False,
        True,
    ]
    with pytest.raises(FormatError, match="reasoning='maybe': expected on, off"):
        thinking_mode("maybe", "reasoning")


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), TEXT
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=5,
)
CALLS = st.builds(
    ToolCall,
    name=TEXT.filter(bool),
    arguments=st.dictionaries(TEXT, VALUES, max_size=3),
    id=st.none() | TEXT.filter(bool),
)
TURNS = st.one_of(
    st.builds(Message, role=st.just("user"), content=TEXT),
    st.builds(Message, role=st.just("tool"), content=TEXT, tool_call_id=st.none() | TEXT.filter(bool)),
    st.builds(
        Message,
        role=st.just("assistant"),
        content=TEXT | st.just("<think>quoted</think> text") | TEXT.map(lambda text: "a <think> " + text),
        reasoning=st.none() | TEXT.filter(str.strip),
        tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    ).filter(lambda message: message.reasoning is not None or not message.content.lstrip().startswith("<think>")),
)
SAMPLES = st.builds(
    lambda system, turns, **rest: Sample(messages=(*system, Message(role="user", content="q"), *turns), **rest),
    st.lists(st.builds(Message, role=st.just("system"), content=TEXT), max_size=1),
    st.lists(TURNS, min_size=1, max_size=5),
    id=TEXT.filter(bool),
    tools=st.lists(
        st.builds(
            lambda name, rest: {"type": "function", "function": {**rest, "name": name}},
            TEXT,
            VALUES.map(lambda v: {"parameters": v}),
        ),
        max_size=2,
    ).map(tuple),
)


@given(SAMPLES)
def test_to_record_is_the_inverse_of_to_sample(sample: Sample) -> None:
    changed: Counter[str] = Counter()

    normal = to_sample(json.loads(json.dumps(to_record(sample))), id=sample.id, changed=changed)

    assert normal == sample or changed
    assert to_sample(json.loads(json.dumps(to_record(normal))), id=sample.id) == normal


WEATHER = [{"id": name, "function": {"name": "weather", "arguments": {"city": name}}} for name in ("Oslo", "Rome")]


def answer_of(name: str | None, content: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": content or f"in {name}"}


@pytest.mark.parametrize(
    ("calls", "answers", "read", "counted"),
    [
        ([WEATHER], ["Oslo", "Rome"], ["in Oslo", "in Rome"], {}),
        ([WEATHER], ["Rome", "Oslo"], ["in Oslo", "in Rome"], {REORDERED: 1}),
        ([WEATHER[:1], WEATHER[1:]], ["Rome", "Oslo"], ["in Oslo", "in Rome"], {REORDERED: 1}),
        ([WEATHER], ["Oslo", "Bonn", "Oslo", "Rome"], ["in Oslo", "in Rome"], {WITHOUT_CALL: 2}),
        ([WEATHER], ["Rome", None], ["in None", "in Rome"], {REORDERED: 1}),
        ([WEATHER], [None, None, None], ["in None", "in None"], {WITHOUT_CALL: 1}),
        ([[{"name": "f"}, {"name": "g"}]], ["b", "a"], ["in b", "in a"], {}),  # the calls have no ids
        ([[{"name": "f", "id": 1}, {"name": "g", "id": 1}]], ["b", "a"], ["in b", "in a"], {}),
        ([WEATHER], ["Oslo"], ["in Oslo"], {}),
        ([], ["Oslo"], [], {WITHOUT_CALL: 1}),
        ([], [None], ["in None"], {}),
    ],
)
def test_answers_of_tools_are_sorted_by_their_calls(
    calls: list[Any], answers: list[str | None], read: list[str], counted: dict[str, int]
) -> None:
    turns = [{"role": "user", "content": "q"}, *({"role": "assistant", "tool_calls": each} for each in calls)]
    turns += map(answer_of, answers)
    changed: Counter[str] = Counter()

    found = messages({"messages": turns}, changed=changed)

    assert [message.content for message in found if message.role == "tool"] == read
    assert [message.tool_calls for message in found[1 : 1 + len(calls)]] == [
        message.tool_calls for message in messages({"messages": turns[: 1 + len(calls)]})[1:]
    ]
    assert changed == counted
    if WITHOUT_CALL in counted:
        with pytest.raises(FormatError, match=r"messages\[\d\]"):
            messages({"messages": turns})


def test_an_unanswered_call_before_an_answered_one_is_removed() -> None:
    turns = [
        {"role": "assistant", "content": "Let me see.", "tool_calls": WEATHER[:1]},
        {"role": "assistant", "content": "", "tool_calls": WEATHER},
        answer_of("Rome"),
    ]
    turns[1]["tool_calls"] = [{**WEATHER[0], "id": "Bonn"}, WEATHER[1]]
    changed: Counter[str] = Counter()

    first, second, answer = messages({"messages": turns}, changed=changed)

    assert (first.content, first.tool_calls) == ("Let me see.", ())
    assert [call.id for call in second.tool_calls] == ["Rome"] == [answer.tool_call_id]
    assert changed == {WITHOUT_ANSWER: 2}
    with pytest.raises(FormatError, match=r"messages\[0\].tool_calls: a call has no result, but a later one has"):
        messages({"messages": turns})


def test_template_messages_are_normalised_and_keep_other_keys() -> None:
    turns = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {"role": "assistant", "content": None, "reasoning": "Two.", "tool_calls": WEATHER},
        {"role": "tool", "tool_call_id": "Rome", "content": None},
        {"role": "tool", "tool_call_id": "Oslo", "content": "3 C"},
        {"role": "assistant", "content": "So.</think>3 C."},
    ]
    turns[2]["tool_calls"] = [{"id": "Oslo", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]
    turns[2]["tool_calls"] += [WEATHER[1]]

    made = template_messages(turns, "messages")

    assert made == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Two.",
            "tool_calls": [{"type": "function", **call} for call in WEATHER],
        },
        {"role": "tool", "tool_call_id": "Oslo", "content": "3 C", "name": "weather"},
        {"role": "tool", "tool_call_id": "Rome", "content": "", "name": "weather"},
        {"role": "assistant", "content": "3 C.", "reasoning_content": "So."},
    ]
    del made[1]["name"]
    assert openai_messages(messages({"messages": turns}), names=True) == made


@pytest.mark.parametrize("content", ["<think>and then", "\n<think>\nand then </thin"])
def test_an_unfinished_trace_is_refused(content: str) -> None:
    with pytest.raises(FormatError, match=r"messages\[0\].content: the trace does not end"):
        messages({"messages": [{"role": "assistant", "content": content}]})
    with pytest.raises(FormatError, match=r"conversations\[0\].value: the trace does not end"):
        messages({"conversations": [{"from": "gpt", "value": content}]})


@given(VALUES | st.fixed_dictionaries({"messages": VALUES, "conversations": VALUES, "tools": VALUES}))
def test_any_record_gives_a_sample_or_a_format_error(record: Any) -> None:
    if isinstance(record, dict):
        with contextlib.suppress(FormatError):
            assert to_sample(record, id="1").messages


def test_arguments_that_are_not_json_numbers_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": NaN}'}}

    with pytest.raises(FormatError, match=r"\[1\].tool_calls\[0\].arguments: the value cannot be written as JSON"):
        to_sample({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]}, id="s")
