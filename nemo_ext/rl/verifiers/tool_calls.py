"""Verifier for the tool calls of a single turn, which must be exactly the expected ones.

A reference is {expected: [{name, arguments}], order: any | as_given, tools}. Arguments are compared as JSON: 1 and 1.0
are equal, true is not a number, and a missing argument takes its schema's default. NeMo Gym's xlam_fc also requires the
same number of calls, but allows calls to have unexpected arguments.

With {accepted: [{name, arguments: {key: [values]}}]} instead of `expected`, calls are compared as in the Berkeley
Function-Calling Leaderboard. Each argument has a list of accepted values, which contains "" if it may be omitted. In
strings, letter case, spaces, quotes and the signs ,./-_*^ are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nemo_ext.chat.response import Response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.chat.tool_calls import STYLES, Style, call_problem, calls_of, check_tools, read_openai_calls
from nemo_ext.job.settings import check_keys
from nemo_ext.rl.environments import Environment
from nemo_ext.rl.verdict import Verdict

Order = Literal["any", "as_given"]
_DEPTH = 64
_NOTHING = dict.fromkeys(map(ord, " ,./-_*^'\""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Expected tool calls.

    Attributes:
        expected: expected calls; empty if the model should answer without calls.
        order: `as_given` if the calls must come in this order, otherwise `any`.
        accepted: whether the calls' arguments are lists of accepted values.
        tools: the task's declared tools, whose schemas every call must match; None to skip this check.
    """

    expected: tuple[ToolCall, ...]
    order: Order = "any"
    accepted: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = None


def check(reference: Mapping[str, Any]) -> Reference:
    """Parse a task's reference: {expected or accepted: [{name, arguments}], order: any, tools: [...]}.

    Raises:
        ValueError: the reference is invalid, or an expected call matches no declared tool; the message names the key.
    """
    key = "accepted" if "accepted" in reference else "expected"
    check_keys(reference, (key, "order", "tools"), required=(key,), where="reference")
    calls, order = reference[key], reference.get("order", "any")
    expected = expected_calls(calls, f"reference.{key}")
    if key == "accepted":
        for call in expected:
            if wrong := [name for name, values in call.arguments.items() if not (isinstance(values, list) and values)]:
                raise ValueError(
                    f"reference.accepted: {call.name}: {wrong[0]} must be a non-empty list of accepted values"
                )
    if order not in ("any", "as_given"):
        raise ValueError(f"reference.order must be any or as_given, not {order!r}")
    tools = reference.get("tools")
    if tools is not None:
        tools = check_tools(tools, "reference.tools")
        for index, call in enumerate(expected if key == "expected" else ()):
            if problem := call_problem(call, tools):
                raise ValueError(f"reference.expected[{index}] does not match reference.tools: {problem}")
    return Reference(expected=expected, order=order, accepted=key == "accepted", tools=tools)


def expected_calls(calls: Any, where: str) -> tuple[ToolCall, ...]:
    """Parse a reference's list of expected calls, each {name, arguments}.

    Args:
        calls: value in the reference.
        where: its key, such as reference.expected, for messages.

    Raises:
        ValueError: the value is not such a list.
    """
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where} must be a list of calls {{name, arguments}}, not {calls!r}")
    read = read_openai_calls(calls)
    if read.problems:
        raise ValueError(f"invalid tool call: {read.problems[0].replace('tool_calls', where)}")
    return read.calls


def verify(response: Response, reference: Reference, *, style: Style = "any") -> Verdict:
    """Return the verdict `correct` if the response makes the expected calls and no others.

    `style` is the format of calls written in the response's text.
    """
    tools = reference.tools
    parsed = calls_of(response, tools or (), style)
    names = ", ".join(call.name for call in parsed.calls)[:200] or None
    if parsed.problems:
        return Verdict.wrong(f"malformed call: {parsed.problems[0]}"[:300], names)
    if not response.answer and not parsed.calls:
        return Verdict.wrong("no answer")
    if tools is not None:
        for call in parsed.calls:
            if problem := call_problem(call, tools):
                return Verdict.wrong(problem, names)
    if len(parsed.calls) != len(reference.expected):
        return Verdict.wrong(f"{len(parsed.calls)} calls instead of {len(reference.expected)}", names)
    defaults = _defaults(tools or ())
    remaining = list(parsed.calls)

    def same(call: ToolCall, expected: ToolCall) -> bool:
        if call.name != expected.name:
            return False
        if reference.accepted:
            return _accepts(dict(call.arguments), dict(expected.arguments))
        omitted = defaults.get(call.name, {})
        return same_json({**omitted, **call.arguments}, {**omitted, **expected.arguments})

    for expected in reference.expected:
        candidates = remaining[:1] if reference.order == "as_given" else remaining
        fitting = [place for place, call in enumerate(candidates) if same(call, expected)]
        if not fitting:
            return Verdict.wrong(f"no call matches the expected call of {expected.name}", names)
        del remaining[fitting[0]]
    return Verdict.correct(names)


def environment(*, style: Style = "any") -> Environment:
    """Create the environment `tool_calls`, for single turns that must make the expected tool calls.

    Args:
        style: format of calls in raw text; see `nemo_ext.chat.tool_calls`.

    Raises:
        ValueError: the style is unknown.
    """
    check_style(style)
    return Environment(
        name="tool_calls",
        check=check,
        verify=lambda response, reference: verify(response, reference, style=style),
    )


def check_style(style: Any) -> None:
    """Raise ValueError if `style` is not a known format of tool calls."""
    if style not in STYLES:
        raise ValueError(f"style must be one of {', '.join(STYLES)}, not {style!r}")


def _defaults(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the arguments' default values, as a mapping from tool names to mappings from argument names to values."""
    made = {}
    for tool in tools:
        properties = (tool["function"].get("parameters") or {}).get("properties") or {}
        made[tool["function"]["name"]] = {
            key: schema["default"]
            for key, schema in properties.items()
            if isinstance(schema, Mapping) and "default" in schema
        }
    return made


def _accepts(value: Any, accepted: Any) -> bool:
    """Return whether `value` matches `accepted`, where each key of an object maps to a list of accepted values."""
    if isinstance(value, Mapping) and isinstance(accepted, Mapping):
        return value.keys() <= accepted.keys() and all(
            any(_accepts(value[key], each) for each in values) if key in value else "" in values
            for key, values in ((key, given if isinstance(given, list) else [given]) for key, given in accepted.items())
        )
    if isinstance(value, list | tuple) and isinstance(accepted, list | tuple):
        return len(value) == len(accepted) and all(_accepts(*pair) for pair in zip(value, accepted, strict=True))
    if isinstance(value, str) and isinstance(accepted, str):
        return value.lower().translate(_NOTHING) == accepted.lower().translate(_NOTHING)
    return same_json(value, accepted)


def same_json(one: Any, other: Any, depth: int = 0) -> bool:
    """Return whether two values are equal as JSON; False if they are nested too deeply."""
    if depth > _DEPTH:
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(value, other[key], depth + 1) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same_json(*pair, depth + 1) for pair in zip(one, other, strict=True))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return bool(one == other)
