"""Tokenizers of real model families: round trips, special tokens, chat masks, vocabulary changes, comparisons."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nemo_ext.chat.sample import Message, Sample, ToolCall, openai_messages
from nemo_ext.chat.template import Template, end_tokens
from nemo_ext.data.sft.masks import ChatEncoder
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer, megatron_arguments

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group(name="real_tokenizers")]
Command = Callable[..., Any]
KINDS = ("llama3", "tekken", "cl100k", "smollm2")
TEMPLATES = {"llama3": None, "smollm2": None, "tekken": "nemotron3_nano", "cl100k": "olmo3"}
"""Chat template by tokenizer; None for the tokenizer's own."""
ENDS = {"llama3": "<|eot_id|>", "smollm2": "<|im_end|>", "tekken": "<|im_end|>", "cl100k": "<|endoftext|>"}
"""Token that ends an answer, or a conversation's last answer."""
HARD = [
    "",
    " ",
    "\n\n12  3\t4\r\n\r\n   x",
    "don't I'LL we've 'tis",
    "naïve café ﬁ ½ ² ٣٤ 大模型 日本語 한국어 हिन्दी",
    "👩‍👩‍👧 🇫🇷 e\u0301 \u00a0\u2009\u200b\ufeff",
    "1234567890 3.14159e-10 0xFF 1,000,000",
    "def f(x):\n    return x[0]  # a\n\n\n",
    "a" * 3000,
    " " * 300 + "end" + "\n" * 50,
    "<|endoftext|><|im_end|><|eot_id|></s><think>[INST]<0x41>",
]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(kind: str, real_tokenizer: Callable[[str], Path]) -> Path:
    return real_tokenizer(kind)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Documents of code and prose, and difficult texts in several scripts."""
    import asyncio.tasks
    import inspect
    import json.decoder
    import textwrap
    from email import message

    modules = (asyncio.tasks, json.decoder, message, textwrap)
    return [*(inspect.getsource(module) for module in modules), *HARD[2:]]


def test_text_is_restored_and_ids_equal_the_librarys(
    folder: Path, texts: list[str], tmp_path: Path, command: Command
) -> None:
    """With fastokens where it supports the tokenizer, and through `nemo-ext tokenize` in Megatron's files."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.encode_special_tokens = True
    ours = HuggingFaceTokenizer(folder)
    for text in [*HARD, *texts]:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ours.encode([text])[0].tolist() == ids, text[:60]
        assert ours.decode(ids) == text

    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("tokenize", "input=texts.jsonl", "output=made/mine", "validation_share=0", "workers=1")
    ended = command(*words, f"tokenizer={folder}", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = [row.tolist() for row in IndexedDataset(str(tmp_path / "made" / "mine_train"))]
    assert sorted(documents) == sorted([*own.encode(text, add_special_tokens=False).ids, ours.eod] for text in texts)


def test_special_tokens_in_text_are_parsed_only_on_request(kind: str, folder: Path) -> None:
    ours, parsing = HuggingFaceTokenizer(folder), HuggingFaceTokenizer(folder, parse_special_tokens=True)
    named = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    assert ours.eod_token == (named["content"] if isinstance(named, dict) else named) == ENDS[kind]
    for name in {ENDS[kind], "<|im_start|>" if kind != "llama3" else "<|start_header_id|>"}:
        number = parsing._tokenizer.token_to_id(name)
        assert parsing.encode([f"a{name}b"])[0].tolist().count(number) == 1
        plain = ours.encode([f"a{name}b"])[0].tolist()
        assert number not in plain and ours.decode(plain) == f"a{name}b"
    assert megatron_arguments(ours)["tokenizer_type"] == "HuggingFaceTokenizer"
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder)
    assert ours.eod in end_tokens(loaded, None if TEMPLATES[kind] is None else Template.load(TEMPLATES[kind]))
    assert len(loaded) == ours.vocab_size == ours.token_count


CALL = ToolCall(name="weather", arguments={"city": "Oslo", "days": 2})
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SAID = ["It is 3 C.", "def f():\n    return 1", "naïve 大模型 👩‍👩‍👧", "12 + 30 = 42"]


def chats() -> list[Sample]:
    """Conversations with several turns, a system message, text that spells markup, and a tool call."""
    turns = [
        message
        for number, text in enumerate(SAID)
        for message in (Message(role="user", content=f"Question {number}?\n"), Message(role="assistant", content=text))
    ]
    spelled = "<|im_end|><|eot_id|></s><|endoftext|>\n<|im_start|>assistant\nNo."
    samples = [
        Sample(id="turns", messages=tuple(turns)),
        Sample(id="system", messages=(Message(role="system", content="Be brief."), *turns[:2])),
        Sample(
            id="spelled", messages=(Message(role="user", content=spelled), Message(role="assistant", content=spelled))
        ),
    ]
    call = (Message(role="user", content="Weather?"), Message(role="assistant", tool_calls=(CALL,)))
    answer = (Message(role="tool", content="3 C"), Message(role="assistant", content="It is 3 C."))
    return [*samples, Sample(id="tool", tools=(TOOL,), messages=(*call, *answer))]


