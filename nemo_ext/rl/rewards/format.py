r"""Scores in [0, 1] for a response's format: <think> tags that match the thinking mode, and exactly one \boxed{}.

The papers differ: Llama-Nemotron requires both tags, while Domyn-Small counts closing tags and boxes.
"""

from nemo_ext.chat.response import CLOSE, OPEN, Response, parse_response
from nemo_ext.chat.tool_calls import Style, parse_tool_calls
from nemo_ext.rl.answers import boxes


def think_tags(response: Response, *, thinking: bool, opened: bool = False) -> float:
    """Return 1 for exactly one `<think> ... </think>` at the start with thinking on, or no tags with it off; else 0.

    Llama-Nemotron, section on format rewards: thinking "between <think> and </think> tags" in the on mode, "the
    non-existence of thinking tags" in the off mode.

    Args:
        thinking: whether thinking is on.
        opened: True if the prompt ends in `<think>`, so the response must not open it again.
    """
    opens, closes = response.text.count(OPEN), response.text.count(CLOSE)
    if not thinking:
        return float(opens == closes == 0)
    begins = opened or response.text.lstrip().startswith(OPEN)
    return float(begins and closes == 1 and opens == (0 if opened else 1))


def malformed(text: str, *, opened: bool, style: Style = "any") -> tuple[bool, bool]:
    """Return whether a complete response has malformed thinking tags, and whether it has malformed tool calls.

    Thinking tags are well formed if there are none, or exactly one complete trace at the start.

    Args:
        text: generated text without the end token.
        opened: True if the prompt ends in `<think>`.
        style: format of tool calls.
    """
    response = parse_response(text, thinking_opened=opened)
    tags = opened or OPEN in text or CLOSE in text
    calls = parse_tool_calls(response.answer, style)
    return tags and not think_tags(response, thinking=True, opened=opened), bool(calls.problems)


def closes_once(response: Response, *, thinking: bool) -> float:
    """Return 1 for exactly one `</think>` with thinking on, or none with it off; else 0. From Domyn-Small."""
    return float(response.text.count(CLOSE) == (1 if thinking else 0))


def one_boxed(response: Response) -> float:
    r"""Return 1 for exactly one \boxed{} in the answer (after the reasoning), else 0; nested boxes count separately."""
    return float(len(boxes(response.answer)) == 1)


def domyn_format(response: Response, *, thinking: bool) -> float:
    r"""Return the mean of `closes_once` and `one_boxed`.

    Domyn-Small: "exactly one </think> closer (in reasoning-on mode) or its absence (in reasoning-off mode), and [...]
    exactly one answer within \boxed{} in the post-thinking segment. The format component was the average of the two
    checks". With thinking on, a response without `</think>` has no such segment, so its boxes do not count.
    """
    boxed = one_boxed(response) if not thinking or CLOSE in response.text else 0.0
    return (closes_once(response, thinking=thinking) + boxed) / 2
