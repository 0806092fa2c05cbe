"""Conversion of records in the common chat formats to samples, and back.

`openai`    {messages: [{role, content, reasoning_content?, tool_calls?, tool_call_id?}], tools?}
`sharegpt`  {conversations: [{from: human | gpt | system | tool | function_call ..., value}], system?, tools?}
`nemo`      like `sharegpt`, but with `from: User | Assistant` and `mask`, as in NeMo's chat SFT

An invalid record raises a `FormatError` with the path within the record, such as `messages[3].role`. Other keys of a
message are ignored and counted. All formats are converted to one normal form: content is a string, call arguments are
objects, and tool results follow the order of their calls. `<think>...</think>` at the start of an assistant's content
becomes its reasoning, stripped of white space at both ends, unless the message already has reasoning; the opening tag
may be missing, as in answers to prompts that end with it. A trace of only white space counts as no trace, since
templates write `<think></think>` in the mode without reasoning.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import Any, Literal, cast

from nemo_ext.chat.response import CLOSE, OPEN
from nemo_ext.chat.sample import Message, Role, Sample, ToolCall, openai_messages
from nemo_ext.job.settings import nearest

Format = Literal["auto", "openai", "sharegpt", "nemo"]
_Placed = tuple[int, Message]

_OPENAI_ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
_OPENAI_ROLES |= {"developer": "system", "function": "tool"}
_SHAREGPT_ROLES = {role: role for role in ("system", "user", "assistant", "tool", "function_call")}
_SHAREGPT_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant")
_SHAREGPT_ROLES |= {"human": "user", "observation": "tool", "function_response": "tool"}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id", "function_call", *_REASONING}
_TURN_KEYS = {"from", "value"}
_THINKING_VALUES: dict[str, bool] = {
    mode: on
    for word, on in (("on", True), ("true", True), ("yes", True), ("off", False), ("false", False), ("no", False))
    for mode in (word, f"thinking {word}", f"detailed thinking {word}")
}
# Mode lines of Domyn and Llama-Nemotron: separate lines of the system message.
_MODE_LINE = re.compile(r"^[ \t]*((?:detailed )?thinking (?:on|off))[ \t]*(?:\n|\Z)", re.IGNORECASE | re.MULTILINE)
EMPTY_TRACE = "empty traces removed"
UNOPENED_TRACE = "traces without an opening tag"
REORDERED = "tools' answers sorted into the order of their calls"
WITHOUT_CALL = "tools' answers without a call, removed"
WITHOUT_ANSWER = "calls without an answer before answered calls, removed"
MODE_LINE = "mode lines removed from system messages"


class FormatError(ValueError):
    """Raised for a record that is not a valid conversation; the message contains the path within the record."""


class UnfinishedTrace(FormatError):
    """Raised for an answer whose reasoning trace is not closed, such as a truncated answer."""


def detect(record: Mapping[str, Any]) -> Literal["openai", "sharegpt", "nemo"]:
    """Return the format of a record.

    Raises:
        FormatError: the record has neither a list of messages nor a list of conversations.
    """
    if isinstance(record.get("messages"), Sequence):
        return "openai"
    turns = record.get("conversations")
    if isinstance(turns, Sequence):
        first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
        if "role" in first:
            return "openai"
        return "nemo" if "mask" in record or first.get("from") in ("User", "Assistant") else "sharegpt"
    raise FormatError(f"expected a list in messages or conversations; the record's keys are {sorted(map(str, record))}")


def to_sample(
    record: Mapping[str, Any],
    *,
    id: str,
    format: Format = "auto",
    source: str = "",
    task: str = "",
    language: str = "",
    thinking: bool | None = None,
    ignored: Counter[str] | None = None,
    changed: Counter[str] | None = None,
) -> Sample:
    """Convert a record to a sample.

    Args:
        record: record in one of the formats.
        format: format of the record; `auto` detects it.
        id, source, task, language, thinking: attributes of the sample (see `Sample`).
        ignored: counter of ignored message keys, such as `messages[].name`.
        changed: counter of changes made while reading; if None, records from which something must be removed are
            rejected.

    Raises:
        FormatError: the record is invalid; the message states the path, the value and the expected values.
    """
    kind = detect(record) if format == "auto" else format
    key = "messages" if kind == "openai" and record.get("messages") is not None else "conversations"
    turns = record.get(key)
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise FormatError(
            f"{key}: expected a list, not {_kind(turns)}; the record's keys are {sorted(map(str, record))}"
        )
    if not turns:
        raise FormatError(f"{key} is empty: expected at least one message")
    if kind == "openai":
        read = [_openai_message(turn, f"{key}[{index}]", ignored, changed) for index, turn in enumerate(turns)]
    else:
        read = _sharegpt_messages(record, turns, ignored, changed)
    messages = [message for _, message in normal_messages(read, key, changed)]
    if not messages:
        raise FormatError(f"{key} has only tool results without a call: add the assistant message that calls the tools")
    for index, message in enumerate(messages[1:], start=1):
        if message.role == "system":
            raise FormatError(f"{key}[{index}]: a system message must come first: move or remove it")
    return Sample(
        id=id,
        messages=tuple(messages),
        tools=_tools(record.get("tools")),
        source=source,
        task=task,
        language=language,
        thinking=thinking,
    )


def template_messages(
    turns: Sequence[Any], where: str, *, unfinished: bool = False, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Convert a request's OpenAI messages to their normal form, for chat templates; other keys are kept.

    Args:
        turns: the request's messages.
        where: path of the messages, for error messages.
        unfinished: True if the model continues the last message, whose trace then need not end.
        arguments_as_text: True to pass call arguments as JSON strings (see `Template.takes_argument_text`).

    Raises:
        FormatError: a message is invalid, or a tool result has no call.
    """
    ends = len(turns) - unfinished
    read = [_openai_message(turn, f"{where}[{index}]", unfinished=index == ends) for index, turn in enumerate(turns)]
    placed = normal_messages(read, where)
    records = openai_messages((message for _, message in placed), arguments_as_text=arguments_as_text, names=True)
    return [
        {key: value for key, value in turns[place].items() if key not in _MESSAGE_KEYS} | record
        for (place, _), record in zip(placed, records, strict=True)
    ]


