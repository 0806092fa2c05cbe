"""Conversations, and tokenizers of several kinds that know the chat templates' control tokens."""

import asyncio
import email
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from nemo_ext.chat.sample import Message, Sample, ToolCall
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer

SPECIAL = ["<|endoftext|>", "<unk>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
GPT4_WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def chat_tokenizer(kind: str) -> RustTokenizer:
    """A tokenizer like GPT-2's, Llama 3's, Llama 2's or T5's, trained on text of the standard library."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "byte_level":
        tokenizer = RustTokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        trainer: Any = trainers.BpeTrainer(
            vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "split":
        tokenizer = RustTokenizer(models.BPE(ignore_merges=True))
        split = pre_tokenizers.Split(Regex(GPT4_WORDS), "isolated")
        no_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([split, no_regex]), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "prefix_space":
        tokenizer = RustTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=[*SPECIAL, *fallback], max_token_length=12, show_progress=False
        )
    else:
        tokenizer = RustTokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        letters = sorted(set("".join(map(chr, range(32, 127))) + "\n▁größe大小"))
        trainer = trainers.UnigramTrainer(
            vocab_size=600,
            special_tokens=SPECIAL,
            unk_token="<unk>",
            initial_alphabet=letters,
            show_progress=False,
        )
    texts = [inspect.getsource(module) for module in (json.decoder, email, asyncio.tasks)]
    if kind == "prefix_space":  # it knows no words: a text would be one
        texts = [line for text in texts for line in text.splitlines(keepends=True)]
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "prefix_space":  # the bytes are tokens of the model's own
        described = json.loads(tokenizer.to_str())
        described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in SPECIAL]
        tokenizer = RustTokenizer.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HuggingFaceTokenizer]:
    """A tokenizer of a kind that `chat_tokenizer` knows, which parses special tokens in text."""
    made: dict[str, HuggingFaceTokenizer] = {}

    def build(kind: str) -> HuggingFaceTokenizer:
        if kind not in made:
            path: Path = tmp_path_factory.mktemp(kind) / "tokenizer.json"
            chat_tokenizer(kind).save(str(path))
            made[kind] = HuggingFaceTokenizer(path, parse_special_tokens=True)
        return made[kind]

    return build


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            },
            "required": ["city"],
        },
    },
}

PLAIN = st.text(st.sampled_from("ab 1.\n,é大"), min_size=1, max_size=12).map(lambda text: f"w{text}w")


def samples(texts: st.SearchStrategy[str] = PLAIN) -> st.SearchStrategy[Sample]:
    """Conversations of some turns of some steps, with and without reasoning, tools and a system message."""
    calls = st.builds(
        lambda city, number: ToolCall(name="weather", arguments={"city": city, "days": number}),
        texts,
        st.integers(0, 9),
    )

    @st.composite
    def build(draw: st.DrawFn) -> Sample:
        messages = [Message(role="system", content=draw(texts))] if draw(st.booleans()) else []
        for _ in range(draw(st.integers(1, 3))):
            messages.append(Message(role="user", content=draw(texts)))
            for _ in range(draw(st.integers(0, 2))):
                step = tuple(draw(st.lists(calls, min_size=1, max_size=2)))
                content = draw(st.one_of(st.just(""), texts))
                messages.append(
                    Message(role="assistant", content=content, reasoning=draw(st.none() | texts), tool_calls=step)
                )
                messages += [Message(role="tool", content=draw(texts)) for _ in step]
            messages.append(Message(role="assistant", content=draw(texts), reasoning=draw(st.none() | texts)))
        tools = ({**WEATHER},) if draw(st.booleans()) else ()
        return Sample(id="s", messages=tuple(messages), tools=tools)

    return build()


@pytest.fixture(scope="session")
def samples_of() -> Callable[..., st.SearchStrategy[Sample]]:
    """A strategy for conversations whose texts are of another strategy."""
    return samples


@pytest.fixture(scope="session")
def tool_chat() -> Sample:
    """Two turns, the second of two steps: a call, its answer, and an answer, all with reasoning."""
    call = ToolCall(name="weather", arguments={"city": "Oslo", "days": 2})
    return Sample(
        id="tools",
        tools=(WEATHER,),
        messages=(
            Message(role="system", content="Be brief."),
            Message(role="user", content="Hello."),
            Message(role="assistant", content="Hi.", reasoning="A greeting."),
            Message(role="user", content="Weather in Oslo?"),
            Message(role="assistant", reasoning="Look it up.", tool_calls=(call,)),
            Message(role="tool", content="3 C"),
            Message(role="assistant", content="It is 3 C.", reasoning="Now say it."),
        ),
    )
