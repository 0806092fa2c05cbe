r"""Format scores of a response: <think> tags on or off, exactly one \boxed{}. Scores are in [0, 1].

The papers differ: Llama-Nemotron requires both tags, Domyn counts closing tags and boxes.
"""

from nemo_ext.chat.response import CLOSE, OPEN, Response
from nemo_ext.rl.answers import boxes


def think_tags(response: Response, *, thinking: bool, opened: bool = False) -> float:
    """1 for exactly one `<think> ... </think>` at the start (on) or no tag at all (off), else 0.

    Llama-Nemotron, section on format rewards: thinking "between <think> and </think> tags" in the on mode, "the
    non-existence of thinking tags" in the off mode.

    Args:
        opened: True if the prompt ends in `<think>`, so that the response must not open it again.
    """
    opens, closes = response.text.count(OPEN), response.text.count(CLOSE)
    if not thinking:
        return float(opens == closes == 0)
    begins = opened or response.text.lstrip().startswith(OPEN)
    return float(begins and closes == 1 and opens == (0 if opened else 1))


def closes_once(response: Response, *, thinking: bool) -> float:
    """1 for exactly one `</think>` (on) or none (off), else 0. Domyn-Small, math reward."""
    return float(response.text.count(CLOSE) == (1 if thinking else 0))


def one_boxed(response: Response) -> float:
    r"""1 for exactly one \boxed{} in the answer, the part after the thinking, else 0. Nested boxes count separately."""
    return float(len(boxes(response.answer)) == 1)


def domyn_format(response: Response, *, thinking: bool) -> float:
    r"""Mean of `closes_once` and `one_boxed`.

    Domyn-Small: "exactly one </think> closer (in reasoning-on mode) or its absence (in reasoning-off mode), and [...]
    exactly one answer within \boxed{} in the post-thinking segment. The format component was the average of the two
    checks". In the on mode a response without `</think>` has no such segment, whatever it boxes.
    """
    boxed = one_boxed(response) if not thinking or CLOSE in response.text else 0.0
    return (closes_once(response, thinking=thinking) + boxed) / 2