def to_record(sample: Sample) -> dict[str, Any]:
    """Convert a sample to an OpenAI record with call arguments as JSON strings; the inverse of `to_sample`."""
    whole: dict[str, Any] = {"id": sample.id, "messages": openai_messages(sample.messages, arguments_as_text=True)}
    if sample.tools:
        whole["tools"] = [dict(tool) for tool in sample.tools]
    for name in ("source", "task", "language"):
        if value := getattr(sample, name):
            whole[name] = value
    if sample.thinking is not None:
        whole["thinking"] = sample.thinking
    return whole


def thinking_mode(value: object, where: str) -> bool | None:
    """Parse a thinking mode as in datasets: a Boolean, `on`, `thinking off`, `detailed thinking on`; None stays None.

    Raises:
        FormatError: the value is not a thinking mode; the message names its path `where`.
    """
    if value is None or isinstance(value, bool):
        return value
    mode = value.strip().lower() if isinstance(value, str) else ""
    if mode in _THINKING_VALUES:
        return _THINKING_VALUES[mode]
    raise FormatError(f"{where}={value!r}: expected on, off, true or false")


def without_mode_line(sample: Sample) -> Sample:
    """Set the sample's mode from a line of its system message (`detailed thinking on`) and remove that line.

    The line is removed because the template states the mode in its own form. A system message that becomes empty is
    also removed.

    Raises:
        FormatError: two lines contradict each other, or a line contradicts the sample's mode.
    """
    first = sample.messages[0]
    if first.role != "system" or not (lines := _MODE_LINE.findall(first.content)):
        return sample
    modes = {_THINKING_VALUES[line.lower()] for line in lines} | ({sample.thinking} - {None})
    if len(modes) > 1:
        raise FormatError(
            f"the system message says {lines[0]!r}, but another line or the record sets the other mode; keep only one"
        )
    text = _MODE_LINE.sub("", first.content).strip("\n")
    rest = (replace(first, content=text),) if text.strip() else ()
    return replace(sample, messages=rest + sample.messages[1:], thinking=_THINKING_VALUES[lines[0].lower()])


