"""What every filter is."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict

from nemo_ext.chat.sample import Sample
from nemo_ext.data.sft.filters.words import Words

SETTINGS = ConfigDict(extra="forbid")


class Drop(NamedTuple):
    """Why a sample is left out.

    Attributes:
        reason: a few words with hyphens, counted in reports.
        detail: what was found, for an example in the report.
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
    """A sample with what several filters need of it, computed once."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    @cached_property
    def spoken(self) -> list[Text]:
        """What user and assistant say, think and call, and what tools answer, in order, without empty texts."""
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
        """The words of `spoken` as hashes."""
        return Words([text.text for text in self.spoken])

    @cached_property
    def said(self) -> list[int]:
        """Which of `spoken` are the assistant's, without its calls."""
        return [index for index, text in enumerate(self.spoken) if text.role == "assistant" and not text.is_call]

    @cached_property
    def calls(self) -> list[int]:
        """Which of `spoken` are calls."""
        return [index for index, text in enumerate(self.spoken) if text.is_call]


class Filter:
    """Judges one sample. Filters are frozen pydantic dataclasses of their settings, so they can be sent to workers."""

    name: ClassVar[str]

    def check(self) -> None:
        """Find out before the work whether the settings can be used; files are read anew.

        Raises:
            ValueError: naming the setting and what is wrong with it.
        """

    def reads(self) -> list[Path]:
        """Files that it judges by: with other content of these it judges otherwise."""
        return []

    def drop(self, texts: Texts) -> Drop | None:
        """Why the sample is left out; None keeps it."""
        raise NotImplementedError

    def reason(self, sample: Sample) -> str | None:
        """The reason alone."""
        dropped = self.drop(Texts(sample))
        return dropped and dropped.reason
