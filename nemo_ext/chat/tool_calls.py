"""Parser of tool calls in model output, in the format of each chat template.

style            format of a call
nemotron3_nano   <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
domyn, hermes    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>
llama_nemotron   <TOOLCALL>[{"name": NAME, "arguments": {...}}, ...]</TOOLCALL>
olmo3            <function_calls>NAME(KEY=JSON, ...), one per line</function_calls>
any              all of these, detected by their tags

The parser reads everything that `nemo_ext.chat.template` writes. No model output raises an error or takes more than
linear time.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from jsonschema.exceptions import SchemaError

from nemo_ext.chat.json_schemas import validator
from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import ToolCall

Style = Literal["any", "nemotron3_nano", "domyn", "hermes", "llama_nemotron", "olmo3"]
STYLES: tuple[str, ...] = get_args(Style)

MAX_CALLS = 64
"""Maximum number of calls in one answer; correct answers in all our environments have far fewer."""

_SPACE = re.compile(r"\s*")
_MAX_NAME = 1000
_KINDS: tuple[Any, ...] = ("", 0, None, [], {})
# Python's constants outside of JSON strings, and not as names; their JSON equivalents have the same length.
_PYTHON = re.compile(r'"(?:[^"\\]|\\.)*+"|(?<![\w.\-])(?:True|False|None)(?![\w.\-])(?!\s*[=(])', re.DOTALL)
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
# Formats are detected by their first tag; after <tool_call> the next characters distinguish the two formats.
TAGS = {"<tool_call>": "</tool_call>", "<TOOLCALL>": "</TOOLCALL>", "<function_calls>": "</function_calls>"}
"""Tags around tool calls, in all formats."""
_STYLE_TAGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("nemotron3_nano", "domyn", "hermes"), ("<tool_call>",)),
    **{"any": tuple(TAGS), "llama_nemotron": ("<TOOLCALL>",), "olmo3": ("<function_calls>",)},
}


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """An answer split into text and calls.

    Attributes:
        answer: text without the calls.
        calls: parsed calls, in order.
        problems: descriptions of the calls that could not be parsed.
    """

    answer: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def parse_tool_calls(text: str, style: Style = "any", tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
    """Parse the tool calls in a text.

    Args:
        style: format in which the model's template writes calls.
        tools: declared tools, in the form of OpenAI's `tools`; XML-style values are decoded by their schemas, and kept
            as strings without one.

    Raises:
        ValueError: the style is unknown.
    """
    if style not in STYLES:
        raise ValueError(f"unknown tool call style {style!r}: expected one of {', '.join(STYLES)}")
    tags = _STYLE_TAGS[style]
    opening = re.compile("|".join(map(re.escape, tags)))
    plain: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    position = 0
    while (tag := opening.search(text, position)) is not None:
        plain.append(text[position : tag.start()])
        scanner = _Scanner(text, tag.end())
        try:
            read = _reader(tag[0], style, scanner)(scanner, tools)
            scanner.skip_space()
            scanner.expect(TAGS[tag[0]])
            calls += read
            position = scanner.position
        except _Malformed as problem:
            problems.append(f"{tag[0]} at character {tag.start()}: {problem}")
            # Continue where parsing stopped, so that no character is parsed twice.
            closing = text.find(TAGS[tag[0]], max(scanner.position, tag.end()))
            position = len(text) if closing < 0 else closing + len(TAGS[tag[0]])
        if len(calls) + len(problems) > MAX_CALLS:
            problems.append(f"more than {MAX_CALLS} calls: the rest is not read")
            return ParsedCalls("".join(plain).strip(), tuple(calls[:MAX_CALLS]), tuple(problems))
    plain.append(text[position:])
    return ParsedCalls("".join(plain).strip(), tuple(calls), tuple(problems))


def read_openai_calls(items: Any) -> ParsedCalls:
    """Read the structured calls of an OpenAI message (`tool_calls`) or response (items of type `function_call`).

    Args:
        items: list of {id, function: {name, arguments}} or of {call_id, name, arguments}; arguments are a JSON string
            or an object.
    """
    if items is None:
        return ParsedCalls("")
    calls: list[ToolCall] = []
    problems: list[str] = []
    for index, item in enumerate(items if isinstance(items, list | tuple) else [items]):
        try:
            calls.append(_openai_call(item))
        except _Malformed as problem:
            problems.append(f"tool_calls[{index}]: {problem}")
    if len(calls) > MAX_CALLS:
        problems.append(f"more than {MAX_CALLS} calls: the rest is not read")
    return ParsedCalls("", tuple(calls[:MAX_CALLS]), tuple(problems))


def calls_of(response: Response, tools: Sequence[Mapping[str, Any]] = (), style: Style = "any") -> ParsedCalls:
    """Return a response's calls: those the engine parsed, otherwise those in its answer, never in its reasoning."""
    if response.tool_calls:
        parsed = read_openai_calls(
            [
                {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in response.tool_calls
            ]
        )
        return replace(parsed, answer=response.answer)
    return parse_tool_calls(response.answer, style, tools)


def check_tools(tools: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the declared tools in the form of OpenAI's chat completions, converting the Responses API's flat form.

    Raises:
        ValueError: a tool is invalid; the message starts with `where`.
    """
    if not isinstance(tools, list | tuple):
        raise ValueError(f"{where} must be a list of tools, not {tools!r}")
    checked: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}[{index}] must be {{type: function, function: {{name, ...}}}}, not {tool!r}")
        try:
            validator(_as_text(function.get("parameters") or {}), quick=True)
        except (SchemaError, TypeError, ValueError, RecursionError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{where}[{index}].function.parameters must be a JSON schema ({reason})") from None
        checked.append({"type": "function", "function": function})
    return tuple(checked)


def call_problem(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the reason why a call does not match the declared tools; "" if it does.

    A schema's `pattern`, `patternProperties` and `uniqueItems` are not checked, because their time can grow with model
    output.
    """
    declared = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if call.name not in declared:
        return f"no tool {_shown(call.name)} is declared"
    try:
        error = next(validator(_as_text(declared[call.name]), quick=True).iter_errors(dict(call.arguments)), None)
    except Exception as problem:  # an unresolvable reference in the schema, arguments nested too deep
        return f"{call.name}: {type(problem).__name__}"
    return "" if error is None else f"{call.name}: {_shown(error.json_path)}: {_shown(error.message)}"


class _Malformed(Exception):
    """Raised for a call that cannot be parsed."""


class _Scanner:
    """Reader of a string from a position that only moves forward."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def skip_space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()

    def at(self, word: str) -> bool:
        return self.text.startswith(word, self.position)

    def expect(self, word: str) -> None:
        if not self.at(word):
            seen = self.text[self.position : self.position + 20]
            raise _Malformed(f"expected {word} instead of {seen!r}" if seen else f"ends before {word}")
        self.position += len(word)

    def until(self, word: str) -> str:
        """Return the text before the next occurrence of a word, and move past the word."""
        end = self.text.find(word, self.position)
        if end < 0:
            self.position = len(self.text)
            raise _Malformed(f"ends before {word}")
        before = self.text[self.position : end]
        self.position = end + len(word)
        return before

    def name(self, mark: str, known: Iterable[str]) -> str:
        """Read a name and the delimiter `mark` after it; a known name may contain any characters."""
        name = max((name for name in known if self.at(name + mark)), key=len, default=None)
        if name is None:
            name, end, _ = self.text[self.position : self.position + _MAX_NAME].partition(mark)
            if not end or "\n" in name or "<" in name:
                raise _Malformed(f"expected a name and {mark} instead of {name[:20]!r}")
            self.position += len(name + mark)
            return name.strip()
        self.position += len(name + mark)
        return name

    def json(self) -> Any:
        """Read a JSON value; the position moves forward even if the value is invalid."""
        value, self.position, problem = _decode(self.text, self.position)
        if problem:
            raise _Malformed(problem)
        return value


def _reader(
    tag: str, style: str, scanner: _Scanner
) -> Callable[[_Scanner, Sequence[Mapping[str, Any]]], list[ToolCall]]:
    scanner.skip_space()
    if tag == "<TOOLCALL>":
        return _json_calls
    if tag == "<function_calls>":
        return _function_calls
    if style == "nemotron3_nano" or (style == "any" and scanner.at("<function=")):
        return _xml_call
    return _json_call


def _json_call(scanner: _Scanner, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    return [_call_from_object(scanner.json())]


def _json_calls(scanner: _Scanner, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    listed = scanner.json()
    if not isinstance(listed, list):
        raise _Malformed("expected a list of calls")
    return [_call_from_object(item) for item in listed]


def _function_calls(scanner: _Scanner, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    declared = _parameters(tools)
    # Models that write such calls also write Python's True, False and None.
    scanner.text = scanner.text[: scanner.position] + _as_json(scanner.text[scanner.position :])
    while True:
        scanner.skip_space()
        if scanner.at("</function_calls>"):
            return calls
        name = scanner.name("(", declared)
        arguments: dict[str, Any] = {}
        scanner.skip_space()
        while not scanner.at(")"):
            if arguments:
                scanner.expect(",")
                scanner.skip_space()
            key = scanner.name("=", _properties(declared.get(name)))
            scanner.skip_space()
            if key in arguments:
                raise _Malformed(f"{name}: {key} is given twice")
            arguments[key] = scanner.json()
            scanner.skip_space()
        scanner.expect(")")
        calls.append(_call(name, arguments))


def _as_json(text: str) -> str:
    """Replace Python's True, False and None, outside of strings, with true, false and null."""
    return _PYTHON.sub(lambda found: _JSON_WORDS.get(found[0], found[0]), text)


def _xml_call(scanner: _Scanner, tools: Sequence[Mapping[str, Any]]) -> list[ToolCall]:
    scanner.expect("<function=")
    declared = _parameters(tools)
    name = scanner.name(">", declared)
    arguments: dict[str, Any] = {}
    while True:
        scanner.skip_space()
        if scanner.at("</function>"):
            scanner.expect("</function>")
            return [_call(name, arguments)]
        scanner.expect("<parameter=")
        key = scanner.name(">", _properties(declared.get(name)))
        if key in arguments:
            raise _Malformed(f"{name}: {key} is given twice")
        written = scanner.until("</parameter>").removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(written, declared.get(name), key, f"{name}: {key}")


def _parameters(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameter schemas of the declared tools, keyed by tool name."""
    functions = (tool.get("function", tool) for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions if function.get("name")}


def _properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _typed(written: str, schema: Any, key: str, where: str) -> Any:
    """Decode an XML-style argument by the parameters' schema: strings are written verbatim, other values as JSON.

    The value is validated within the whole schema, because its own schema may refer to other parts.
    """
    if key not in _properties(schema) and not any(_broken(schema, key, value) for value in _KINDS):
        return written  # the schema does not constrain it
    broken = _broken(schema, key, written)
    is_text = not broken & {"type", "anyOf", "oneOf", "not"}
    value, end, problem = _decode(written, 0)
    if problem and broken:
        value, end, problem = _decode(_as_json(written), 0)
    if not problem and not written[end:].strip() and not isinstance(value, str) and not _broken(schema, key, value):
        return value  # the schema allows both: JSON has priority over text
    if is_text:
        return written
    if problem or written[end:].strip():
        raise _Malformed(f"{where}: {_shown(written)} is not JSON" + (f" ({problem})" if problem else ""))
    return value  # may have a wrong type, which schema validation reports


def _broken(schema: Any, key: str, value: Any) -> set[str]:
    """Return the keywords of a schema that the value of parameter `key` violates; empty if it is valid."""
    try:
        errors = list(validator(_as_text(schema or {}), quick=True).iter_errors({key: value}))
    except Exception:  # an invalid schema, or an unresolvable reference
        return set() if isinstance(value, str) else {"$ref"}
    return {str(error.validator) for error in errors if error.absolute_path and error.absolute_path[0] == key}


def _openai_call(item: Any) -> ToolCall:
    if not isinstance(item, Mapping):
        raise _Malformed("expected an object")
    function = item.get("function", item)
    if not isinstance(function, Mapping):
        raise _Malformed("function: expected an object")
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        text = arguments.strip() or "{}"
        arguments, end, problem = _decode(text, 0)
        if problem or text[end:].strip():
            raise _Malformed(f"arguments: {problem or 'more than one JSON value'}")
    identifier = item.get("id") if "function" in item else item.get("call_id", item.get("id"))
    call = _call_from_object({"name": name, "arguments": {} if arguments is None else arguments})
    return replace(call, id=identifier) if isinstance(identifier, str) else call


def _call_from_object(value: Any) -> ToolCall:
    if not isinstance(value, Mapping) or set(value) != {"name", "arguments"}:
        raise _Malformed("expected an object with name and arguments")
    return _call(value["name"], value["arguments"])


def _call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise _Malformed("name: expected the name of a tool")
    if not isinstance(arguments, Mapping):
        raise _Malformed(f"{_shown(name)}: arguments: expected an object")
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise _Malformed("arguments: cannot be written as JSON in UTF-8") from None
    return ToolCall(name=name, arguments=arguments)


def _decode(text: str, position: int) -> tuple[Any, int, str]:
    """Decode the JSON value at a position; return the value, its end position and a problem ("" if there is none).

    Invalid JSON that Python accepts (NaN, Infinity, duplicate keys) and numbers beyond the range of floats are
    rejected.
    """
    refused: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(items)
        if len(mapping) != len(items):
            refused.append("an object has a duplicate key")
        return mapping

    def constant(word: str) -> None:
        refused.append(f"{word} is not JSON")

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            refused.append("a number is too large")
        return value

    def whole(digits: str) -> int:
        if len(digits) > 300:  # Python itself refuses 4300
            refused.append("a number is too large")
            return 0
        return int(digits)

    decoder = json.JSONDecoder(object_pairs_hook=pairs, parse_constant=constant, parse_float=real, parse_int=whole)
    try:
        value, end = decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
        return None, max(error.pos, position), f"not JSON: {error.msg} at character {error.pos}"
    except RecursionError:
        return None, len(text), "nested too deep"
    return value, end, refused[0] if refused else ""


def _as_text(schema: Any) -> str:
    return json.dumps(schema, sort_keys=True)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
