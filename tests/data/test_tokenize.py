import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from nemo_ext.data import tokenize
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.manifest import Manifest
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from nemo_ext.data.tokenize import tokenize_blend, tokenize_stream

Write = Callable[..., Source]
Draw = Callable[[int], list[str]]
Texts = Callable[[Manifest, str, Tokenizer], list[str]]
Ids = Callable[[Manifest, str], list[list[int]]]
Files = Callable[[Path], dict[str, bytes]]


def test_megatron_reads_back_the_same_text(
    tmp_path: Path, bpe_file: Path, jsonl: Write, texts_of: Draw, texts_in: Texts, ids_in: Ids
) -> None:
    texts = texts_of(200)
    source = jsonl(tmp_path / "in.jsonl", texts)

    for tokenizer in (ByteTokenizer(), HuggingFaceTokenizer(bpe_file)):
        manifest = tokenize_stream(source, tokenizer, tmp_path / tokenizer.identity, workers=1, progress=False)
        train, valid = (texts_in(manifest, split, tokenizer) for split in ("train", "valid"))

        assert sorted(train + valid) == sorted(texts)
        assert train == [text for text in texts if text in set(train)], "the order of the source"
        for split, texts_read in (("train", train), ("valid", valid)):
            counts = manifest.splits[split]
            assert counts.documents == len(texts_read)
            assert counts.tokens == sum(map(len, ids_in(manifest, split)))
            assert counts.text_bytes == sum(len(text.encode()) for text in texts_read)
        assert manifest.dtype == "uint16"


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path, jsonl: Write, ids_in: Ids) -> None:
    vocabulary = {"</s>": 0} | {f"w{number}": number for number in range(1, 70_000)}
    rust = RustTokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "in.jsonl", ["w69999 w1", "w2 w65535"])

    manifest = tokenize_stream(
        source, HuggingFaceTokenizer(tmp_path), tmp_path / "out", validation_share=0, workers=1, progress=False
    )

    assert manifest.dtype == "int32"
    assert ids_in(manifest, "train") == [[69999, 1, 0], [2, 65535, 0]]


def test_a_finished_stream_is_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jsonl: Write, texts_of: Draw
) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(40))
    first = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")}
    capsys.readouterr()

    again = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=2, documents_per_shard=3)

    assert again == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")} == before
    assert capsys.readouterr().err == f"out: already tokenised: {first.contents()}\n"


@pytest.mark.parametrize("change", ["input", "seed", "lost file", "cut file"])
def test_a_stream_with_other_settings_or_damaged_files_starts_over(
    tmp_path: Path,
    change: str,
    capsys: pytest.CaptureFixture[str],
    jsonl: Write,
    texts_of: Draw,
    files_of: Files,
) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(40))
    tokenizer, seed = ByteTokenizer(), 1
    tokenize_stream(source, tokenizer, tmp_path / "out", seed=seed, workers=1)
    if change == "input":
        source = jsonl(tmp_path / "in.jsonl", texts_of(50))
    if change == "seed":
        seed = 2
    if change == "lost file":
        (tmp_path / "out_valid.idx").unlink()
    if change == "cut file":
        os.truncate(tmp_path / "out_train.bin", 100)

    tokenize_stream(source, tokenizer, tmp_path / "out", seed=seed, workers=1)
    tokenize_stream(source, tokenizer, tmp_path / "fresh", seed=seed, workers=1)

    assert capsys.readouterr().err.count("starting over") == 1
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


def test_files_of_another_tokenizer_are_not_overwritten(
    tmp_path: Path, bpe_file: Path, capsys: pytest.CaptureFixture[str], jsonl: Write, texts_of: Draw, files_of: Files
) -> None:
    source, out = jsonl(tmp_path / "in.jsonl", texts_of(40)), tmp_path / "out"
    tokenize_stream(source, ByteTokenizer(), out, workers=1)
    assert capsys.readouterr().err.endswith(f"; {out}_*.bin and .idx, documents end with id 256\n")
    before = files_of(out)

    with pytest.raises(ValueError, match=r"out\.json were written with another tokenizer, \{'kind': 'byte'\}: choose"):
        tokenize_stream(source, HuggingFaceTokenizer(bpe_file), out, workers=1)

    assert files_of(out) == before


