"""Groups of answers to one prompt, and pairs of a chosen and a rejected answer."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nemo_ext.chat.sample import Message, openai_messages

Side = Literal["", "strong", "weak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One answer.

    Attributes:
        messages: messages after the prompt; several if tools were called.
        model: name of the model that wrote the answer; "" if unknown.
        side: side in delta learning (strong or weak); "" if the answer's file does not determine it.
        score: score from a judge or reward model.
        correct: True if the final answer is correct; None if unknown.
        label: safe, unsafe or refusal for safety pairs; chosen or rejected for existing pairs.
    """

    messages: tuple[Message, ...]
    model: str = ""
    side: Side = ""
    score: float | None = None
    correct: bool | None = None
    label: str = ""

    @property
    def key(self) -> str:
        """Sort key derived from the content, so that results do not depend on the order of the input."""
        rest = [self.model, self.side, self.score, self.correct, self.label]
        return json.dumps([message_records(self.messages), *rest], sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Answers to one prompt, in the order of their keys.

    Attributes:
        id: identifier, unique within its source; includes a digest of the tools if a prompt has several sets of tools.
        prompt: conversation before the answer.
        tools: JSON schemas of the tools that the prompt declares.
        label: label of the prompt (harmful or safe); "" if unknown.
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
        """Whether the prompt contains an assistant message."""
        return any(message.role == "assistant" for message in self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A chosen and a rejected answer to one prompt; `kind` is the pairing method (delta, judged, no_tools ...)."""

    id: str
    group: Group
    chosen: Generation
    rejected: Generation
    kind: str


def message_records(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the messages in the OpenAI format, with call arguments as JSON strings."""
    return openai_messages(messages, arguments_as_text=True)


def prompt_digest(prompt: Iterable[Message]) -> int:
    """Digest (64 bits) of a prompt's user messages, which determines the prompt's split.

    Prompts that differ only in the system message or the tools are in the same split.
    """
    return int(json_digest([message.content.strip() for message in prompt if message.role == "user"]), 16)


def pair_digest(pair: Pair) -> int:
    """Digest (64 bits) of a pair's prompt, tools and answers."""
    parts = [message_records(part) for part in (pair.group.prompt, pair.chosen.messages, pair.rejected.messages)]
    return int(json_digest([*parts, list(pair.group.tools)]), 16)


def json_digest(value: Any) -> str:
    """Digest (16 hex digits) of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