@pytest.mark.parametrize("number", range(4))
def test_only_answers_and_their_end_tokens_are_trained_on(kind: str, folder: Path, number: int) -> None:
    """Compared with the answers, and with the text and tokens that transformers renders."""
    from transformers import AutoTokenizer

    name = TEMPLATES[kind]
    sample, template = chats()[number], Template.load(folder if name is None else name)
    tokenizer = HuggingFaceTokenizer(folder, parse_special_tokens=True)
    if name is None and sample.tools:  # these two templates do not support tools
        with pytest.raises(ValueError, match="omits the tool calls of message 1"):
            ChatEncoder(template, tokenizer).encode(sample)
        return
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.chat_template = template.source
    (encoded,) = ChatEncoder(template, tokenizer).encode(sample, turns="whole")

    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.mask, [0]]).astype(np.int8))).reshape(-1, 2)
    runs = [loaded.decode(encoded.ids[start:end].tolist()) for start, end in edges]
    answers = [message for message in sample.messages if message.role == "assistant"]
    assert len(runs) == len(answers)
    ends = end_tokens(loaded, template)
    ends |= {loaded.convert_tokens_to_ids("<|im_end|>")} - {None}
    for run, message, (start, end) in zip(runs, answers, edges, strict=True):
        assert int(encoded.ids[end - 1]) in ends
        assert not set(encoded.ids[start : end - 1].tolist()) & ends, "an end token before the end"
        text = run.removesuffix(loaded.decode([int(encoded.ids[end - 1])]))
        if not message.tool_calls:
            assert text == message.content
        else:
            assert "weather" in text and "Oslo" in text
    if sample.id != "spelled":  # where transformers parses text as markup
        messages = openai_messages(sample.messages, arguments_as_text=False, names=True)
        expected = loaded.apply_chat_template(
            messages, tools=list(sample.tools) or None, tokenize=True, return_dict=False, enable_thinking=False
        )
        assert loaded.decode(encoded.ids.tolist()) == loaded.decode(expected)
        assert np.mean(encoded.ids == expected) > 0.9 if len(encoded.ids) == len(expected) else True


def test_sft_data_packs_all_answers(kind: str, folder: Path, tmp_path: Path, command: Command) -> None:
    records = [
        {
            "id": f"s{n}",
            "messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}: {text}"}],
        }
        for n, text in enumerate(SAID * 10)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["sources=[{name: a, path: chats.jsonl}]", "packing.capacity=512", "validation_share=0", "workers=1"]
    words += [f"template={TEMPLATES[kind] or folder}", "near_duplicates=null", "filters.structural=null"]
    ended = command("sft_data", f"tokenizer={folder}", "output=packs", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokens, masks = (
        IndexedDataset(str(tmp_path / "packs" / "train")),
        IndexedDataset(str(tmp_path / "packs" / "train_loss")),
    )
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    trained = []
    for row, mask in zip(tokens, masks, strict=True):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(np.int8))).reshape(-1, 2)
        trained += [own.decode(row[start : end - 1].tolist(), skip_special_tokens=False) for start, end in edges]
    assert sorted(trained) == sorted(record["messages"][1]["content"] for record in records)


def test_a_model_can_change_to_the_vocabulary_of_another_family(
    kind: str, folder: Path, real_tokenizer: Callable[[str], Path], tmp_path: Path, command: Command
) -> None:
    """With a random Llama: a text that is a single token in both vocabularies keeps its embedding row."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = real_tokenizer(KINDS[(KINDS.index(kind) + 1) % len(KINDS)])
    old, new = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (before, folder))
    size = max(old.get_vocab(with_added_tokens=True).values()) + 1
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    eos = HuggingFaceTokenizer(before).eod
    config = LlamaConfig(vocab_size=size, num_key_value_heads=1, eos_token_id=eos, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "tiny" / name).write_bytes((before / name).read_bytes())
    words = (f"from={tmp_path}/tiny", f"to={tmp_path}/moved", "to_format=huggingface", f"tokenizer={folder}")
    ended = command("convert", *words)
    assert ended.returncode == 0, ended.stderr

    table = "model.embed_tokens.weight"
    first, second = (load_file(tmp_path / place / "model.safetensors")[table] for place in ("tiny", "moved"))
    vocab = new.get_vocab(with_added_tokens=True)
    assert second.shape == (max(vocab.values()) + 1, 16)
    notice = re.search(r"rows, ([\d,]+) are copied", ended.stderr)
    assert notice is not None
    added = {token.content for token in new.get_added_tokens_decoder().values()}
    ids = old.get_vocab()
    same = [(ids[name], number) for name, number in vocab.items() if name in ids and name not in added]
    assert len(same) > 20_000 and int(notice[1].replace(",", "")) >= len(same)
    places = torch.tensor(same)
    assert torch.equal(first[places[:, 0]], second[places[:, 1]])
    assert torch.isfinite(second).all()
    moved = json.loads((tmp_path / "moved" / "config.json").read_text())
    assert moved["vocab_size"] == len(second)
    assert HuggingFaceTokenizer(folder).eod in np.atleast_1d(moved["eos_token_id"])
    assert (tmp_path / "moved" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_trained_tokenizer_is_compared_with_all_of_them(
    texts: list[str], real_tokenizer: Callable[[str], Path], tmp_path: Path, command: Command
) -> None:
    others = {kind: real_tokenizer(kind) for kind in KINDS}
    pieces = [text[start : start + 300] for text in texts[:4] for start in range(0, len(text), 300)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in pieces))
    words = ["input=texts.jsonl", "output=mine", "vocab=600", "preset=olmo3", "sample=2e5", "held_out=2e4"]
    ended = command("train_tokenizer", *words, f"compare=[{','.join(map(str, others.values()))}]", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    counts = json.loads((tmp_path / "mine" / "report.json").read_text())["stream"]
    (by_tokenizer,) = counts.values()
    assert len(by_tokenizer) == 1 + len(KINDS)
    ours, *theirs = (sizes["tokens"] for sizes in by_tokenizer.values())
    assert ours > max(theirs) > 0, "a vocabulary of 600 needs more tokens than one of 49,152 and more"