def normal_messages(
    messages: Sequence[Message], key: str, changed: Counter[str] | None = None
) -> list[tuple[int, Message]]:
    """Return messages in normal form: without empty traces, and with tool results in the order of their calls.

    Args:
        changed: counter of changes; if None, records from which something must be removed are rejected.

    Returns:
        Tuples of a message's index in the record and the message.

    Raises:
        FormatError: a message or call would be removed, and `changed` is None.
    """
    normal: list[_Placed] = []
    callers: list[_Placed] = []
    for (answers, calls), same in groupby(
        enumerate(messages), lambda placed: (placed[1].role == "tool", bool(placed[1].tool_calls))
    ):
        run = [(place, _without_empty_trace(message, changed)) for place, message in same]
        if answers:
            del normal[len(normal) - len(callers) :]
            run = _paired(callers, run, key, changed)
        normal += run
        callers = run if calls else []
    return normal


def _paired(callers: list[_Placed], answers: list[_Placed], key: str, changed: Counter[str] | None) -> list[_Placed]:
    """Return messages with tool calls, followed by the calls' results in the order of the calls.

    Args:
        callers: consecutive assistant messages with calls; if no call has an id, nothing is reordered.
        answers: tool messages that follow them, with the calls' results.
        key: path of the messages in the record, for error messages.
        changed: counter of changes; if None, a result or call that would be removed raises FormatError.
    """
    ids = [call.id for _, message in callers for call in message.tool_calls]
    named = [name for name in ids if name is not None]
    if len(set(named)) < len(named) or (callers and not named):
        return callers + answers
    partners: dict[int, _Placed] = {}
    unnamed = []
    for answer in answers:
        place, name = answer[0], answer[1].tool_call_id
        if name is None:
            unnamed.append(answer)
        elif name in named and ids.index(name) not in partners:
            partners[ids.index(name)] = answer
        else:
            _leave_out(
                WITHOUT_CALL,
                f"{key}[{place}].tool_call_id={name!r}: no preceding unanswered call has this id; correct the id, or "
                "remove the message",
                changed,
            )
    if not callers:
        return unnamed
    free = [number for number in range(len(ids)) if number not in partners]
    partners.update(zip(free, unnamed, strict=False))
    for place, _ in unnamed[len(free) :]:
        _leave_out(WITHOUT_CALL, f"{key}[{place}]: there are more tool results than calls; remove some", changed)
    ordered = [answer for _, answer in sorted(partners.items())]
    if ordered != sorted(ordered):
        _count(changed, REORDERED)
    if not ordered:
        return callers
    # Templates match answers to calls by order only, so a gap would assign an answer to another call.
    answered = {*partners, *range(max(partners), len(ids))}
    numbers = count()
    answered_callers = []
    for place, message in callers:
        calls = tuple(call for call in message.tool_calls if next(numbers) in answered)
        for _ in range(len(message.tool_calls) - len(calls)):
            _leave_out(
                WITHOUT_ANSWER,
                f"{key}[{place}].tool_calls: a call has no result, but a later one has; add the result, or remove the "
                "call",
                changed,
            )
        if calls or message.content.strip():
            answered_callers.append((place, replace(message, tool_calls=calls)))
    return answered_callers + ordered


def _without_empty_trace(message: Message, changed: Counter[str] | None) -> Message:
    if message.reasoning is None or message.reasoning.strip():
        return message
    _count(changed, EMPTY_TRACE)
    return replace(message, reasoning=None)


def _count(changed: Counter[str] | None, change: str) -> None:
    if changed is not None:
        changed[change] += 1


def _leave_out(change: str, why: str, changed: Counter[str] | None) -> None:
    """Count a removal in `changed` under the name `change`; if `changed` is None, raise FormatError(`why`)."""
    if changed is None:
        raise FormatError(why)
    changed[change] += 1


