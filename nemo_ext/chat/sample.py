"""Conversations, independent of the format they came in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of the assistant.

    Attributes:
        name: name of the tool.
        arguments: decoded arguments, by name.
        id: identifier by which the tool's answer refers to the call; None where the data have none.
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
        reasoning: the assistant's trace before its answer, without tags; None for an answer without one.
        tool_calls: calls at the end of an assistant's message.
        tool_call_id: id of the call that a tool's message answers.
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
        id: identifier, unique in its source.
        messages: messages in order; at most one system message, at the start.
        tools: JSON schemas of the declared tools, as OpenAI's `tools`.
        source: name of the sample's source.
        task: task that it teaches (code, math, chat ...), for shares and reports; "" if unknown.
        language: ISO 639-1 code; "" if unknown.
        thinking: mode of the sample; None where the template has no modes or it is not decided yet.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    task: str = ""
    language: str = ""
    thinking: bool | None = None
