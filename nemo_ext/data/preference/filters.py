"""Filters of preference pairs; every dropped pair gets a reason.

"To mitigate length bias ... the chat and multi-turn data was filtered to ensure that the chosen-vs-rejected length
difference was less than 100 tokens" (Domyn-Small, section 4.3), so the filters can differ from source to source.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.chat.sample import Message, has_reasoning
from nemo_ext.data.preference.group import Pair, message_records
from nemo_ext.job.settings import STRICT, StringsOrNone

MULTI_TURN = "multi_turn"


class Lengths(NamedTuple):
    """A pair's lengths in tokens, or in characters if there is no tokenizer."""

    prompt: int
    chosen: int
    rejected: int


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Filters:
    """Conditions for keeping a pair; null disables a limit.

    Attributes:
        max_length_difference: the answers' lengths must differ by fewer tokens than this; null for no limit.
        length_difference_tasks: tasks that this limit applies to; `multi_turn` for pairs with several turns; empty for
            all pairs.
        max_prompt_tokens: maximum number of tokens in the prompt; null for no limit.
        max_tokens: maximum number of tokens in the prompt and the longer answer; null for no limit.
        different_answers: True to drop pairs whose answers and calls differ only in white space.
        empty_answers: True to drop pairs in which an answer has neither text nor calls.
        declared_calls: True to drop pairs whose chosen answer calls a tool that the prompt does not declare.
        same_mode: True to drop pairs in which only one answer has reasoning.
    """

    max_length_difference: PositiveInt | None = None
    length_difference_tasks: StringsOrNone = ()
    max_prompt_tokens: PositiveInt | None = None
    max_tokens: PositiveInt | None = None
    different_answers: bool = True
    empty_answers: bool = True
    declared_calls: bool = True
    same_mode: bool = True

    def reason(self, pair: Pair, lengths: Lengths) -> str | None:
        """Return the reason to drop a pair; None to keep it."""
        chosen, rejected = pair.chosen.messages, pair.rejected.messages
        if self.empty_answers:
            for side, messages in (("chosen", chosen), ("rejected", rejected)):
                if not messages[-1].content.strip() and not messages[-1].tool_calls:
                    return f"empty {side} answer"
        if self.different_answers and _content(chosen) == _content(rejected):
            return "equal answers"
        called = {call.name for message in chosen for call in message.tool_calls}
        if self.declared_calls and called - {tool["function"]["name"] for tool in pair.group.tools}:
            return "chosen answer calls an undeclared tool"
        if self.same_mode and has_reasoning(chosen) != has_reasoning(rejected):
            return "reasoning in one answer only"
        if self.max_prompt_tokens is not None and lengths.prompt > self.max_prompt_tokens:
            return "prompt too long"
        if self.max_tokens is not None and lengths.prompt + max(lengths.chosen, lengths.rejected) > self.max_tokens:
            return "prompt and answer too long"
        limit = self.max_length_difference
        if limit is not None and self._compares_lengths(pair) and abs(lengths.chosen - lengths.rejected) >= limit:
            return "length difference"
        return None

    def _compares_lengths(self, pair: Pair) -> bool:
        tasks = self.length_difference_tasks
        return not tasks or pair.group.task in tasks or (MULTI_TURN in tasks and pair.group.multi_turn)


def _content(messages: Sequence[Message]) -> str:
    """Return the contents and calls of messages as JSON, without reasoning or white space, for comparison."""
    records = [{**record, "content": "".join(record["content"].split())} for record in message_records(messages)]
    for record in records:
        record.pop("reasoning_content", None)
    return json.dumps(records, sort_keys=True)