def _openai_message(
    turn: Any,
    where: str,
    ignored: Counter[str] | None = None,
    changed: Counter[str] | None = None,
    *,
    unfinished: bool = False,
) -> Message:
    if not isinstance(turn, Mapping):
        raise FormatError(f"{where}: expected an object, not {_kind(turn)}")
    role = _role(turn.get("role"), f"{where}.role", _OPENAI_ROLES)
    if turn.get("weight") == 0:
        raise FormatError(
            f"{where}.weight=0 is not supported, as the chat template selects the trained messages: remove the key"
        )
    _count_ignored(turn, _MESSAGE_KEYS, "messages[]", ignored)
    if role != "assistant":
        if turn.get("tool_calls"):
            raise FormatError(f"{where}.tool_calls: only an assistant may call tools, not {turn['role']!r}: remove it")
        content = turn.get("content")
        text = "" if role == "tool" and content is None else _text(content, where, "content")
        answered = _identifier(turn.get("tool_call_id"), f"{where}.tool_call_id")
        return Message(role=cast(Role, role), content=text, tool_call_id=answered)
    calls = _calls(turn.get("tool_calls"), f"{where}.tool_calls")
    if legacy := turn.get("function_call"):
        calls += _calls([legacy], f"{where}.function_call")
    traces = {name: _text(turn[name], where, name) for name in _REASONING if turn.get(name) is not None}
    filled = {key: trace for key, trace in traces.items() if trace.strip()}
    if len(set(filled.values())) > 1:
        raise FormatError(f"{where}: {' and '.join(filled)} differ; keep only one of them")
    content = turn.get("content")
    if content is None and ("content" in turn or calls or traces):
        content = ""  # OpenAI writes null if there are only calls
    text = _text(content, where, "content")
    if filled or unfinished:
        return Message(role="assistant", content=text, reasoning=next(iter(filled.values()), None), tool_calls=calls)
    answer, reasoning = _without_trace(text, f"{where}.content", changed)
    empty = "" if traces else None
    return Message(
        role="assistant", content=answer, reasoning=empty if reasoning is None else reasoning, tool_calls=calls
    )


def _sharegpt_messages(
    record: Mapping[str, Any], turns: Sequence[Any], ignored: Counter[str] | None, changed: Counter[str] | None
) -> list[Message]:
    mask = record.get("mask")
    if mask is not None and _SHAREGPT_ROLES.get(str(mask).lower()) != "user":
        raise FormatError(f"mask={mask!r} is not supported, as only the user's turns can be masked: set it to 'User'")
    messages: list[Message] = []
    if system := record.get("system"):
        messages.append(Message(role="system", content=_text(system, "", "system")))
    calling = False  # True if calls may be added to the last message
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, Mapping):
            raise FormatError(f"{where}: expected an object, not {_kind(turn)}")
        role = _role(turn.get("from"), f"{where}.from", _SHAREGPT_ROLES)
        _count_ignored(turn, _TURN_KEYS, "conversations[]", ignored)
        value = turn.get("value")
        if role == "function_call":
            calls = _calls(_decoded(value, f"{where}.value"), f"{where}.value")
            before = messages.pop() if calling else Message(role="assistant")
            messages.append(replace(before, tool_calls=before.tool_calls + calls))
        elif role == "assistant":
            answer, reasoning = _without_trace(_text(value, where, "value"), f"{where}.value", changed)
            messages.append(Message(role="assistant", content=answer, reasoning=reasoning))
        elif role == "tool" and isinstance(value, Mapping):
            messages.append(Message(role="tool", content=json.dumps(_decoded(value, where), ensure_ascii=False)))
        else:
            messages.append(Message(role=cast(Role, role), content=_text(value, where, "value")))
        calling = role in ("assistant", "function_call")
    return messages


def _role(value: object, where: str, known: Mapping[str, str]) -> str:
    if isinstance(value, str):
        if (role := known.get(value) or known.get(value.lower())) is not None:
            return role
        raise FormatError(f"{where}={value!r} is not a role; {nearest(value.lower(), known)}")
    raise FormatError(f"{where}: expected a role ({', '.join(known)}), not {_kind(value)}")


