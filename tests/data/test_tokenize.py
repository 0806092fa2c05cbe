import json
import logging
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

import nemo_ext
from nemo_ext.data.sources import Source
from nemo_ext.data.tokenize import Manifest, read_manifest, split_position, tokenize_blend, tokenize_stream
from nemo_ext.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

ROOT = str(Path(nemo_ext.__file__).parents[1])
WORDS = ["the", "model", "is", "a", "sequence", "of", "residual", "blocks", "größe", "大小"]


def texts_of(count: int, *, first: int = 0) -> list[str]:
    """Different texts of a few to a few hundred words, the same in every run."""
    draw = np.random.default_rng(7)
    lengths = draw.integers(3, 300, size=first + count)
    return [f"{number}: " + " ".join(draw.choice(WORDS, size=length)) for number, length in enumerate(lengths)][first:]


def jsonl(path: Path, texts: list[str], **options: object) -> Source:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source.from_config({"kind": "jsonl", "paths": str(path), **options})


def read_back(manifest: Manifest, split: str) -> list[list[int]]:
    """The documents of a split, read by Megatron's own reader."""
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dataset = indexed_dataset.IndexedDataset(manifest.split_prefix(split))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[number].tolist() for number in range(len(dataset))]


def texts_in(manifest: Manifest, split: str, tokenizer: Tokenizer) -> list[str]:
    documents = read_back(manifest, split)
    assert all(ids[-1] == tokenizer.eod for ids in documents)
    assert all(tokenizer.eod not in ids[:-1] for ids in documents)
    return [tokenizer.decode(ids) for ids in documents]


def files(prefix: Path) -> dict[str, bytes]:
    """Content of everything that belongs to a finished stream, by what follows the prefix."""
    found = sorted(prefix.parent.glob(f"{prefix.name}[_.]*"))
    return {path.name.removeprefix(prefix.name): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts_of(50), trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


# ------------------------------------------------------------------------------- what is written


def test_megatron_reads_back_the_same_text(tmp_path: Path, bpe_file: Path) -> None:
    texts = texts_of(200)
    source = jsonl(tmp_path / "in.jsonl", texts)

    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(bpe_file)):
        manifest = tokenize_stream(source, tokenizer, tmp_path / tokenizer.identity, workers=1, progress=False)
        train, valid = (texts_in(manifest, split, tokenizer) for split in ("train", "valid"))

        assert sorted(train + valid) == sorted(texts)
        assert train == [text for text in texts if text in set(train)], "the order of the source"
        for split, found in (("train", train), ("valid", valid)):
            counts = manifest.splits[split]
            assert counts.documents == len(found)
            assert counts.tokens == sum(map(len, read_back(manifest, split)))
            assert counts.text_bytes == sum(len(text.encode()) for text in found)
        assert manifest.dtype == "uint16"


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    vocabulary = {"</s>": 0} | {f"w{number}": number for number in range(1, 70_000)}
    rust = RustTokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "in.jsonl", ["w69999 w1", "w2 w65535"])

    manifest = tokenize_stream(
        source, HuggingFaceTokenizer(tmp_path), tmp_path / "out", validation_share=0, workers=1, progress=False
    )

    assert manifest.dtype == "int32"
    assert read_back(manifest, "train") == [[69999, 1, 0], [2, 65535, 0]]


def test_the_manifest_says_what_was_made_from_what(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b", "a", "  ", "c"], max_bad_share=0.5)
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("not json\n")

    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, progress=False)

    assert read_manifest(tmp_path / "out") == manifest
    assert Source.from_config(manifest.source) == source
    assert manifest.records == 6
    assert manifest.skipped == {"duplicate": 1, "empty": 1, "malformed": 1}
    assert manifest.examples["malformed"][0].startswith(f"{tmp_path / 'in.jsonl'}:6: not JSON")
    assert sum(counts.documents for counts in manifest.splits.values()) == 3
    assert (manifest.vocab_size, manifest.eod, manifest.tokenizer_identity) == (257, 256, "byte-257")


def test_finished_files_can_be_moved(tmp_path: Path) -> None:
    tokenize_stream(jsonl(tmp_path / "in.jsonl", ["a", "b"]), ByteTokenizer(), tmp_path / "one/out", workers=1)
    shutil.move(tmp_path / "one", tmp_path / "two")

    manifest = read_manifest(tmp_path / "two/out")

    assert {*texts_in(manifest, "train", ByteTokenizer()), *texts_in(manifest, "valid", ByteTokenizer())} == {"a", "b"}


# ------------------------------------------------------------------------------------- the split


