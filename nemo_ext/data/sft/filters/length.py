"""Filter of samples that are too long or too short.

Domyn-Small, SFT: "length filtering capped at 32,600 tokens to leave headroom for chat-template tokens".
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.chat.sample import spoken
from nemo_ext.data.sft.filters.base import Drop, Filter, Texts
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from nemo_ext.job.settings import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Length(Filter):
    """Filter by the total length of a sample's texts, including tools and calls, without the template's markup.

    Attributes:
        max_tokens: maximum number of tokens (Domyn's recipe has 32,600 for sequences of 32,768); requires `tokenizer`.
        max_characters: maximum number of characters.
        min_characters: minimum number of characters in all of the assistant's answers together.
        tokenizer: config for `nemo_ext.data.text.tokenizers.load_tokenizer`: {kind: huggingface, path: ...}.
    """

    name: ClassVar[str] = "length"
    max_tokens: PositiveInt | None = None
    max_characters: PositiveInt | None = None
    min_characters: NonNegativeInt = 0
    tokenizer: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.tokenizer is None:
            raise ValueError(
                "max_tokens requires a tokenizer: set tokenizer, such as {kind: huggingface, path: /models/mine}"
            )

    def check(self) -> None:
        _tokenizer.cache_clear()
        if self.tokenizer is not None:
            _tokenizer(json.dumps(self.tokenizer))

    def reads(self) -> list[Path]:
        tokenizer = None if self.tokenizer is None else _tokenizer(json.dumps(self.tokenizer))
        return [tokenizer.path] if isinstance(tokenizer, HuggingFaceTokenizer) else []

    def drop(self, texts: Texts) -> Drop | None:
        sample = texts.sample
        answered = sum(len(message.content) for message in sample.messages if message.role == "assistant")
        if answered < self.min_characters:
            return Drop("too-short", f"{answered} characters")
        if self.max_tokens is None and self.max_characters is None:
            return None
        declared = [json.dumps(sample.tools, ensure_ascii=False)] if sample.tools else []
        parts = spoken(sample.messages) + declared
        characters = sum(map(len, parts))
        if self.max_characters is not None and characters > self.max_characters:
            return Drop("too-long", f"{characters} characters")
        # A token is at least one byte, except possibly the first, so short texts need not be tokenised.
        if self.max_tokens is not None and 4 * characters + len(parts) > self.max_tokens:
            if sum(len(part.encode()) + 1 for part in parts) <= self.max_tokens:
                return None
            count = sum(map(len, _tokenizer(json.dumps(self.tokenizer)).encode(parts)))
            if count > self.max_tokens:
                return Drop("too-long", f"{count} tokens")
        return None


@lru_cache(maxsize=2)
def _tokenizer(config: str) -> Tokenizer:
    return load_tokenizer(json.loads(config), "filters.length.tokenizer")