def checked_text(value: object, where: str, key: str) -> str:
    """Return the value if it is a string that can be encoded in UTF-8.

    Args:
        where: path of the object that holds the value, for error messages; "" for the record itself.
        key: the value's key in that object.

    Raises:
        FormatError: the value is not such a string.
    """
    if not isinstance(value, str):
        raise FormatError(f"{_at(where, key)}: expected a string, not {_kind(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FormatError(
                f"{_at(where, key)}: cannot be encoded as UTF-8 ({error.reason} at character {error.start}); correct it"
            ) from None
    return value


def optional_text(value: object, key: str) -> str:
    """Return a string, or "" for None; `key` is its path in the record, for error messages.

    Raises:
        FormatError: the value is neither None nor a string that can be encoded in UTF-8.
    """
    return "" if value is None else checked_text(value, "", key)


def _text(value: Any, where: str, key: str) -> str:
    """Return a message's content as text, joining the parts of a list; raise FormatError if it is not text."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return checked_text(value, where, key)
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type", "text") if isinstance(part, Mapping) else _kind(part)
        if not isinstance(part, Mapping) or kind not in ("text", "input_text", "output_text"):
            raise FormatError(f"{_at(where, key)}[{index}]: a part of type {kind!r} is not supported; use only text")
        texts.append(_text(part.get("text"), f"{_at(where, key)}[{index}]", "text"))
    return "".join(texts)


def _without_trace(text: str, where: str, changed: Counter[str] | None) -> tuple[str, str | None]:
    """Split an assistant's text into answer and trace; the trace is None if the text does not start with one.

    Like `parse_response`, except that if text precedes the opening tag, the tags are treated as quotations, and that
    a trace without an end raises `UnfinishedTrace`.
    """
    opened = text.lstrip().startswith(OPEN)
    if not opened and CLOSE not in text:
        return text, None
    trace, closed, answer = (text.lstrip()[len(OPEN) :] if opened else text).partition(CLOSE)
    if not closed:
        raise UnfinishedTrace(f"{where}: the trace does not end, as {CLOSE} is missing after {OPEN}: add it")
    if not opened:
        if OPEN in trace:
            return text, None
        _count(changed, UNOPENED_TRACE)
    return answer.lstrip(), trace.strip()


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    calls = []
    for index, call in enumerate([value] if isinstance(value, Mapping) else _listed(value, where)):
        here = f"{where}[{index}]"
        if not isinstance(call, Mapping):
            raise FormatError(f"{here}: expected an object, not {_kind(call)}")
        function = call.get("function", call)
        if not isinstance(function, Mapping):
            raise FormatError(f"{here}.function: expected an object, not {_kind(function)}")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise FormatError(f"{here}.name: expected the name of a tool, not {name!r}")
        arguments = _decoded(function.get("arguments"), f"{here}.arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise FormatError(f"{here}.arguments: expected an object, not {_kind(arguments)}")
        checked_text(name, here, "name")
        calls.append(ToolCall(name=name, arguments=arguments, id=_identifier(call.get("id"), f"{here}.id")))
    return tuple(calls)


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    tools = []
    for index, tool in enumerate(_listed(_decoded(value, "tools") or [], "tools")):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise FormatError(
                f"tools[{index}]: expected {{type: function, function: {{name, parameters ...}}}}, not "
                f"{str(tool)[:60]!r}"
            )
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(tools)


def _decoded(value: Any, where: str) -> Any:
    """Decode a JSON string, or None if it is empty; return other values unchanged. Invalid JSON raises FormatError."""
    if isinstance(value, str):
        if not value.strip():
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{where}: expected JSON, not other text ({error})") from None
    if value:
        try:  # fails for lone surrogates, NaN, and Parquet types without a JSON equivalent, such as dates
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise FormatError(f"{where}: the value cannot be written as JSON ({error}); correct or remove it") from None
    return value


def _listed(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise FormatError(f"{where}: expected a list, not {_kind(value)}")
    return value


def _identifier(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise FormatError(f"{where}: expected a string or a whole number, not {_kind(value)}")


def _count_ignored(turn: Mapping[str, Any], known: set[str], where: str, ignored: Counter[str] | None) -> None:
    if ignored is not None and not turn.keys() <= known:
        ignored.update(f"{where}.{key}" for key, value in turn.items() if key not in known and value is not None)


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
