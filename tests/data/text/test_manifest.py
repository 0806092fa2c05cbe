import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.manifest import Manifest, read_manifest
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import ByteTokenizer, Tokenizer
from nemo_ext.data.tokenize import tokenize_stream

Write = Callable[..., Source]
Texts = Callable[[Manifest, str, Tokenizer], list[str]]


def test_the_manifest_records_source_tokenizer_and_counts(tmp_path: Path, jsonl: Write) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b", "a", "  ", "c"], max_bad_share=0.5)
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("not json\n")

    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, progress=False)

    assert read_manifest(tmp_path / "out") == manifest
    assert load_source(manifest.source) == source
    assert manifest.report.records == 6
    assert manifest.report.skipped == {"duplicate": 1, "empty": 1, "malformed": 1}
    assert manifest.report.examples["malformed"][0].startswith(f"{tmp_path / 'in.jsonl'}:6: not JSON")
    assert sum(counts.documents for counts in manifest.splits.values()) == 3
    assert manifest.skipped().startswith("; skipped 1 duplicate, 1 empty (in.jsonl:4), 1 malformed (/")
    assert (manifest.vocab_size, manifest.eod, manifest.tokenizer_identity) == (257, 256, "byte-257")


@pytest.mark.parametrize(
    ("texts", "share", "contents"),
    [
        (["é"], 0.5, "1 document, 3 tokens; no validation files, because one document cannot be split"),
        (["a", "bc"], 0, "2 documents, 5 tokens; no validation files, because validation_share is 0"),
        (["a", "bc"], 0.01, "2 documents (1 for training, 1 for validation), 5 tokens"),
    ],
)
def test_the_contents_state_the_amount_and_why_there_is_no_validation(
    tmp_path: Path, jsonl: Write, texts: list[str], share: float, contents: str
) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts)

    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", validation_share=share, workers=1)

    assert manifest.contents() == contents
    assert manifest.skipped() == ""


def test_files_of_another_version_are_replaced(
    tmp_path: Path, jsonl: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b"])
    first = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1)
    (tmp_path / "out.json").write_text(json.dumps({"format_version": 1, "config_hash": "other", "tokens": 4}))

    with pytest.raises(ValueError, match=r"out\.json was made by another version of nemo_ext: tokenise"):
        read_manifest(tmp_path / "out")
    assert tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1) == first

    assert "or by another version: starting over" in capsys.readouterr().err
    assert read_manifest(tmp_path / "out") == first


def test_finished_files_can_be_moved(tmp_path: Path, jsonl: Write, texts_in: Texts) -> None:
    tokenize_stream(jsonl(tmp_path / "in.jsonl", ["a", "b"]), ByteTokenizer(), tmp_path / "one/out", workers=1)
    shutil.move(tmp_path / "one", tmp_path / "two")

    manifest = read_manifest(tmp_path / "two/out")

    assert {*texts_in(manifest, "train", ByteTokenizer()), *texts_in(manifest, "valid", ByteTokenizer())} == {"a", "b"}


def test_a_file_that_is_not_a_manifest_is_not_overwritten(tmp_path: Path, jsonl: Write) -> None:
    source = jsonl(tmp_path / "code.json", ["a", "b"])
    before = (tmp_path / "code.json").read_bytes()

    with pytest.raises(ValueError, match=r"code\.json is not a manifest .*: choose another prefix"):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "code", workers=1)

    assert (tmp_path / "code.json").read_bytes() == before
    with pytest.raises(ValueError, match="does not exist: tokenise the stream first"):
        read_manifest(tmp_path / "nothing")


def test_a_damaged_manifest_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "web.json").write_text(json.dumps({"format_version": 2, "config_hash": "x"}))

    with pytest.raises(ValueError, match=r"web\.json is damaged .*: remove it and tokenise the stream again"):
        read_manifest(tmp_path / "web")
