"""`nemo-ext train_tokenizer` end to end: tokenizers that other libraries load, and correct counts in the report."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nemo_ext.chat.template import Template
from nemo_ext.data.text.documents import split_position
from nemo_ext.data.text.tokenizers import HuggingFaceTokenizer
from nemo_ext.data.text.user_files import JsonlSource
from nemo_ext.data.vocabulary.job import run
from nemo_ext.data.vocabulary.sample import draw
from nemo_ext.data.vocabulary.settings import Weighted
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
    """200 words: fixed words, and words of random syllables, many of them repeated."""
    chance = random.Random(number)
    words = ["".join(chance.choices(SYLLABLES[:40], k=chance.randint(1, 3))) for _ in range(100)]
    return " ".join(chance.choices([*WORDS, *words], k=200)) + f" {number}"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A JSONL file of 300 documents."""
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text_of(number)}) + "\n" for number in range(300)))
    return path


@pytest.fixture
def train(tmp_path: Path, text: Path) -> Callable[..., Path]:
    """Function that runs the job in this process and returns the output folder."""

    def run_job(*words: str, vocab: int = 400, name: str = "made") -> Path:
        run(compose("train_tokenizer", [f"input={text}", f"vocab={vocab}", f"output={tmp_path / name}", *words]))
        return tmp_path / name

    return run_job


@pytest.mark.parametrize("preset", ["domyn", "nemotron3", "llama_nemotron", "olmo1", "olmo3"])
def test_a_preset_splits_numbers_as_its_family_does_and_decodes_losslessly(
    preset: str, train: Callable[..., Path]
) -> None:
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


def test_the_folder_loads_for_data_jobs_megatron_and_transformers(train: Callable[..., Path]) -> None:
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


def test_the_report_counts_held_out_text_only(train: Callable[..., Path], text: Path) -> None:
    other = train(vocab=260, name="other")
    folder = train(f"compare=[{other}]", "held_out=1e5")

    counts = json.loads((folder / "report.json").read_text())["stream"]["text"]
    assert counts["this one"]["bytes"] == counts["other"]["bytes"] > 0
    assert counts["this one"]["tokens"] < counts["other"]["tokens"] <= counts["other"]["bytes"]
    # 2 % of the documents, by the documented hash.
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    held_out = [
        document
        for document in documents
        if split_position(1234, hashlib.blake2b(document.encode(), digest_size=16).hexdigest()) < 0.02 * 2**64
    ]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert 1 < len(held_out) < 20
    assert sum(len(document.encode()) for document in held_out) == counts["this one"]["bytes"]
    assert sum(len(document.split()) for document in held_out) == counts["this one"]["words"]
    assert sum(len(tokenizer.encode(document).ids) for document in held_out) == counts["this one"]["tokens"]
    report = (folder / "report.md").read_text()
    trained_on = sum(len(document.encode()) for document in documents if document not in held_out)
    assert f"| text | 100.0% | {trained_on:,} | {counts['this one']['bytes']:,} |" in report
    assert (folder / "report.html").is_file()


def test_the_report_has_the_longest_and_the_unused_tokens(train: Callable[..., Path], text: Path) -> None:
    folder = train("preset=olmo1", vocab=450)

    report = (folder / "report.md").read_text()
    assert "Longest: `'HTTPServer'`, " in report or "Longest: `' HTTPServer'`, " in report
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    used = {number for document in documents for number in tokenizer.encode(document).ids}
    unused = [
        name for name, number in tokenizer.get_vocab().items() if number not in used and name[:2] != "<|" and name[1:]
    ]
    # The report counts on the sample, without held-out text, so it has a few more.
    assert len(unused) <= json.loads((folder / "report.json").read_text())["unused"] <= len(unused) + 10


@pytest.mark.parametrize("deduplicate", [True, False])
def test_held_out_text_is_never_trained_on(deduplicate: bool, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text_of(number % 200)}) + "\n" for number in range(800)))
    stream = Weighted(name="a", source=JsonlSource(path=(str(path),), deduplicate=deduplicate), share=1.0)

    sample = draw(stream, train=10**8, held_out=10**6, seed=1)

    assert sample.held_out and not set(sample.held_out) & set(sample.train)
    assert len(sample.train) + len(sample.held_out) == (200 if deduplicate else 800)


