"""Tool calls in text: everything that templates write is parsed, and no model output raises an error."""

import json
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_ext.chat.response import Response, parse_response
from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.chat.template import Template, names
from nemo_ext.chat.tool_calls import (
    MAX_CALLS,
    STYLES,
    Style,
    call_problem,
    calls_of,
    check_tools,
    parse_tool_calls,
    read_openai_calls,
)

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "book_room",
            "parameters": {
                "type": "object",
                "properties": {
                    "guest": {"type": "string"},
                    "nights": {"type": "integer"},
                    "price": {"type": "number"},
                    "breakfast": {"type": "boolean"},
                    "wishes": {"type": "array", "items": {"type": "string"}},
                    "card": {"type": "object"},
                    "floor": {"type": ["integer", "null"]},
                    "bed": {"enum": ["single", "double"]},
                },
                "required": ["guest"],
            },
        },
    },
    {"type": "function", "function": {"name": "ring.bell-2", "parameters": {"type": "object", "properties": {}}}},
)

HERMES = '<tool_call>\n{"name": "book_room", "arguments": {"guest": "Ada"}}\n</tool_call>'
WRITTEN: dict[Style, str] = {
    "nemotron3_nano": (
        "<tool_call>\n<function=book_room>\n<parameter=guest>\nAda\n</parameter>\n<parameter=nights>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n"
    ),
    "domyn": '<tool_call>\n{"name": "book_room", "arguments": {"guest": "Ada", "nights": 2}}\n</tool_call>',
    "llama_nemotron": '<TOOLCALL>[{"name": "book_room", "arguments": {"guest": "Ada", "nights": 2}}]</TOOLCALL>',
    "olmo3": '<function_calls>book_room(guest="Ada", nights=2)</function_calls>',
}
CALL = ToolCall(name="book_room", arguments={"guest": "Ada", "nights": 2})

