"""Answers to one prompt, and a pair of them of which one is preferred."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_ext.chat.formats import to_record
from nemo_ext.chat.sample import Message, Sample
from nemo_ext.chat.template import conversation

Side = Literal["", "strong", "weak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer.

    Attributes:
        messages: what follows the prompt; more than one where tools were called and answered.
        model: that wrote it; "" if unknown.
        side: of delta learning, where the file it came from says so.
        score: a judge's or reward model's.
        correct: whether the final answer is right.
        label: safe, unsafe or refusal, for safety pairs.
    """

    messages: tuple[Message, ...]
    model: str = ""
    side: Side = ""
    score: float | None = None
    correct: bool | None = None
    label: str = ""

    @property
    def key(self) -> str:
        """Sorts generations the same way in whatever order they came."""
        rest = [self.model, self.side, self.score, self.correct, self.label]
        return json.dumps([message_records(self.messages), *rest], sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The answers to one prompt, in the order of their keys.

    Attributes:
        id: unique in its source; that of a prompt which comes with several sets of tools ends with theirs.
        prompt: the conversation up to the answer.
        tools: JSON schemas of the tools that the prompt declares.
        label: of the prompt: harmful or safe; "" if unknown.
    """

    id: str
    prompt: tuple[Message, ...]
    generations: tuple[Generation, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    task: str = ""
    language: str = ""
    label: str = ""

    @property
    def multi_turn(self) -> bool:
        """Whether the assistant has spoken before this answer's turn."""
        return any(message.role == "assistant" for message in self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        id: unique in its source.
        group: the group they are from, but for its generations.
        kind: how they were paired: delta, judged, no_tools ...
    """

    id: str
    group: Group
    chosen: Generation
    rejected: Generation
    kind: str


def trainer_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: arguments of calls are objects."""
    return conversation(Sample(id="", messages=tuple(messages)))


def message_records(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Messages in the OpenAI format, arguments of calls as JSON text."""
    records: list[dict[str, Any]] = to_record(Sample(id="", messages=tuple(messages)))["messages"]
    return records


def prompt_digest(prompt: Iterable[Message]) -> str:
    """The same for prompts whose users say the same, whatever the system message and the tools (16 hex digits).

    All that is asked in the same words lands on one side of the split.
    """
    said = [message.content.strip() for message in prompt if message.role == "user"]
    return _digest(json.dumps(said))


def pair_digest(pair: Pair) -> str:
    """The same for pairs of the same two answers to the same prompt with the same tools (16 hex digits)."""
    parts = [message_records(part) for part in (pair.group.prompt, pair.chosen.messages, pair.rejected.messages)]
    return _digest(json.dumps([*parts, list(pair.group.tools)], sort_keys=True))


def tools_digest(tools: Iterable[Mapping[str, Any]]) -> str:
    """The same for the same tools (16 hex digits)."""
    return _digest(json.dumps(list(tools), sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