def test_no_document_is_in_both_splits_and_the_share_is_about_right(tmp_path: Path) -> None:
    texts = [f"text {number % 1500}" for number in range(2000)]
    source = jsonl(tmp_path / "in.jsonl", texts)

    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", validation_share=0.1, workers=1)
    train, valid = (texts_in(manifest, split, ByteTokenizer()) for split in ("train", "valid"))

    assert not set(train) & set(valid)
    assert sorted(train + valid) == sorted(set(texts))
    # 1500 draws with p = 0.1: five standard deviations are 58.
    assert abs(len(valid) - 150) < 58


def test_documents_keep_their_split_when_the_source_grows(tmp_path: Path) -> None:
    texts = texts_of(300)
    valid = []
    for count in (200, 300):
        source = jsonl(tmp_path / "in.jsonl", texts[:count])
        manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / f"out{count}", workers=1)
        valid.append(texts_in(manifest, "valid", ByteTokenizer()))

    assert [text for text in valid[1] if text in texts[:200]] == valid[0]


def test_another_seed_gives_another_split(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(200))

    one, two = (
        tokenize_stream(source, ByteTokenizer(), tmp_path / f"out{seed}", validation_share=0.2, seed=seed, workers=1)
        for seed in (1, 2)
    )

    assert texts_in(one, "valid", ByteTokenizer()) != texts_in(two, "valid", ByteTokenizer())


def test_the_split_of_a_document_never_changes_between_versions() -> None:
    # Another value here would move documents from training to validation in everybody's data.
    assert split_position(1234, "a.jsonl:1") == SPLIT_POSITION
    assert split_position(1234, "bad name \udcff:1") < 2**64


SPLIT_POSITION = 15606018129191011366


@pytest.mark.parametrize("share", [1e-9, 0.999999999])
def test_two_documents_are_one_for_each_split(tmp_path: Path, share: float) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b"])

    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", validation_share=share, workers=1)

    found = [texts_in(manifest, split, ByteTokenizer()) for split in ("train", "valid")]
    assert sorted(found) == [["a"], ["b"]]


@pytest.mark.parametrize(("texts", "share"), [(["a"], 0.5), (["a", "b"], 0.0)])
def test_without_validation_documents_there_are_no_validation_files(
    tmp_path: Path, texts: list[str], share: float
) -> None:
    prefix = tmp_path / "out"
    tokenize_stream(jsonl(tmp_path / "in.jsonl", ["x", "y"]), ByteTokenizer(), prefix, workers=1)
    assert Path(f"{prefix}_valid.bin").exists()

    manifest = tokenize_stream(
        jsonl(tmp_path / "in.jsonl", texts), ByteTokenizer(), prefix, validation_share=share, workers=1
    )

    assert manifest.splits["valid"].documents == 0
    assert list(files(prefix)) == [".json", "_train.bin", "_train.idx"]
    assert texts_in(manifest, "train", ByteTokenizer()) == texts


# ------------------------------------------------------------------- workers, shards, interruption


def test_the_files_do_not_depend_on_workers_or_shards(tmp_path: Path, bpe_file: Path) -> None:
    texts = texts_of(120) + texts_of(20)
    source = jsonl(tmp_path / "in.jsonl", texts, max_bytes=60_000)
    made = []
    for workers, documents_per_shard in ((1, None), (1, 7), (2, 13), (3, 1)):
        prefix = tmp_path / f"{workers}-{documents_per_shard}" / "out"
        manifest = tokenize_stream(
            source,
            HuggingFaceTokenizer(bpe_file),
            prefix,
            workers=workers,
            documents_per_shard=documents_per_shard,
            progress=False,
        )
        made.append({name: content for name, content in files(prefix).items() if name != ".json"})
        assert manifest.reached_max_bytes
        assert sum(counts.text_bytes for counts in manifest.splits.values()) <= 60_000

    assert sorted(made[0]) == ["_train.bin", "_train.idx", "_valid.bin", "_valid.idx"]
    assert all(other == made[0] for other in made[1:])


SCRIPT = """
import sys
from nemo_ext.data.sources import Source
from nemo_ext.data.tokenize import tokenize_stream
from nemo_ext.data.tokenizers import HuggingFaceTokenizer

if __name__ == "__main__":
    source = Source.from_config({"kind": "jsonl", "paths": sys.argv[1]})
    tokenizer = HuggingFaceTokenizer(sys.argv[2])
    tokenize_stream(source, tokenizer, sys.argv[3], workers=int(sys.argv[4]), documents_per_shard=20)
"""