characters = st.characters(exclude_categories=("Cs", "Cn"))
# An XML-style value cannot contain its closing tag.
texts = st.text(characters, max_size=30).filter(lambda text: "</parameter>" not in text)
numbers = st.floats(allow_nan=False, allow_infinity=False)
nested = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {"guest": texts | st.sampled_from(["5", "true", "null", "[1]", '"', "\n", "</tool_call>", "</TOOLCALL>", "a)\n"])},
    optional={
        "nights": st.integers(-(10**15), 10**15),
        "price": numbers,
        "breakfast": st.booleans(),
        "wishes": st.lists(texts, max_size=3),
        "card": st.dictionaries(texts, nested, max_size=3),
        "floor": st.none() | st.integers(0, 9),
        "bed": st.sampled_from(["single", "double"]),
    },
)
calls = st.lists(
    st.builds(lambda given: ToolCall(name="book_room", arguments=given), arguments)
    | st.just(ToolCall(name="ring.bell-2")),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("style", names())
@given(made=calls, content=st.sampled_from(["", "I book it.", "Two\n\nlines <b> & more"]))
def test_calls_written_by_templates_are_parsed(style: str, made: list[ToolCall], content: str) -> None:
    template = Template.load(style)
    answer = Message(role="assistant", content=content, tool_calls=tuple(made))
    sample = Sample(id="0", messages=(Message(role="user", content="A room?"), answer), tools=TOOLS, thinking=False)
    rendered = template.render(sample)
    ((start, end),) = rendered.trained
    written = rendered.text[start:end].removesuffix("<|im_end|>").removesuffix("<|eot_id|>")

    for read_as in (style, "any"):
        parsed = parse_tool_calls(parse_response(written).answer, cast(Style, read_as), TOOLS)

        assert parsed.problems == ()
        assert list(parsed.calls) == made
        assert parsed.answer == content


# Names of parameters of real tools, and any others; of a tool declared as `name`, in all but white space around them.
any_name = st.sampled_from(["$filter", "file name", "srv:list/items", "a>b", "a=b", "f(x)", "é", "None", "True"]) | (
    st.text(characters, min_size=1, max_size=12).filter(lambda name: name == name.strip() and "</" not in name)
)


@pytest.mark.parametrize("style", names())
@given(name=any_name, keys=st.lists(any_name, max_size=3, unique=True), value=texts | st.just("None"))
def test_any_name_of_a_parameter_is_parsed(style: str, name: str, keys: list[str], value: str) -> None:
    kinds = [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/list"}, {"type": ["boolean", "null"]}]
    parameters = {
        "type": "object",
        "properties": dict(zip(keys, kinds, strict=False)),
        "$defs": {"text": {"type": "string"}, "list": {"type": "array", "items": {"$ref": "#/$defs/text"}}},
    }
    tools = check_tools([{"name": name, "parameters": parameters}], "tools")
    call = ToolCall(name=name, arguments=dict(zip(keys, [value, [value], None], strict=False)))
    answer = Message(role="assistant", content="", tool_calls=(call,))
    sample = Sample(id="0", messages=(Message(role="user", content="?"), answer), tools=tools, thinking=False)
    rendered = Template.load(style).render(sample)
    written = rendered.text[slice(*rendered.trained[0])].removesuffix("<|im_end|>").removesuffix("<|eot_id|>")

    parsed = parse_tool_calls(parse_response(written).answer, cast(Style, style), tools)

    assert (parsed.calls, parsed.problems) == ((call,), ())
    assert not call_problem(call, tools)


@pytest.mark.parametrize("name", ["$filter", "file name", "srv:list/items"])
@pytest.mark.parametrize("style", ["nemotron3_nano", "olmo3"])
def test_an_undeclared_name_is_parsed(style: Style, name: str) -> None:
    texts: dict[str, str] = {
        "nemotron3_nano": f"<tool_call><function={name}><parameter={name}>\n1\n</parameter></function></tool_call>",
        "olmo3": f'<function_calls>{name}({name}="1")</function_calls>',
    }

    assert parse_tool_calls(texts[style], style).calls == (ToolCall(name=name, arguments={name: "1"}),)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"$ref": "#/$defs/size"}, "large", "large"),
        ({"$ref": "#/$defs/size"}, "5", "5"),
        ({"type": "object", "properties": {"size": {"$ref": "#/$defs/size"}}}, '{"size": "5"}', {"size": "5"}),
        ({"$ref": "#/$defs/flag"}, "True", True),
        ({"type": ["boolean", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": "string"}, "True", "True"),
        ({"type": "array"}, '[True, "True", None, False]', [True, "True", None, False]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
    ],
)
def test_an_xml_value_is_decoded_by_the_whole_schema(schema: dict[str, Any], written: str, value: Any) -> None:
    defs = {"size": {"enum": ["large", "5"]}, "flag": {"type": "boolean"}}
    parameters = {"type": "object", "properties": {"value": schema}, "$defs": defs}
    tools = check_tools([{"name": "f", "parameters": parameters}], "tools")
    text = f"<tool_call>\n<function=f>\n<parameter=value>\n{written}\n</parameter>\n</function>\n</tool_call>"

    (call,) = parse_tool_calls(text, tools=tools).calls

    assert call.arguments == {"value": value}
    assert not call_problem(call, tools)


@pytest.mark.parametrize("style", WRITTEN)
def test_each_style(style: Style) -> None:
    parsed = parse_tool_calls(f"Well. {WRITTEN[style]}", style, TOOLS)

    assert (parsed.answer, parsed.calls, parsed.problems) == ("Well.", (CALL,), ())


def test_a_style_ignores_the_tags_of_other_styles() -> None:
    parsed = parse_tool_calls(WRITTEN["llama_nemotron"], "olmo3", TOOLS)

    assert not parsed.calls and not parsed.problems and parsed.answer == WRITTEN["llama_nemotron"]


def test_an_xml_value_without_a_schema_is_text() -> None:
    (call,) = parse_tool_calls(WRITTEN["nemotron3_nano"], "nemotron3_nano").calls

    assert call.arguments == {"guest": "Ada", "nights": "2"}


@pytest.mark.parametrize("value", ["", " a ", "\n", "\n\n a\n", "5", "</tool_call>"])
def test_an_xml_value_keeps_its_white_space(value: str) -> None:
    text = f"<tool_call>\n<function=book_room>\n<parameter=guest>\n{value}\n</parameter>\n</function>\n</tool_call>"

    assert parse_tool_calls(text, tools=TOOLS).calls == (ToolCall(name="book_room", arguments={"guest": value}),)


def test_a_malformed_call_ends_at_its_closing_tag() -> None:
    text = '<tool_call>{"name": "a", "arguments": {"b": "</tool_call>x"},}</tool_call>after'

    assert parse_tool_calls(text).answer == "after"


def test_calls_around_a_malformed_one_are_parsed() -> None:
    broken = HERMES.replace('"guest":', "guest:")
    parsed = parse_tool_calls(f"a{HERMES}b{broken}c{HERMES}", "hermes")

    assert len(parsed.calls) == 2 and len(parsed.problems) == 1 and parsed.answer == "abc"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("<tool_call>", "JSON"),
        ("<tool_call>\n<function=a>\n<parameter=b>\n1", "ends before </parameter>"),
        ("<tool_call><function=a><parameter=b>1</parameter><parameter=b>2</parameter></function></tool_call>", "twice"),
        (HERMES.replace("</tool_call>", ""), "ends before </tool_call>"),
        ('<tool_call>{"name": "a", "arguments": {"b": NaN}}</tool_call>', "NaN"),
        ('<tool_call>{"name": "a", "arguments": {"b": 1e999}}</tool_call>', "too large"),
        ('<tool_call>{"name": "a", "arguments": {"b": ' + "9" * 5000 + "}}</tool_call>", "too large"),
        ('<tool_call>{"name": "a", "arguments": {"b": 1, "b": 2}}</tool_call>', "duplicate key"),
        ('<tool_call>{"name": "a", "arguments": "b"}</tool_call>', "arguments"),
        ('<tool_call>{"name": "a"}</tool_call>', "name and arguments"),
        ('<tool_call>{"name": "a", "arguments": {"b": "\\ud800"}}</tool_call>', "UTF-8"),
        ("<tool_call>" + "[" * 200_000 + "</tool_call>", "deep"),
        ('<TOOLCALL>{"name": "a", "arguments": {}}</TOOLCALL>', "list"),
        ("<function_calls>a(b=1, b=2)</function_calls>", "twice"),
        ("<function_calls>a(b=c)</function_calls>", "JSON"),
        ("<function_calls>a(1)</function_calls>", "="),
    ],
)
def test_a_malformed_call_is_a_problem(written: str, problem: str) -> None:
    parsed = parse_tool_calls(written)

    assert not parsed.calls
    assert problem in " ".join(parsed.problems)


