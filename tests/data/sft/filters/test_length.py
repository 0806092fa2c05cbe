from collections.abc import Callable

import pytest

from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.data.sft.filters.length import Length

Make = Callable[..., Sample]
BYTES = {"kind": "byte"}


def test_tokens_of_all_texts_are_counted(chat: Make) -> None:
    rule = Length(max_tokens=10, tokenizer=BYTES)

    assert rule.reason(chat("1234", "1234", "12")) is None
    assert rule.reason(chat("1234", "1234", "123")) == "too-long"
    assert rule.reason(chat("1234", "éé", "é")) is None
    assert rule.reason(chat("1234", "ééé", "é")) == "too-long"


def test_calls_and_tools_count(chat: Make) -> None:
    call = Message(role="assistant", tool_calls=(ToolCall(name="f", arguments={"x": "y" * 50}),))
    sample = Sample(id="1", messages=(Message(role="user", content="q"), call))

    assert Length(max_characters=50).reason(sample) == "too-long"
    assert Length(max_characters=100).reason(sample) is None
    assert Length(max_characters=100).reason(chat("q", tools=({"d": "x" * 100},))) == "too-long"


def test_short_answers(chat: Make) -> None:
    assert Length(min_characters=5).reason(chat("a long question", "1234", "a long trace")) == "too-short"
    assert Length(min_characters=4).reason(chat("q", "1234")) is None


def test_a_limit_in_tokens_requires_an_existing_tokenizer() -> None:
    with pytest.raises(ValueError, match="max_tokens requires a tokenizer"):
        Length(max_tokens=32600)
    with pytest.raises(ValueError, match="nowhere"):
        Length(max_tokens=32600, tokenizer={"kind": "huggingface", "path": "nowhere"}).check()
