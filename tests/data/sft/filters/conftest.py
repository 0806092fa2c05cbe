"""Conversations of a few words."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nemo_ext.chat.sample import Message, Sample
from nemo_ext.data.sft.filters.base import Texts


@pytest.fixture(scope="session")
def chat() -> Callable[..., Sample]:
    """A prompt and an answer, with a trace if one is given."""

    def make(prompt: str, answer: str = "Yes.", reasoning: str | None = None, **more: Any) -> Sample:
        messages = Message(role="user", content=prompt), Message(role="assistant", content=answer, reasoning=reasoning)
        return Sample(**({"id": "1", "messages": messages} | more))

    return make


@pytest.fixture(scope="session")
def texts(chat: Callable[..., Sample]) -> Callable[..., Texts]:
    """The same as a filter sees it."""
    return lambda *args, **more: Texts(chat(*args, **more))


@pytest.fixture(scope="session")
def prose() -> Callable[[int, int], str]:
    """Random words without repeated sequences, from a seed."""

    def write(words: int, seed: int = 0) -> str:
        return " ".join(f"w{number}" for number in np.random.default_rng(seed).integers(0, 50_000, words))

    return write
