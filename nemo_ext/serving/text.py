"""Streaming of text from tokens, with whole characters, stop strings, and separation of reasoning and tool calls."""

import codecs
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nemo_ext.chat.response import CLOSE, OPEN
from nemo_ext.chat.tool_calls import TAGS, parse_tool_calls
from nemo_ext.data.text.byte_tokenizer import token_bytes

Field = Literal["reasoning_content", "content"]
_SHOWN = (OPEN, CLOSE, *TAGS, *TAGS.values())
"""Tokens that are shown as text even if the tokenizer declares them special."""
_HALF = "\ufffd"
"""Character that tokenizers output for an incomplete character."""


class Decoder:
    """Incremental decoder of one answer's tokens.

    Args:
        stop: strings that end the answer and are not part of it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._hidden = set(tokenizer.all_special_ids) - {tokenizer.convert_tokens_to_ids(tag) for tag in _SHOWN}
        self._ids: list[int] = []
        self._start = self._read = 0
        self._held = ""
        self.stopped = False

    def add(self, token: int, *, last: bool = False) -> str:
        """Add a token and return new final text.

        Incomplete characters and possible beginnings of a stop string are held back until the `last` token.
        """
        if token >= 0 and token not in self._hidden:
            self._ids.append(token)
        # Decoded with the previous tokens, because a leading space may depend on them.
        before = self._decoded(self._ids[self._start : self._read])
        now = self._decoded(self._ids[self._start :])
        if now.endswith(_HALF) and not last:
            return ""
        self._start, self._read = self._read, len(self._ids)
        text = self._held + now[len(before) :]
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        held = 0 if last else max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class TokenBytes:
    """Converter of a tokenizer's tokens to bytes, including tokens with incomplete characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        how = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
        self._byte_level = '"ByteLevel"' in how
        self._pieces = self._byte_level or '"ByteFallback"' in how or "\u2581" in how

    def __call__(self, token: int) -> bytes:
        """Return a token's bytes; for decoders other than byte-level or byte-fallback, the bytes of its text."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None or token in self._tokenizer.added_tokens_decoder:
            return (name or "").encode()
        if self._pieces:
            return token_bytes(name, byte_level=self._byte_level)
        text: str = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return text.encode()

    def text(self, token: int) -> str:
        """Return a token's text: as in OpenAI's API, `bytes:\\xe2\\x82` for an incomplete character.

        A token without text becomes `token_id:7`.
        """
        data = self(token)
        try:
            return data.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def offsets(self, tokens: Iterable[int]) -> list[int]:
        """Return each token's character offset in the joined text; tokens that form one character share its offset."""
        decoder, place, places = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
        for token in tokens:
            held, data = decoder.getstate()[0], self(token)
            broken = bool(held) and data[:1] != b"" and not 0x80 <= data[0] < 0xC0  # an incomplete character
            places.append(place + broken)
            place += len(decoder.decode(data))
        return places


def overlap(text: str, tag: str) -> int:
    """Return the length of a string's longest suffix that is a proper prefix of a tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


@dataclass
class Splitter:
    """Streaming splitter of a chat answer into reasoning, content and tool calls.

    Attributes:
        thinking: whether the answer is inside a reasoning trace, as after a prompt that opens one.
        tools: declared tools; if there are none, calls remain text.
        calls: tool calls that were found, in OpenAI's format, once the answer has ended.
    """

    thinking: bool
    tools: Sequence[Mapping[str, Any]] = ()
    _held: str = ""
    _begun: bool = False
    _calls: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, text: str, *, last: bool = False) -> Iterator[tuple[Field, str]]:
        """Add text, and yield new pieces of the answer, each with the name of the response field it belongs to.

        Args:
            last: whether the answer ends with this text.
        """
        self._held += text
        if not self._begun and not self.thinking:
            if not last and OPEN.startswith(self._held.strip()) and len(self._held.strip()) < len(OPEN):
                return  # whitespace, or the beginning of a tag
            self.thinking = self._held.lstrip().startswith(OPEN)
            if self.thinking:
                self._held = self._held.lstrip()[len(OPEN) :]
        self._begun = True
        if self.thinking:
            trace, closed, rest = self._held.partition(CLOSE)
            held = 0 if closed or last else overlap(trace, CLOSE)
            self._held = rest if closed else trace[len(trace) - held :]
            if shown := trace[: len(trace) - held]:
                yield "reasoning_content", shown
            if not closed:
                return
            self.thinking = False
        if self.tools and not self._calls:
            starts = [place for tag in TAGS if (place := self._held.find(tag)) >= 0]
            if starts:
                self._held, self._calls = self._held[: min(starts)], self._held[min(starts) :]
        elif self._calls:
            self._held, self._calls = "", self._calls + self._held
        held = 0 if last or self._calls else max((overlap(self._held, tag) for tag in TAGS if self.tools), default=0)
        shown, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        if shown:
            yield "content", shown
        if last and self._calls:
            read = parse_tool_calls(self._calls, "any", self.tools)
            self.calls = [
                {
                    "index": number,
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for number, call in enumerate(read.calls)
            ]
            left = self._calls if read.problems and not self.calls else read.answer
            if left:
                yield "content", left