pieces = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<TOOLCALL>", "</TOOLCALL>", "<function_calls>", "</function_calls>"),
        *("<function=", "</function>", "<parameter=", "</parameter>", ">", "\n", "a", "(", ")", "=", ",", '"', "\\"),
        *('{"name": "a", "arguments": {', "}}", "[", "]", "{", "}", "NaN", "1", "True", "\x00", "\ud800", "²", HERMES),
    ]
)


@given(text=st.lists(pieces, max_size=40).map("".join) | st.text(max_size=60), style=st.sampled_from(STYLES))
@example(text=HERMES * (MAX_CALLS + 5), style="any")
@example(text='<tool_call>["</tool_call><tool_call>[", ' * 20_000, style="any")
@example(text='<tool_call>"\\' * 50_000, style="any")
@example(text="<tool_call><function=a><parameter=b>" * 20_000, style="any")
@example(text="<function_calls>a(" * 50_000, style="olmo3")
@example(text="<tool_call>" + " " * 500_000, style="any")
def test_any_text_can_be_parsed(text: str, style: Style) -> None:
    parsed = parse_tool_calls(text, style, TOOLS)

    assert len(parsed.calls) <= MAX_CALLS
    json.dumps([[call.name, call.arguments] for call in parsed.calls], allow_nan=False).encode()


@pytest.mark.parametrize(
    "item",
    [
        {"id": "1", "type": "function", "function": {"name": "ring", "arguments": '{"times": 2}'}},
        {"type": "function_call", "call_id": "1", "name": "ring", "arguments": '{"times": 2}'},
        {"id": "1", "function": {"name": "ring", "arguments": {"times": 2}}},
    ],
)
def test_structured_calls(item: dict[str, Any]) -> None:
    assert read_openai_calls([item]).calls == (ToolCall(name="ring", arguments={"times": 2}, id="1"),)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    given=json_values
    | st.lists(
        st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": json_values, "arguments": json_values})})
    )
)
def test_any_structure_can_be_parsed(given: Any) -> None:
    parsed = read_openai_calls(given)

    assert all(isinstance(call.name, str) for call in parsed.calls)


def test_the_engine_s_calls_have_priority_and_reasoning_is_ignored() -> None:
    thought = parse_response(f"<think>{HERMES}</think>Hello")
    given = Response(text="", answer=HERMES, tool_calls=(ToolCall(name="ring", id="7"),))

    assert calls_of(thought).calls == ()
    assert calls_of(given).calls == (ToolCall(name="ring", id="7"),)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (CALL, ""),
        (ToolCall(name="book_rom"), "declared"),
        (ToolCall(name="book_room"), "guest"),
        (ToolCall(name="book_room", arguments={"guest": 1}), "guest"),
        (ToolCall(name="book_room", arguments={"guest": "a", "bed": "round"}), "bed"),
    ],
)
def test_calls_are_checked_against_declared_tools(call: ToolCall, problem: str) -> None:
    found = call_problem(call, TOOLS)

    assert problem in found and bool(found) == bool(problem)


@pytest.mark.parametrize("slow", [{"pattern": "(a+)+$"}, {"patternProperties": {"(a+)+$": {}}}])
def test_a_schemas_pattern_cannot_hang(slow: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"text": slow}}
    tools = check_tools([{"name": "f", "parameters": schema}], "tools")

    assert call_problem(ToolCall(name="f", arguments={"text": "a" * 60 + "!"}), tools) == ""


@pytest.mark.parametrize("tools", ["f", [{}], [{"function": {"name": "f", "parameters": {"type": "text"}}}], [3]])
def test_invalid_tools_are_refused(tools: Any) -> None:
    with pytest.raises(ValueError, match=r"reference\.tools"):
        check_tools(tools, "reference.tools")


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match="hermes"):
        parse_tool_calls("", cast(Style, "harmes"))


def test_as_many_structured_calls_as_the_limit_are_read_without_a_problem() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}

    assert not read_openai_calls([call] * MAX_CALLS).problems
    assert len(read_openai_calls([call] * (MAX_CALLS + 1)).problems) == 1
