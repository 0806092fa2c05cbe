"""Samples to take scales from: drawn by the seed, none twice, never padded."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.packs.packed_files import PackingSettings, write_packed
from nemo_ext.data.packs.sample_files import write_samples
from nemo_ext.data.sft.job import run as sft_data
from nemo_ext.data.text.indexed_dataset import read_index
from nemo_ext.quantization.calibration import CalibrationSettings, batches, load

VOCABULARY = 384


@pytest.fixture
def packs(tmp_path: Path) -> Callable[[list[list[int]]], Path]:
    """Packs of samples; repeated ones are in them as often as they are given."""

    def write(samples: list[list[int]]) -> Path:
        made = write_samples(tmp_path / "samples", ((ids, [1] * len(ids)) for ids in samples), vocab_size=VOCABULARY)
        write_packed(tmp_path / "set" / "train", [made], PackingSettings(capacity=64), vocab_size=VOCABULARY)
        return tmp_path / "set"

    return write


def texts(samples: Any) -> list[tuple[int, ...]]:
    return [tuple(map(int, ids)) for ids in samples]


def test_packs_give_each_sample_once_and_cut(packs: Callable[..., Path], tmp_path: Path) -> None:
    given_ = [[number + 1] * (number % 9 + 2) for number in range(30)]
    folder = packs(given_ * 3 + [[7]])
    wanted = CalibrationSettings(data=str(folder), samples=20, held_out=10, max_length=6)

    found = load(wanted, model=tmp_path, vocab_size=VOCABULARY)

    both = texts(found.samples) + texts(found.held_out)
    assert sorted(both) == sorted(tuple(ids[:6]) for ids in given_)
    assert (len(found.samples), len(found.held_out), found.available) == (20, 10, 91)
    assert found.tokens == sum(map(len, found.samples))
    assert both == texts((again := load(wanted, model=tmp_path, vocab_size=VOCABULARY)).samples) + texts(again.held_out)
    other = load(
        CalibrationSettings(data=f"{folder}/train", samples=20, held_out=10, max_length=6, seed=5),
        model=tmp_path,
        vocab_size=VOCABULARY,
    )
    assert texts(other.samples) != texts(found.samples)


def test_the_index_is_read_as_it_was_written(packs: Callable[..., Path]) -> None:
    folder = packs([[5, 6, 7], [8, 9]])

    lengths, starts, dtype = read_index(folder / "train.idx")

    ids = np.fromfile(folder / "train.bin", dtype=dtype)
    width = np.dtype(dtype).itemsize
    rows = [ids[start // width : start // width + length] for start, length in zip(starts, lengths, strict=True)]
    assert sorted(map(tuple, rows)) == [(5, 6, 7), (8, 9)]
    with pytest.raises(ValueError, match="not an index of token ids"):
        read_index(folder / "train_loss.idx")
    (folder / "short.idx").write_bytes((folder / "train.idx").read_bytes()[:30])
    with pytest.raises(ValueError, match="truncated, or not a Megatron index"):
        read_index(folder / "short.idx")


def test_conversations_are_rendered_by_the_models_template(
    folder_of: Callable[..., Path], conversations: Callable[[int], Path]
) -> None:
    from transformers import AutoTokenizer

    model, data = folder_of("domyn_small_tiny", "*-"), conversations(30)
    found = load(CalibrationSettings(data=str(data), samples=18, held_out=12), model=model, vocab_size=VOCABULARY)

    tokenizer = AutoTokenizer.from_pretrained(model)
    records = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    rendered = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in records]
    expected = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in rendered]
    assert sorted(texts(found.samples) + texts(found.held_out)) == sorted(expected)


def test_the_choice_does_not_depend_on_the_order_of_the_file(
    folder_of: Callable[..., Path], conversations: Callable[[int], Path], tmp_path: Path
) -> None:
    model, data = folder_of("domyn_small_tiny", "*-"), conversations(60)
    lines = data.read_text().splitlines()
    reversed_ = tmp_path / "reversed.jsonl"
    reversed_.write_text("\n".join([*reversed(lines), *lines[:9]]) + "\n")

    one, two = (
        load(CalibrationSettings(data=str(path), samples=8, held_out=3), model=model, vocab_size=VOCABULARY)
        for path in (data, reversed_)
    )

    assert texts(one.samples) == texts(two.samples) and texts(one.held_out) == texts(two.held_out)


def test_what_sft_data_writes_is_read(
    folder_of: Callable[..., Path], conversations: Callable[[int], Path], tmp_path: Path
) -> None:
    from nemo_ext.job.config import compose

    model, data = folder_of("domyn_small_tiny", "*-"), conversations(40)
    words = ["output=" + str(tmp_path / "sft"), "template=nemotron3_nano", f"tokenizer={model}", "workers=1"]
    words += [
        f"sources=[{{name: chat, path: {data}}}]",
        "+packing.longer=drop",
        "near_duplicates=null",
        "reasoning=null",
    ]
    sft_data(compose("sft_data", words))

    found = load(
        CalibrationSettings(data=str(tmp_path / "sft"), samples=20, held_out=4), model=model, vocab_size=VOCABULARY
    )

    alone = load(CalibrationSettings(data=str(data), samples=40, held_out=0), model=model, vocab_size=VOCABULARY)
    assert set(texts(found.samples)) <= set(texts(alone.samples))
    assert len(set(texts(found.samples) + texts(found.held_out))) == 24


@pytest.mark.parametrize("packed", [False, True])
def test_samples_with_a_trace(packed: bool, folder_of: Callable[..., Path], tmp_path: Path) -> None:
    from nemo_ext.job.config import compose

    model, data = folder_of("domyn_small_tiny", "*-"), tmp_path / "chats.jsonl"
    chats = [
        [{"role": "user", "content": f"Question {n}"}, {"role": "assistant", "content": f"{n}"}] for n in range(24)
    ]
    for chat in chats[::3]:
        chat[1]["reasoning_content"] = "It is so."
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    if packed:
        words = [f"output={tmp_path}/sft", "template=nemotron3_nano", f"tokenizer={model}", "workers=1"]
        words += [
            f"sources=[{{name: chat, path: {data}}}]",
            "near_duplicates=null",
            "reasoning=null",
            "validation_share=0",
        ]
        sft_data(compose("sft_data", words))
    wanted = {"data": str(tmp_path / "sft" if packed else data), "samples": 6, "held_out": 2, "thinking": True}

    found = load(CalibrationSettings(**wanted), model=model, vocab_size=VOCABULARY)

    assert (len(found.samples), len(found.held_out)) == (6, 2)
    with pytest.raises(ValueError, match="8 distinct samples of 2 tokens or more with a reasoning trace, but"):
        load(CalibrationSettings(**{**wanted, "samples": 7}), model=model, vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 31}, r"30 distinct samples.*calibration.samples \+ calibration.held_out is 31"),
        ({"samples": 20, "held_out": 11}, r"30 distinct samples.*is 31"),
    ],
)
def test_too_few_samples_are_an_error_that_counts(
    changes: dict[str, int], message: str, packs: Callable[..., Path], tmp_path: Path
) -> None:
    folder = packs([[number + 1, 2] for number in range(30)])

    with pytest.raises(ValueError, match=message):
        load(CalibrationSettings(data=str(folder), **{"held_out": 0, **changes}), model=tmp_path, vocab_size=VOCABULARY)


def test_another_tokenizer_is_an_error(packs: Callable[..., Path], tmp_path: Path) -> None:
    folder = packs([[number + 1, 300] for number in range(5)])

    with pytest.raises(ValueError, match="has the token id 300, but the model has 257 tokens"):
        load(CalibrationSettings(data=str(folder), samples=5, held_out=0), model=tmp_path, vocab_size=257)


@given(st.lists(st.integers(2, 12), max_size=40), st.integers(1, 40))
def test_batches_hold_every_sample_once_without_padding(lengths: list[int], batch_tokens: int) -> None:
    samples = [np.full(length, number) for number, length in enumerate(lengths)]

    made = list(batches(samples, batch_tokens=batch_tokens))

    rows = [row for batch in made for row in batch]
    assert sorted(map(tuple, rows)) == sorted(map(tuple, samples))
    assert all(batch.size <= batch_tokens or len(batch) == 1 for batch in made)
    assert [batch.shape[1] for batch in made] == sorted((batch.shape[1] for batch in made), reverse=True)


@pytest.mark.skipif(find_spec("modelopt") is not None, reason="ModelOpt is installed")
def test_without_modelopt_no_model_is_loaded(
    random_llama: Path, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hi, all of you"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    monkeypatch.setattr("nemo_ext.quantization.job._quantise", pytest.fail)

    words = [f"from={random_llama}", f"to={tmp_path / 'to'}", f"calibration.data={tmp_path / 'chat.jsonl'}"]
    code, _, err = command("quantize", *words, "precision=fp8_current")

    assert (code, err) == (2, "error: nemo-ext quantize requires ModelOpt: pip install 'nemo_ext[ptq]'\n")
