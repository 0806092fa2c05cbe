"""A conversation, whatever format it came in."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the assistant makes.

    Attributes:
        name: of the tool.
        arguments: by their names, decoded.
        id: by which the tool's answer refers to it; None where the data have none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message.

    Attributes:
        role: who speaks.
        content: what is said, without the reasoning.
        reasoning: the assistant's trace before its answer, without tags; None for an answer without one.
        tool_calls: calls at the end of an assistant's message.
        tool_call_id: which call a tool's message answers.
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
        id: unique in its source.
        messages: a system message at most once, at the start.
        tools: JSON schemas of the tools that are declared, as OpenAI's `tools`.
        source: name of the source that it comes from.
        task: what it teaches (code, math, chat ...), for shares and reports; "" if unknown.
        language: ISO 639-1 code; "" if unknown.
        thinking: the mode that the sample is in; None where the template has no modes or it was not decided yet.
    """

    id: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    task: str = ""
    language: str = ""
    thinking: bool | None = None
