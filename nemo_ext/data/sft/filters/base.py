"""Base class of all filters."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

from nemo_ext.chat.sample import Sample
from nemo_ext.data.text.words import Words


class Drop(NamedTuple):
    """Reason why a sample is left out.

    Attributes:
        reason: a few words with hyphens, counted in reports.
        detail: text that was found, for an example in the report.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a conversation: a message's content, its reasoning, or a call as name and JSON."""

    role: str
    text: str
    is_reasoning: bool = False
    is_call: bool = False


class Texts:
    """A sample with values that several filters need, computed once."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    @cached_property
    def spoken(self) -> list[Text]:
        """Texts of user, assistant and tools in order: contents, reasoning and calls, without empty ones."""
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
        """Words of `spoken` as hashes."""
        return Words([text.text for text in self.spoken])

    @cached_property
    def said(self) -> list[int]:
        """Indices of `spoken` that are the assistant's, without its calls."""
        return [index for index, text in enumerate(self.spoken) if text.role == "assistant" and not text.is_call]

    @cached_property
    def calls(self) -> list[int]:
        """Indices of `spoken` that are calls."""
        return [index for index, text in enumerate(self.spoken) if text.is_call]


class Filter:
    """Judges one sample. Filters are frozen pydantic dataclasses of their settings, so they can be sent to workers."""

    name: ClassVar[str]

    def check(self) -> None:
        """Check before the work that the settings can be used; files are read again.

        Raises:
            ValueError: a setting is wrong; the message names it.
        """

    def reads(self) -> list[Path]:
        """Paths of the files whose content determines the filter's decisions."""
        return []

    def drop(self, texts: Texts) -> Drop | None:
        """Reason why the sample is left out; None keeps it."""
        raise NotImplementedError

    def reason(self, sample: Sample) -> str | None:
        """Reason alone, without the detail; None if the sample is kept."""
        dropped = self.drop(Texts(sample))
        return dropped and dropped.reason