def test_sampling_respects_max_bytes(text: Path) -> None:
    stream = Weighted(name="a", source=JsonlSource(path=(str(text),), max_bytes=20_000), share=1.0)

    sample = draw(stream, train=10**8, held_out=10**6, seed=1)

    assert 15_000 < sample.train_bytes + sample.held_out_bytes <= 20_000


def test_weights_are_shares_of_the_sample(tmp_path: Path) -> None:
    for name, letter in (("a", "abc "), ("b", "xyz ")):
        lines = [json.dumps({"text": f"{number} {letter * 500}"}) + "\n" for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    streams = ",".join(
        f"{{name: {name}, weight: {weight}, source: {{kind: jsonl, path: {tmp_path / name}.jsonl}}}}"
        for name, weight in (("a", 3), ("b", 1))
    )

    run(
        compose("train_tokenizer", [f"streams=[{streams}]", "vocab=300", f"output={tmp_path / 'made'}", "sample=40000"])
    )

    report = (tmp_path / "made" / "report.md").read_text()
    assert "| a | 75.0% | 30,000 |" in report and "| b | 25.0% | 10,000 |" in report


def test_a_second_run_does_nothing_and_other_settings_are_refused(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("template=domyn")
    before = (folder / "tokenizer.json").read_bytes()
    capsys.readouterr()
    train("template=domyn")
    assert "is already complete" in capsys.readouterr().err

    for words, vocab, message in ((("template=domyn",), 500, "vocab: 400 -> 500"), ((), 400, "template: ")):
        with pytest.raises(ValueError, match=rf"already has a tokenizer \({message}"):
            train(*words, vocab=vocab)
    (folder / "report.html").unlink()
    train("template=domyn", f"compare=[{folder}]")
    assert "training" not in capsys.readouterr().err
    assert json.loads((folder / "report.json").read_text())["stream"]["text"].keys() == {"this one", "made"}
    assert (folder / "report.html").is_file() and (folder / "tokenizer.json").read_bytes() == before
    assert (train("template=domyn", name="twin") / "tokenizer.json").read_bytes() == before


def test_text_that_spells_a_special_token_is_text(tmp_path: Path) -> None:
    texts = [f"{text_of(number)} <|endoftext|> more" for number in range(100)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    run(compose("train_tokenizer", [f"input={tmp_path}/text.jsonl", "vocab=400", f"output={tmp_path / 'made'}"]))

    tokenizer = HuggingFaceTokenizer(tmp_path / "made")
    (ids,) = tokenizer.encode([texts[0]])
    assert tokenizer.eod not in ids and tokenizer.decode(ids) == texts[0]
    assert "does not restore" not in (tmp_path / "made" / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["vocab=200"], "vocab"),
        (["vocab=257", "template=domyn"], "256 bytes and 3 special tokens: set it to at least 259"),
        (["split=(unclosed"], "not a valid Oniguruma regular expression"),
        (["end=<|nothing|>"], "not among the special tokens"),
        (["template=nobody"], "nobody"),
        (["compare=[/no/where]"], "/no/where"),
        (["sample=0"], "sample"),
        (["vocab=5000000000"], "vocab"),
        (["min_frequency=1e30"], "min_frequency"),
        (['special_tokens=["a","<|endoftext|>"]'], "special_tokens"),
        (["normalizer=NFX"], "normalizer"),
    ],
)
def test_invalid_settings_are_refused_before_any_work(
    words: list[str], message: str, train: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(*words)
    assert not (tmp_path / "made" / "tokenizer.json").exists()


def test_a_little_text_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.txt").write_text("a few words")

    run(compose("train_tokenizer", [f"input={tmp_path / 'one.txt'}", "vocab=500", f"output={tmp_path / 'made'}"]))

    assert "provide more text" in capsys.readouterr().err
    assert "too little text" in (tmp_path / "made" / "report.md").read_text()