def stop_in_the_middle(
    tmp_path: Path, bpe_file: Path, prefix: Path, stop: Callable[[subprocess.Popen[bytes]], None]
) -> int:
    """Start tokenising in a process of its own, stop it after its first shards; returns how many are finished."""
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    with open(tmp_path / "stderr", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, script, tmp_path / "in.jsonl", bpe_file, prefix, "2"],
            env=os.environ | {"PYTHONPATH": ROOT},
            stderr=errors,
            start_new_session=True,
        )
    shards = Path(f"{prefix}.shards")
    deadline = time.monotonic() + 60
    while len(list(shards.glob("*.npz"))) < 3:
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < deadline, "no shards after a minute"
        time.sleep(0.002)
    workers = psutil.Process(process.pid).children(recursive=True)
    stop(process)
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive, "workers outlived their parent"
    assert not Path(f"{prefix}.json").exists()
    return len(list(shards.glob("*.npz")))


@pytest.mark.parametrize("how", ["kill -9", "ctrl-c"])
def test_a_stopped_run_goes_on_and_gives_the_same_files(tmp_path: Path, bpe_file: Path, how: str) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(8000))
    tokenizer = HuggingFaceTokenizer(bpe_file)
    tokenize_stream(source, tokenizer, tmp_path / "whole/out", workers=1, documents_per_shard=20, progress=False)
    stops: dict[str, Callable[[subprocess.Popen[bytes]], None]] = {
        "kill -9": lambda process: process.kill(),
        "ctrl-c": lambda process: os.killpg(process.pid, signal.SIGINT),
    }

    finished = stop_in_the_middle(tmp_path, bpe_file, tmp_path / "stopped/out", stops[how])
    assert 3 <= finished < 400
    tokenize_stream(source, tokenizer, tmp_path / "stopped/out", workers=1, documents_per_shard=20, progress=False)

    assert files(tmp_path / "stopped/out") == files(tmp_path / "whole/out")
    assert len(os.listdir(tmp_path / "stopped")) == 5, "nothing unfinished is left behind"


def test_input_that_grows_while_it_is_read_is_an_error(tmp_path: Path, bpe_file: Path) -> None:
    jsonl(tmp_path / "in.jsonl", texts_of(8000))

    def append(process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGSTOP)
        with open(tmp_path / "in.jsonl", "a") as file:
            file.write('{"text": "late"}\n')
        os.killpg(process.pid, signal.SIGCONT)

    stop_in_the_middle(tmp_path, bpe_file, tmp_path / "out", append)

    assert "out: input files changed while they were read" in (tmp_path / "stderr").read_text()


def interrupted(source: Source, prefix: Path, **options: Any) -> Path:
    """Leave a stream with all its shards but no output, as if killed in the last pass; returns the shards."""
    in_the_way = Path(f"{prefix}_train.bin")
    in_the_way.mkdir()
    with pytest.raises(IsADirectoryError):
        tokenize_stream(source, ByteTokenizer(), prefix, workers=1, documents_per_shard=1, **options)
    in_the_way.rmdir()
    return Path(f"{prefix}.shards")


def test_finished_shards_are_used_again(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    shards = interrupted(source, tmp_path / "out")
    # A shard that says something else shows that it was not made again.
    for name in ("tokens", "npz"):
        shutil.copy(shards / f"00002.{name}", shards / f"00000.{name}")
    for path in shards.glob("00001.*"):
        path.unlink()

    manifest = tokenize_stream(
        source, ByteTokenizer(), tmp_path / "out", workers=1, documents_per_shard=1, validation_share=0.05
    )

    assert sorted(texts_in(manifest, "train", ByteTokenizer()) + texts_in(manifest, "valid", ByteTokenizer())) == [
        "b",
        "c",
    ]


def test_shards_of_other_settings_are_not_mixed_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(40))
    interrupted(source, tmp_path / "out", seed=1)
    tokenize_stream(source, ByteTokenizer(), tmp_path / "fresh", seed=2, workers=1)
    assert "starting over" not in caplog.text

    tokenize_stream(source, ByteTokenizer(), tmp_path / "out", seed=2, workers=1)

    assert "out.shards: begun with other settings or input files: starting over" in caplog.text
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


def test_a_damaged_shard_is_an_error_that_says_what_to_remove(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    shards = interrupted(source, tmp_path / "out")
    os.truncate(shards / "00001.npz", 100)
    os.truncate(shards / "00002.tokens", 1)

    def again() -> Manifest:
        return tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, documents_per_shard=1)

    with pytest.raises(ValueError, match=r"00001\.npz is damaged .*: remove .*out\.shards and run again"):
        again()
    (shards / "00001.npz").unlink()
    with pytest.raises(ValueError, match=r"00002\.tokens is damaged: remove .*out\.shards and run again"):
        again()
    shutil.rmtree(shards)
    assert sum(counts.documents for counts in again().splits.values()) == 3


