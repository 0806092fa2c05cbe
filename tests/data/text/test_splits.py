from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.manifest import Manifest
from nemo_ext.data.text.tokenizers import ByteTokenizer, Tokenizer
from nemo_ext.data.tokenize import tokenize_stream

Write = Callable[..., Source]
Draw = Callable[[int], list[str]]
Texts = Callable[[Manifest, str, Tokenizer], list[str]]
Files = Callable[[Path], dict[str, bytes]]


def test_no_document_is_in_both_splits_and_the_share_is_about_right(
    tmp_path: Path, jsonl: Write, texts_in: Texts
) -> None:
    texts = [f"text {number % 1500}" for number in range(2000)]
    source = jsonl(tmp_path / "in.jsonl", texts)

    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", validation_share=0.1, workers=1)
    train, valid = (texts_in(manifest, split, ByteTokenizer()) for split in ("train", "valid"))

    assert not set(train) & set(valid)
    assert sorted(train + valid) == sorted(set(texts))
    # 1500 draws with p = 0.1: five standard deviations are 58.
    assert abs(len(valid) - 150) < 58


def test_documents_keep_their_split_when_the_source_grows(
    tmp_path: Path, jsonl: Write, texts_of: Draw, texts_in: Texts
) -> None:
    texts = texts_of(300)
    valid = []
    for count in (200, 300):
        source = jsonl(tmp_path / "in.jsonl", texts[:count])
        manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / f"out{count}", workers=1)
        valid.append(texts_in(manifest, "valid", ByteTokenizer()))

    assert [text for text in valid[1] if text in texts[:200]] == valid[0]


def test_another_seed_gives_another_split(tmp_path: Path, jsonl: Write, texts_of: Draw, texts_in: Texts) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(200))

    one, two = (
        tokenize_stream(source, ByteTokenizer(), tmp_path / f"out{seed}", validation_share=0.2, seed=seed, workers=1)
        for seed in (1, 2)
    )

    assert texts_in(one, "valid", ByteTokenizer()) != texts_in(two, "valid", ByteTokenizer())


@pytest.mark.parametrize("share", [1e-9, 0.999999999])
def test_each_split_gets_one_of_two_documents(tmp_path: Path, share: float, jsonl: Write, texts_in: Texts) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b"])

    manifest = tokenize_stream(source, ByteTokenizer(), tmp_path / "out", validation_share=share, workers=1)

    splits = [texts_in(manifest, split, ByteTokenizer()) for split in ("train", "valid")]
    assert sorted(splits) == [["a"], ["b"]]


@pytest.mark.parametrize(("texts", "share"), [(["a"], 0.5), (["a", "b"], 0.0)])
def test_without_validation_documents_there_are_no_validation_files(
    tmp_path: Path, texts: list[str], share: float, jsonl: Write, texts_in: Texts, files_of: Files
) -> None:
    prefix = tmp_path / "out"
    tokenize_stream(jsonl(tmp_path / "in.jsonl", ["x", "y"]), ByteTokenizer(), prefix, workers=1)
    assert Path(f"{prefix}_valid.bin").exists()

    manifest = tokenize_stream(
        jsonl(tmp_path / "in.jsonl", texts), ByteTokenizer(), prefix, validation_share=share, workers=1
    )

    assert manifest.splits["valid"].documents == 0
    assert list(files_of(prefix)) == [".json", "_train.bin", "_train.idx"]
    assert texts_in(manifest, "train", ByteTokenizer()) == texts


def test_too_many_malformed_records_are_an_error_over_all_shards(tmp_path: Path, jsonl: Write, texts_of: Draw) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(50))
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("{\n" * 2)

    with pytest.raises(ValueError, match=r"2 of 52 records .*in\.jsonl:51: not JSON"):
        tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, documents_per_shard=5)