def test_a_blend_writes_every_stream_under_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jsonl: Write, texts_of: Draw, texts_in: Texts
) -> None:
    jsonl(tmp_path / "web.jsonl", [f"web {text}" for text in texts_of(30)])
    jsonl(tmp_path / "py.jsonl", [f"py {text}" for text in texts_of(30)])
    config = {
        "directory": str(tmp_path / "data"),
        "tokenizer": {"kind": "byte"},
        "validation_share": 0.2,
        "seed": 3,
        "streams": [
            {"name": "web", "weight": 0.6, "source": {"kind": "jsonl", "path": str(tmp_path / "web.jsonl")}},
            {
                "name": "code",
                "weight": 0.4,
                "source": {"kind": "jsonl", "path": [str(tmp_path / "py.jsonl")], "max_bytes": 5000},
                "prefix": str(tmp_path / "elsewhere/py"),
            },
            {"name": "ready", "weight": 1, "prefix": str(tmp_path / "made_before")},
        ],
    }

    manifests = tokenize_blend(OmegaConf.create(config), workers=1, progress=False)

    assert [manifest.prefix for manifest in manifests] == [str(tmp_path / "data/web"), str(tmp_path / "elsewhere/py")]
    for manifest, word in zip(manifests, ("web", "py"), strict=True):
        texts = [text for split in ("train", "valid") for text in texts_in(manifest, split, ByteTokenizer())]
        assert texts
        assert all(text.startswith(word) for text in texts)
        assert (manifest.validation_share, manifest.seed) == (0.2, 3)
    web, code = capsys.readouterr().err.splitlines()
    assert web == f"web: {manifests[0].contents()}; {manifests[0].where()}"
    assert code == f"code: {manifests[1].contents()}; stopped at max_bytes=5000; {manifests[1].where()}"


def test_an_unwritable_output_is_an_error(tmp_path: Path, jsonl: Write) -> None:
    jsonl(tmp_path / "in.jsonl", ["a", "b"])
    (tmp_path / "data").write_text("a file where the directory would be")
    stream = {"name": "x", "weight": 1, "source": {"kind": "jsonl", "path": str(tmp_path / "in.jsonl")}}

    with pytest.raises(ValueError, match=r"Not a directory: .*data/x\.json.* the same command resumes"):
        tokenize_blend(
            {"directory": str(tmp_path / "data"), "tokenizer": {"kind": "byte"}, "streams": [stream]}, workers=1
        )


def test_two_runs_do_not_write_the_same_stream(
    tmp_path: Path, jsonl: Write, bpe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b"])
    select = tokenize.select

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(tokenize, "select", select)
        with pytest.raises(ValueError, match="another run is using this directory"):
            tokenize_stream(source, HuggingFaceTokenizer(bpe_file), tmp_path / "out", workers=1, progress=False)
        return select(*arguments)

    monkeypatch.setattr(tokenize, "select", meanwhile)
    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, progress=False)

    assert manifest.tokenizer_identity == "byte-257"
    assert tokenize.select is select, "the second run was not started"
    assert not list(tmp_path.glob(".out*"))


def test_a_full_disk_is_reported_with_the_stream(tmp_path: Path, jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path / "in.jsonl", ["a", "b"])
    stream = {"name": "web", "weight": 1, "source": {"kind": "jsonl", "path": str(tmp_path / "in.jsonl")}}

    def full(*arguments: Any, **others: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokenize, "write_splits", full)
    data = {"directory": str(tmp_path / "d"), "tokenizer": {"kind": "byte"}, "workers": 1, "streams": [stream]}
    with pytest.raises(ValueError, match=r"tokenising .*/d/web failed \(.*No space left on device\): correct"):
        tokenize_blend(data, progress=False)


def test_a_source_without_documents_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": " "}\n')
    (tmp_path / "empty.jsonl").write_text("")

    for name, message in (
        ("in", r"none of its 1 records can be used \(1 empty \(in\.jsonl:1\)\)"),
        ("empty", r"/empty\.jsonl is empty or has only blank lines; give a file"),
    ):
        source = load_source({"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl")})
        with pytest.raises(ValueError, match=message):
            tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1)
    assert not list(tmp_path.glob("out*")), "refused input leaves no files"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_share": 1.0}, "validation_share must be a share from 0 to below 1, not 1.0"),
        ({"validation_share": -0.1}, "validation_share"),
        ({"seed": "x"}, "seed must be a whole number, not 'x'"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"documents_per_shard": 0}, "documents_per_shard must be a whole number of at least 1"),
    ],
)
def test_invalid_settings_are_errors(tmp_path: Path, options: dict[str, Any], message: str, jsonl: Write) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a"])

    with pytest.raises(ValueError, match=message):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "out", **options)