def test_a_main_script_that_workers_cannot_import_is_explained(tmp_path: Path) -> None:
    jsonl(tmp_path / "in.jsonl", ["a", "b"])
    script = f"""
from nemo_ext.data.sources import Source
from nemo_ext.data.tokenize import tokenize_stream
from nemo_ext.data.tokenizers import ByteTokenizer
source = Source.from_config({{"kind": "jsonl", "paths": {str(tmp_path / "in.jsonl")!r}}})
tokenize_stream(source, ByteTokenizer(), {str(tmp_path / "out")!r}, workers=2)
"""

    ended = subprocess.run(
        [sys.executable, "-"], input=script, env=os.environ | {"PYTHONPATH": ROOT}, capture_output=True, text=True
    )

    assert ended.returncode != 0
    assert "RuntimeError: a worker process died" in ended.stderr
    assert 'if __name__ == "__main__":' in ended.stderr


# ------------------------------------------------------------------------------------- run again


def test_a_finished_stream_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = jsonl(tmp_path / "in.jsonl", texts_of(40))
    first = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")}

    again = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=2, documents_per_shard=3)

    assert again == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")} == before
    assert "already tokenised" in caplog.text


@pytest.mark.parametrize("change", ["input", "seed", "tokenizer", "lost file", "cut file"])
def test_a_stream_that_no_longer_fits_is_made_again(
    tmp_path: Path, bpe_file: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(40))
    tokenizer: Tokenizer = ByteTokenizer()
    seed = 1
    tokenize_stream(source, tokenizer, tmp_path / "out", seed=seed, workers=1)
    if change == "input":
        source = jsonl(tmp_path / "in.jsonl", texts_of(50))
    if change == "seed":
        seed = 2
    if change == "tokenizer":
        tokenizer = HuggingFaceTokenizer(bpe_file)
    if change == "lost file":
        (tmp_path / "out_valid.idx").unlink()
    if change == "cut file":
        os.truncate(tmp_path / "out_train.bin", 100)

    tokenize_stream(source, tokenizer, tmp_path / "out", seed=seed, workers=1)
    tokenize_stream(source, tokenizer, tmp_path / "fresh", seed=seed, workers=1)

    assert "starting over" in caplog.text
    assert files(tmp_path / "out") == files(tmp_path / "fresh")


def test_a_file_that_is_not_a_manifest_is_not_overwritten(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "code.json", ["a", "b"])
    before = (tmp_path / "code.json").read_bytes()

    with pytest.raises(ValueError, match=r"code\.json: not a manifest .*: choose another prefix"):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "code", workers=1)

    assert (tmp_path / "code.json").read_bytes() == before
    with pytest.raises(ValueError, match="no such manifest: tokenise the stream first"):
        read_manifest(tmp_path / "nothing")


# ---------------------------------------------------------------------------------------- errors


def test_a_source_without_documents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "empty.jsonl").write_text("")

    for name, message in (
        ("in", r"no documents in 1 records: 1 empty \(in\.jsonl:1\)"),
        ("empty", "no documents in 0"),
    ):
        source = Source.from_config({"kind": "jsonl", "paths": str(tmp_path / f"{name}.jsonl")})
        with pytest.raises(ValueError, match=message):
            tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1)
    assert [path.name for path in tmp_path.glob("out*")] == ["out.shards"]


def test_an_error_in_a_worker_reaches_the_caller(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"good" if number < 4 else b"\xff")
    source = Source.from_config({"kind": "text", "paths": str(tmp_path / "*.txt")})

    with pytest.raises(ValueError, match=r"4\.txt: byte 0\): convert it to UTF-8"):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=2, documents_per_shard=1)


def test_too_many_malformed_records_are_an_error_over_all_shards(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(50))
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("{\n" * 2)

    with pytest.raises(ValueError, match=r"2 of 52 records .*in\.jsonl:51: not JSON"):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, documents_per_shard=5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_share": 1.0}, "validation_share must be a number from 0 to below 1, not 1.0"),
        ({"validation_share": -0.1}, "validation_share"),
        ({"seed": "x"}, "seed must be a whole number, not 'x'"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"documents_per_shard": 0}, "documents_per_shard must be a whole number of at least 1"),
    ],
)
def test_wrong_settings_are_errors(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a"])

    with pytest.raises(ValueError, match=message):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "out", **options)


