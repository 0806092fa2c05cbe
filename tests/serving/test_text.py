"""Text out of tokens: characters, stop texts, reasoning and calls, however the pieces fall."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.serving.text import Decoder, Splitter, TokenBytes, overlap

CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def tokenizer(served_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(served_folder)


def pieces(text: str, sizes: Sequence[int]) -> list[str]:
    found, place = [], 0
    for size in sizes:
        found.append(text[place : place + size])
        place += size
    return [*found, text[place:]]


def split(parts: Sequence[str], *, thinking: bool = False, tools: Sequence[Any] = ()) -> tuple[str, str, list[Any]]:
    splitter = Splitter(thinking, tools)
    found = [piece for n, part in enumerate(parts) for piece in splitter.add(part, last=n == len(parts) - 1)]
    texts = ["".join(text for name, text in found if name == field) for field in ("reasoning_content", "content")]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in splitter.calls]
    return texts[0], texts[1], calls


@pytest.mark.parametrize("text", ["plain ascii", "naïve 漢字 🎉 done", "\n\n  spaces  "])
def test_characters_come_whole(tokenizer: Any, text: str) -> None:
    decoder = Decoder(tokenizer)
    ids = tokenizer(text)["input_ids"]

    parts = [decoder.add(token, last=n == len(ids) - 1) for n, token in enumerate(ids)]

    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_special_tokens_are_hidden_but_for_tags(tokenizer: Any) -> None:
    decoder = Decoder(tokenizer)
    ids = tokenizer("a<|user|><think>b</think><|end|>")["input_ids"]

    assert "".join(decoder.add(token) for token in ids) == "a<think>b</think>"


@given(st.lists(st.sampled_from("ab#|"), max_size=30), st.sampled_from(["##", "a#b", "||#"]))
def test_nothing_of_a_stop_text_is_shown(letters: list[str], stop: str) -> None:
    class Letters:
        all_special_ids = ()

        def convert_tokens_to_ids(self, tag: str) -> int:
            return -1

        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    decoder, shown, text = Decoder(Letters(), [stop]), "", "".join(letters)
    for n, letter in enumerate(text):
        shown += decoder.add(ord(letter), last=n == len(text) - 1)
        if decoder.stopped:
            break

    assert shown == text.partition(stop)[0]
    assert decoder.stopped == (stop in text)


@given(st.lists(st.integers(1, 9), max_size=40))
def test_reasoning_content_and_calls_however_they_are_cut(sizes: list[int]) -> None:
    text = f"<think>first 1 < 2 </think>then {CALL}"

    assert split(pieces(text, sizes), tools=TOOLS) == ("first 1 < 2 ", "then ", [("f", {"x": 1})])


@pytest.mark.parametrize(
    ("text", "thinking", "tools", "found"),
    [
        ("just text", False, TOOLS, ("", "just text", [])),
        ("a trace</think>done", True, (), ("a trace", "done", [])),
        ("a trace without an end", True, (), ("a trace without an end", "", [])),
        ("<thin", False, (), ("", "<thin", [])),
        (f"no tools {CALL}", False, (), ("", f"no tools {CALL}", [])),
        ("<tool_call>broken", False, TOOLS, ("", "<tool_call>broken", [])),
        (f"<think>{CALL}</think>x", False, TOOLS, (CALL, "x", [])),
        ("", False, TOOLS, ("", "", [])),
    ],
)
def test_other_answers(text: str, thinking: bool, tools: Sequence[Any], found: tuple[Any, ...]) -> None:
    assert split([text], thinking=thinking, tools=tools) == found
    assert split(list(text) or [""], thinking=thinking, tools=tools) == found


def test_overlap() -> None:
    assert [overlap("ab<th", "<think>"), overlap("<think>", "<think>"), overlap("abc", "xyz")] == [3, 0, 0]


SENTENCE = "naïve 漢字 🎉 end"


def vocabularies() -> dict[str, Any]:
    """A tokenizer of each kind that has tokens of parts of characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    level.pre_tokenizer, level.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = ["<unk>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256)), *"naiveed"]
    spelled = {name: number for number, name in enumerate(dict.fromkeys(names))}
    pieces = Tokenizer(models.BPE(spelled, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    pieces.decoder = decoders.Sequence(parts)
    return {
        name: PreTrainedTokenizerFast(tokenizer_object=each, eos_token="<|end|>")
        for name, each in (("byte_level", level), ("byte_fallback", pieces))
    }


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_tokens_have_their_bytes_and_the_places_of_their_characters(name: str) -> None:
    tokenizer = vocabularies()[name]
    ids = tokenizer(SENTENCE)["input_ids"]
    known = TokenBytes(tokenizer)

    found = [known(token) for token in ids]

    assert b"".join(found) == SENTENCE.encode()
    assert len(found) > len(SENTENCE)
    before, places = b"", []
    for data in found:
        places.append(len(before.decode(errors="ignore")))
        before += data
    assert known.offsets(ids) == places
    texts = [known.text(token) for token in ids]
    assert not any("\ufffd" in text for text in texts)
    assert {text for text in texts if not text.startswith("bytes:")} >= {"n", "a", "e"}
    assert r"bytes:\xf0" in texts or r"bytes:\xf0\x9f\x8e\x89" in texts
    assert known(tokenizer.convert_tokens_to_ids("<|end|>")) == b"<|end|>"


def test_a_token_after_broken_bytes_has_its_place() -> None:
    tokenizer = vocabularies()["byte_level"]
    known = TokenBytes(tokenizer)
    of_byte = {known(token): token for token in tokenizer.get_vocab().values()}

    cut = [of_byte[byte] for byte in (b"\xe2", b"a", b"\xf0", b"\x9f", b"\xe2", b"\x82")]

    assert known.offsets(cut) == [0, 1, 2, 2, 3, 3]


def test_other_vocabularies_have_the_bytes_of_their_text() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    known = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=words))

    assert known(1) == b"play"
    assert (known(10_000), known.text(10_000)) == (b"", "token_id:10000")
