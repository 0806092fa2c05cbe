"""Filter of malformed conversations and tool calls.

Nemotron 3 Nano, section 3.1.3: "We first discard malformed examples using structural checks (e.g., missing tool
definitions when tool calls are present)."
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jsonschema.exceptions import SchemaError
from pydantic.dataclasses import dataclass
from referencing.exceptions import Unresolvable

from nemo_ext.chat.json_schemas import validator
from nemo_ext.chat.response import CLOSE, OPEN
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.data.sft.filters.base import Drop, Filter, Texts
from nemo_ext.job.settings import STRICT

_SHOWN = 80

# Roles that may follow each role. Tools' answers follow a call; a conversation may end with a call.
_FOLLOWERS: dict[str, tuple[str, ...]] = {
    "start": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool",),
    "tool": ("tool", "assistant", "user"),
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Structural(Filter):
    """Filter of malformed conversations and tool calls.

    Attributes:
        arguments: True to check call arguments against the tool's JSON schema.
        end_with_assistant: True if the last message must be the assistant's.
    """

    name: ClassVar[str] = "structural"
    arguments: bool = True
    end_with_assistant: bool = True

    def drop(self, texts: Texts) -> Drop | None:
        sample = texts.sample
        return _turns(sample, end_with_assistant=self.end_with_assistant) or _tools(sample, arguments=self.arguments)


def _turns(sample: Sample, *, end_with_assistant: bool) -> Drop | None:
    """Return the reason to drop a sample for its role order or empty messages; None if there is none."""
    before = "start"
    for index, message in enumerate(sample.messages):
        where = f"messages[{index}]"
        if message.role == "system":
            continue
        if message.role == "tool" and before not in ("call", "tool"):
            return Drop("tool-answer-without-call", f"{where}: after {before}")
        if message.role not in _FOLLOWERS[before]:
            return Drop("role-order", f"{where}: {message.role} after {before}")
        if message.role == "user" and not message.content.strip():
            return Drop("empty-user", where)
        if message.role == "assistant":
            if not message.content.strip() and not message.tool_calls:
                return Drop("empty-assistant", where)
            for text in (message.content, message.reasoning):
                if text and any(tag in text for tag in (OPEN, CLOSE)):
                    return Drop("think-tags", f"{where}: {_around_tag(text)}")
        before = "call" if message.tool_calls else message.role
    if not any(message.role == "assistant" for message in sample.messages):
        return Drop("no-assistant")
    if end_with_assistant and before not in ("assistant", "call"):
        return Drop("ends-without-assistant", f"the last message is the {before}'s")
    return None


def _around_tag(text: str) -> str:
    place = min(found for tag in (OPEN, CLOSE) if (found := text.find(tag)) >= 0)
    return repr(text[max(0, place - _SHOWN // 2) : place + _SHOWN // 2])


def _tools(sample: Sample, *, arguments: bool) -> Drop | None:
    """Return the reason to drop a sample for its tool calls or tool results; None if there is none."""
    declared: dict[str, Any] | None = None
    for index, message in enumerate(sample.messages):
        if message.role == "tool" and (dropped := _answer(sample.messages, index)):
            return dropped
        for call in message.tool_calls:
            where = f"messages[{index}] calls {call.name}"
            if not sample.tools:
                return Drop("no-tools-declared", where)
            if declared is None:
                declared = {tool["function"]["name"]: tool["function"].get("parameters") for tool in sample.tools}
            if call.name not in declared:
                return Drop("unknown-tool", f"{where}; declared are {', '.join(sorted(declared))}"[:300])
            if arguments and (problem := _problem(declared[call.name], call.arguments)):
                return Drop(problem[0], f"{where}: {problem[1]}"[:300])
    return None


def _answer(messages: tuple[Message, ...], index: int) -> Drop | None:
    """Return the reason to drop a sample if its tool message at `index` answers no preceding call; otherwise None."""
    first = index
    while messages[first].role == "tool" and first > 0:
        first -= 1
    calls = messages[first].tool_calls
    where = f"messages[{index}]"
    if index - first > len(calls):
        return Drop("tool-answer-without-call", where)
    answered, known = messages[index].tool_call_id, {call.id for call in calls}
    if answered is not None and None not in known and answered not in known:
        return Drop("tool-answer-without-call", f"{where}.tool_call_id={answered!r}")
    return None


def _problem(parameters: Any, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (reason, detail) if arguments violate the schema `parameters` or the schema is invalid; otherwise None."""
    if not parameters:
        return None
    try:
        judge = validator(json.dumps(parameters, sort_keys=True))
        errors: Iterator[Any] = judge.iter_errors(arguments)
        error = next(errors, None)
    except (SchemaError, Unresolvable) as problem:
        return "bad-tool-schema", str(getattr(problem, "message", problem)).splitlines()[0]
    except Exception as problem:  # the schema is data: an invalid regular expression, endless recursion
        return "bad-tool-schema", f"{type(problem).__name__}: {problem}"
    return None if error is None else ("bad-arguments", f"{error.json_path}: {error.message}")
