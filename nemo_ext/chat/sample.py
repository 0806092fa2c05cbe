"""Conversations in a form independent of their source format."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of the assistant.

    Attributes:
        name: name of the tool.
        arguments: decoded arguments, keyed by name.
        id: identifier by which the tool result refers to the call; None if unknown.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: role of the speaker.
        content: text, without the reasoning.
        reasoning: the assistant's trace before its answer, without tags; None without a trace.
        tool_calls: calls at the end of an assistant message.
        tool_call_id: id of the call that a tool message answers.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation.

    Attributes:
        id: identifier, unique within its source.
        messages: messages in order; at most one system message, at the start.
        tools: JSON schemas of the declared tools, in the form of OpenAI's `tools`.
        source: name of the sample's source.
        task: task that the sample trains (code, math, chat ...), for shares and reports; "" if unknown.
        language: ISO 639-1 code; "" if unknown.
        thinking: mode of the sample; None if the template has no modes or the mode is not set yet.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    task: str = ""
    language: str = ""
    thinking: bool | None = None


def has_reasoning(messages: Iterable[Message]) -> bool:
    """Return whether any message has a trace, even an empty one."""
    return any(message.reasoning is not None for message in messages)


def openai_messages(
    messages: Iterable[Message], *, arguments_as_text: bool = False, names: bool = False
) -> list[dict[str, Any]]:
    """Convert messages to the OpenAI format.

    Args:
        arguments_as_text: True to write call arguments as JSON strings; otherwise as objects, as in chat templates.
        names: True to add the tool's `name` to tool results, which some templates write.
    """
    records = []
    pending: list[ToolCall] = []
    for message in messages:
        record: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.role != "tool":
            pending = [*pending, *message.tool_calls] if message.tool_calls else []
        elif pending and names:
            call = next((call for call in pending if call.id and call.id == message.tool_call_id), pending[0])
            pending.remove(call)
            record["name"] = call.name
        if message.reasoning is not None:
            record["reasoning_content"] = message.reasoning
        if message.tool_calls:
            record["tool_calls"] = [_call(call, as_text=arguments_as_text) for call in message.tool_calls]
        if message.tool_call_id is not None:
            record["tool_call_id"] = message.tool_call_id
        records.append(record)
    return records


def _call(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if as_text else dict(call.arguments)
    identifier = {} if call.id is None else {"id": call.id}
    return {"type": "function", "function": {"name": call.name, "arguments": arguments}} | identifier


def spoken(messages: Iterable[Message]) -> list[str]:
    """Return all non-empty texts of messages: traces, contents, and the names and JSON arguments of calls."""
    texts = []
    for message in messages:
        texts += [message.reasoning or "", message.content]
        for call in message.tool_calls:
            texts += [call.name, json.dumps(call.arguments, ensure_ascii=False)]
    return [text for text in texts if text]