def test_progress_is_plain_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(40))

    tokenize_stream(source, ByteTokenizer(), tmp_path / "quiet", workers=1, progress=False)
    assert "out: read" not in capsys.readouterr().err
    tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, progress=True)
    size = (tmp_path / "in.jsonl").stat().st_size / 1e6
    assert f"out: read {size:.1f} of {size:.1f} MB of input" in capsys.readouterr().err


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path, bpe_file: Path) -> None:
    jsonl(tmp_path / "in.jsonl", texts_of(40))
    (tmp_path / "run.py").write_text(SCRIPT)
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))

    command: list[str | Path] = [
        sys.executable,
        tmp_path / "run.py",
        tmp_path / "in.jsonl",
        bpe_file,
        tmp_path / "out",
        "1",
    ]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": ROOT}, stderr=end, check=True)

    assert b"out: 100%" in os.read(terminal, 100_000)


# ----------------------------------------------------------------------------------------- blends


def blend(tmp_path: Path) -> dict[str, Any]:
    for name in ("web", "code"):
        jsonl(tmp_path / f"{name}.jsonl", [f"{name} {text}" for text in texts_of(30)])
    return {
        "directory": str(tmp_path / "data"),
        "tokenizer": {"kind": "byte"},
        "validation_share": 0.2,
        "seed": 3,
        "workers": 1,
        "streams": [
            {"name": name, "weight": weight, "source": {"kind": "jsonl", "paths": str(tmp_path / f"{name}.jsonl")}}
            for name, weight in (("web", 0.6), ("code", 0.4))
        ],
    }


def test_a_blend_writes_every_stream_under_its_name(tmp_path: Path) -> None:
    config = blend(tmp_path)
    config["streams"][1]["prefix"] = str(tmp_path / "elsewhere" / "py")
    config["streams"].append({"name": "ready", "weight": 1, "prefix": str(tmp_path / "made_before")})

    manifests = tokenize_blend(OmegaConf.create(config), progress=False)

    assert [manifest.prefix for manifest in manifests] == [str(tmp_path / "data/web"), str(tmp_path / "elsewhere/py")]
    for manifest, name in zip(manifests, ("web", "code"), strict=True):
        texts = [text for split in ("train", "valid") for text in texts_in(manifest, split, ByteTokenizer())]
        assert len(texts) == 30
        assert all(text.startswith(name) for text in texts)
        assert (manifest.validation_share, manifest.seed) == (0.2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(stream=[]), "blend: unknown key 'stream': did you mean 'streams'"),
        (lambda c: c.pop("directory"), "blend: the key 'directory' is missing"),
        (lambda c: c.update(streams=[]), "streams must be a list of at least one stream"),
        (lambda c: c.update(tokenizer="byte"), "tokenizer must be a mapping such as {kind: byte}, not 'byte'"),
        (lambda c: c.update(tokenizer={"kind": "huggingface", "path": "nowhere"}), "tokenizer nowhere: No such file"),
        (lambda c: c.update(validation_share="5%"), "validation_share must be a number"),
        (lambda c: c["streams"][1].update(name="web"), "two streams are named 'web'"),
        (lambda c: c["streams"][1].update(prefix=c["directory"] + "/web"), "two streams .* write .*/web"),
        (lambda c: c["streams"][1].update(name="../x"), "stream 2 of 2: name must be letters"),
        (lambda c: c["streams"][1].update(weight=0), "stream 'code': weight must be above 0, not 0"),
        (lambda c: c["streams"][1].pop("weight"), "stream 2 of 2: the key 'weight' is missing"),
        (lambda c: c["streams"][1].update(weigth=1), "stream 2 of 2: unknown key 'weigth': did you mean 'weight'"),
        (lambda c: c["streams"][1]["source"].update(kind="jsonnl"), "stream 'code': unknown source kind 'jsonnl'"),
        (lambda c: c["streams"][1]["source"].update(text_key="x"), r"stream 'code': .*code\.jsonl: no line has a text"),
    ],
)
def test_a_wrong_blend_is_an_error_before_any_work(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    config = blend(tmp_path)
    change(config)

    with pytest.raises(ValueError, match=message):
        tokenize_blend(config, progress=False)
    assert not (tmp_path / "data").exists()


def test_a_missing_file_of_a_blend_is_named_before_any_work(tmp_path: Path) -> None:
    config = blend(tmp_path)
    (tmp_path / "code.jsonl").unlink()

    with pytest.raises(FileNotFoundError, match=r"stream 'code': jsonl source: no such file: .*code\.jsonl"):
        tokenize_blend(config, progress=False)
    assert not (tmp_path / "data").exists()
