"""Conversion of responses from a NeMo Gym model server into the form that verifiers take.

If the model server has already parsed reasoning and tool calls, these are used; otherwise reasoning is parsed here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_ext.chat.response import CLOSE, OPEN, Answered, Response, parse_response
from nemo_ext.chat.sample import ToolCall
from nemo_ext.chat.tool_calls import MAX_CALLS, read_openai_calls


def read_answer(answered: Mapping[str, Any], *, thinking_opened: bool = False) -> Answered:
    """Parse the response of one turn, or of all turns of an agent together.

    Args:
        answered: OpenAI's `response`, with output items, `usage` and `incomplete_details`.
        thinking_opened: True if the prompt ends inside a reasoning trace and the model server parses no reasoning.
    """
    output = [item for item in answered.get("output") or () if isinstance(item, Mapping)]
    finished = not answered.get("incomplete_details")
    calls, unreadable = _calls(output)
    trace = "\n".join(text for item in output if item.get("type") == "reasoning" for text in _texts(item, "summary"))
    said = (item for item in output if item.get("type") == "message" and item.get("role", "assistant") == "assistant")
    answer = "".join(text for item in said for text in _texts(item, "content"))
    if trace.strip():
        end = f"\n{CLOSE}\n" if answer.strip() or calls or finished else ""
        # Not `parse_response`: a closing tag quoted in the trace must not turn the rest of the trace into an answer.
        response = Response(text=f"{OPEN}\n{trace}{end}{answer}", thinking=trace.strip(), answer=answer.strip())
    else:
        response = parse_response(answer, thinking_opened=thinking_opened)
    usage = answered.get("usage")
    tokens = usage.get("output_tokens") if isinstance(usage, Mapping) else None
    response = replace(response, tool_calls=calls, tokens=tokens, finished=finished)
    return Answered(response=response, unreadable=unreadable)


def last_turn(answered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response with only the output after the last tool result."""
    output = list(answered.get("output") or ())
    outputs = [
        place
        for place, item in enumerate(output)
        if isinstance(item, Mapping) and item.get("type") == "function_call_output"
    ]
    return {**answered, "output": output[outputs[-1] + 1 :] if outputs else output}


def _texts(item: Mapping[str, Any], key: str) -> list[str]:
    parts = item.get(key)
    if isinstance(parts, str):
        return [parts]
    texts = [part.get("text") for part in (parts if isinstance(parts, list) else ()) if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def _calls(output: Sequence[Mapping[str, Any]]) -> tuple[tuple[ToolCall, ...], dict[str, str]]:
    calls: list[ToolCall] = []
    unreadable: dict[str, str] = {}
    for item in output:
        if item.get("type") != "function_call":
            continue
        if len(calls) + len(unreadable) == MAX_CALLS:
            unreadable[str(item.get("call_id"))] = f"more than {MAX_CALLS} calls; further calls are ignored"
            break
        read = read_openai_calls([item])
        calls += read.calls
        if read.problems:
            unreadable[str(item.get("call_id"))] = read.problems[0].partition(": ")[2]
    return tuple(calls), unreadable
