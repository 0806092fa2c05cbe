"""`nemo-ext train_tokenizer` as a user meets it: tokenizers that others load, and a report that counts right."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nemo_ext.chat.template import Template
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.data.vocabulary.job import run
from nemo_ext.job.config import compose

WORDS = (
    "tree",
    "water",
    "2024",
    "running",
    "'s",
    "élan",
    "naïve",
    "  spaced",
    "日本語",
    "3.14159",
    "HTTPServer",
    "\n\n",
)


SYLLABLES = [first + vowel + last for first in "bdklmst" for vowel in "aeiou" for last in ("", "n", "r")]


def text_of(number: int) -> str:
    """200 words: fixed ones, and made ones of which some come again and again."""
    chance = random.Random(number)
    made = ["".join(chance.choices(SYLLABLES[:40], k=chance.randint(1, 3))) for _ in range(100)]
    return " ".join(chance.choices([*WORDS, *made], k=200)) + f" {number}"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A JSONL file of 300 documents."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text_of(number)}) + "\n" for number in range(300)))
    return path


@pytest.fixture
def train(tmp_path: Path, text: Path) -> Callable[..., Path]:
    """Runs the job in this process and returns the folder."""

    def made(*words: str, vocab: int = 400, name: str = "made") -> Path:
        run(compose("train_tokenizer", [f"input={text}", f"vocab={vocab}", f"output={tmp_path / name}", *words]))
        return tmp_path / name

    return made


@pytest.mark.parametrize("preset", ["domyn", "nemotron3", "llama_nemotron", "olmo1", "olmo3"])
def test_a_preset_cuts_numbers_as_its_family_does_and_gives_text_back(preset: str, train: Callable[..., Path]) -> None:
    folder = train(f"preset={preset}")

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    longest = {"domyn": 1, "nemotron3": 1, "llama_nemotron": 3, "olmo3": 3, "olmo1": 99}[preset]
    digits = [token for token in tokenizer.get_vocab() if token.strip("Ġ").isdecimal()]
    assert max(len(token.strip("Ġ")) for token in digits) <= longest
    assert any(len(token) > 1 for token in digits) == (longest > 1)
    for text in (text_of(1), "any text: \x00 🙂 \t\r\n ünïcode"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 400
    assert max(tokenizer.get_vocab().values()) == 399


def test_the_folder_is_one_that_data_megatron_and_transformers_load(train: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    folder = train("preset=domyn", "template=domyn", 'special_tokens=["<|endoftext|>","<|mine|>"]')

    ours = HuggingFaceTokenizer(folder)
    assert ours.eod_token == "<|endoftext|>" and ours.vocab_size == ours.token_count == 400
    loaded: Any = AutoTokenizer.from_pretrained(folder)
    assert loaded.chat_template == Template.load("domyn").source
    assert loaded.convert_tokens_to_ids(["<|endoftext|>", "<|mine|>", "<|im_start|>"]) == [396, 397, 398]
    chat = loaded.apply_chat_template([{"role": "user", "content": "water"}], tokenize=False)
    assert loaded(chat, add_special_tokens=False)["input_ids"].count(398) == chat.count("<|im_start|>") > 0
    assert loaded(text_of(3), add_special_tokens=False)["input_ids"] == list(ours.encode([text_of(3)])[0])


def test_the_report_counts_what_was_held_out_and_nothing_else(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(vocab=260, name="other")
    folder = train(f"compare=[{other}]", "held_out=1e5")

    found = json.loads((folder / "report.json").read_text())
    counts = found["stream"]["text"]
    assert counts["this one"]["bytes"] == counts["other"]["bytes"] > 0
    assert counts["this one"]["tokens"] < counts["other"]["tokens"] <= counts["other"]["bytes"]
    # The same pieces, found by the rule that the sample's documentation gives.
    from nemo_ext.data.text.documents import split_position
    from nemo_ext.data.text.user_files import JsonlSource
    from nemo_ext.data.vocabulary.sample import HELD_OUT, draw
    from nemo_ext.data.vocabulary.settings import Weighted

    sample = draw(
        Weighted(name="text", source=JsonlSource(path=(str(tmp_path / "text.jsonl"),)), share=1.0),
        train=10**9,
        held_out=10**5,
        seed=1234,
    )
    assert sum(len(each.encode()) for each in sample.held_out) == counts["this one"]["bytes"]
    assert not set(sample.held_out) & set(sample.train) and len(sample.held_out) + len(sample.train) == 300
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert sum(len(tokenizer.encode(each).ids) for each in sample.held_out) == counts["this one"]["tokens"]
    assert sum(len(each.split()) for each in sample.held_out) == counts["this one"]["words"]
    assert split_position(1234, "x") < 2**64 and HELD_OUT < 0.1
    assert "By language" in (folder / "report.md").read_text() and (folder / "report.html").is_file()


def test_weights_are_shares_of_the_sample(tmp_path: Path) -> None:
    for name, letter in (("a", "abc "), ("b", "xyz ")):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": letter * 500}) + "\n") * 200)
    streams = ",".join(
        f"{{name: {name}, weight: {weight}, source: {{kind: jsonl, path: {tmp_path / name}.jsonl}}}}"
        for name, weight in (("a", 3), ("b", 1))
    )

    run(
        compose("train_tokenizer", [f"streams=[{streams}]", "vocab=300", f"output={tmp_path / 'made'}", "sample=40000"])
    )

    report = (tmp_path / "made" / "report.md").read_text()
    assert "| a | 75.0% | 30,000 |" in report and "| b | 25.0% | 10,000 |" in report


def test_the_same_again_does_nothing_and_other_settings_are_refused(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train()
    before = (folder / "tokenizer.json").read_bytes()
    train()
    assert "is there already" in capsys.readouterr().err

    with pytest.raises(ValueError, match=r"has a tokenizer already \(vocab: 400 -> 500\)"):
        train(vocab=500)
    assert (folder / "tokenizer.json").read_bytes() == before
    assert (train(name="twin") / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vocab=200"], "vocab"),
        (["vocab=257", "template=domyn"], "256 bytes and 3 special tokens are 259"),
        (["split=(unclosed"], "no regular expression"),
        (["end=<|nothing|>"], "not among special_tokens"),
        (["template=nobody"], "nobody"),
        (["compare=[/no/where]"], "/no/where"),
        (["sample=0"], "sample"),
        (["normalizer=NFX"], "normalizer"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(
    words: list[str], message: str, train: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(*words)
    assert not (tmp_path / "made" / "tokenizer.json").exists()


def test_a_little_text_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("a few words")

    run(compose("train_tokenizer", [f"input={tmp_path / 'one.txt'}", "vocab=500", f"output={tmp_path / 'made'}"]))

    assert "give it more text" in capsys.readouterr().err
    assert "too little text" in (tmp_path / "made" / "report.md").read_text()
