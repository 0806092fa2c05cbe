"""What a model answered, taken apart once for all verifiers and rewards."""

from dataclasses import dataclass

from nemo_ext.chat.sample import ToolCall

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One answer.

    Attributes:
        text: all that was generated, with the reasoning and its tags.
        thinking: between the tags; None where there is no trace, "" where it is empty.
        answer: what follows the trace; "" where a trace does not end.
        tool_calls: those that the answer makes, where an engine or `nemo_ext.chat.tool_calls` has parsed them.
        tokens: generated tokens in all; None if nobody counted.
        thinking_tokens: those of the trace.
        finished: whether the model ended it; False if the limit cut it off.
    """

    text: str
    thinking: str | None = None
    answer: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: int | None = None
    thinking_tokens: int | None = None
    finished: bool = True


def parse_response(
    text: str,
    *,
    thinking_opened: bool = False,
    tool_calls: tuple[ToolCall, ...] = (),
    tokens: int | None = None,
    thinking_tokens: int | None = None,
    finished: bool = True,
) -> Response:
    """Take a generated text apart at its first `</think>`.

    Args:
        text: as generated.
        thinking_opened: the prompt ends inside a trace (chat templates that write `<think>` themselves).
        tool_calls: as `Response` has them; as are the others.
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
        text=text,
        thinking=thinking,
        answer=answer,
        tool_calls=tool_calls,
        tokens=tokens,
        thinking_tokens=thinking_tokens,
        finished=finished,
    )
