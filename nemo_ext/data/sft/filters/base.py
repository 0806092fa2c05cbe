"""Base class of all filters, and the values that filters share."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

from nemo_ext.chat.sample import Sample
from nemo_ext.data.text.words import Words


class Drop(NamedTuple):
    """Reason for dropping a sample.

    Attributes:
        reason: short hyphenated name, counted in reports.
        detail: matching text or place, shown as an example in the report.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a conversation: a message's content, its reasoning, or a tool call as name and JSON arguments."""

    role: str
    text: str
    is_reasoning: bool = False
    is_call: bool = False


class Texts:
    """A sample with derived values that several filters need, each computed once."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    @cached_property
    def spoken(self) -> list[Text]:
        """Non-empty texts in order, except system messages: reasoning, contents and tool calls."""
        spoken = []
        for message in self.sample.messages:
            if message.reasoning:
                spoken.append(Text(message.role, message.reasoning, is_reasoning=True))
            if message.content and message.role != "system":
                spoken.append(Text(message.role, message.content))
            for call in message.tool_calls:
                arguments = json.dumps(call.arguments, ensure_ascii=False)
                spoken.append(Text(message.role, f"{call.name} {arguments}", is_call=True))
        return spoken

    @cached_property
    def words(self) -> Words:
        """Hashed words of the texts in `spoken`."""
        return Words([text.text for text in self.spoken])

    @cached_property
    def assistant(self) -> list[int]:
        """Indices into `spoken` of the assistant's contents and reasoning, without tool calls."""
        return [index for index, text in enumerate(self.spoken) if text.role == "assistant" and not text.is_call]

    @cached_property
    def calls(self) -> list[int]:
        """Indices into `spoken` of the tool calls."""
        return [index for index, text in enumerate(self.spoken) if text.is_call]


class Filter:
    """Base class of filters that judge single samples: frozen pydantic dataclasses of settings, sent to workers."""

    name: ClassVar[str]

    def check(self) -> None:
        """Check before the job starts that the settings and their files are usable; the files are read again.

        Raises:
            ValueError: a setting is invalid; the message names it.
        """

    def reads(self) -> list[Path]:
        """Return the paths of the files whose content affects the filter's decisions."""
        return []

    def drop(self, texts: Texts) -> Drop | None:
        """Return the reason to drop the sample; None to keep it."""
        raise NotImplementedError

    def reason(self, sample: Sample) -> str | None:
        """Return only the name of the reason, without the detail; None if the sample is kept."""
        dropped = self.drop(Texts(sample))
        return dropped and dropped.reason
