"""A model's response, parsed once for all verifiers and rewards."""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_ext.chat.sample import ToolCall

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response of a model.

    Attributes:
        text: complete generated text, including the reasoning and its tags.
        thinking: text between the tags; None without a trace, "" for an empty trace.
        answer: text after the trace; "" if the trace does not end.
        tool_calls: calls in the answer, if an engine or `nemo_ext.chat.tool_calls` has parsed them.
        tokens: number of generated tokens; None if not counted.
        finished: True if the model ended the response; False if it was truncated at the length limit.
    """

    text: str
    thinking: str | None = None
    answer: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: int | None = None
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An engine's response and its unparsable tool calls, as verifiers expect them.

    Attributes:
        response: the response.
        unreadable: mapping from the id of each unparsable call to the reason.
    """

    response: Response
    unreadable: Mapping[str, str]


def parse_response(
    text: str,
    *,
    thinking_opened: bool = False,
    tool_calls: tuple[ToolCall, ...] = (),
    tokens: int | None = None,
    finished: bool = True,
) -> Response:
    """Split a generated text at its first `</think>`.

    Args:
        thinking_opened: True if the prompt ends inside a trace (chat templates that write `<think>` themselves).
        tool_calls, tokens, finished: see `Response`.
    """
    body = text.lstrip()
    opened = body.startswith(OPEN)
    inner = body[len(OPEN) :] if opened else text
    trace, closed, answer = inner.partition(CLOSE)
    if closed:
        thinking, answer = trace.strip(), answer.strip()
    elif opened or thinking_opened:
        thinking, answer = trace.strip(), ""
    else:
        thinking, answer = None, text.strip()
    return Response(
        text=text, thinking=thinking, answer=answer, tool_calls=tool_calls, tokens=tokens, finished=finished
    )
