import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.manifest import Manifest
from nemo_ext.data.text.tokenizers import ByteTokenizer, Tokenizer
from nemo_ext.data.tokenize import tokenize_stream

Write = Callable[..., Source]
Draw = Callable[[int], list[str]]
Texts = Callable[[Manifest, str, Tokenizer], list[str]]
Files = Callable[[Path], dict[str, bytes]]


def interrupted(source: Source, prefix: Path, **options: Any) -> Path:
    """Leave a stream with all shards but no output, as if killed in the last pass; returns the shards' directory."""
    in_the_way = Path(f"{prefix}_train.bin")
    in_the_way.mkdir()
    with pytest.raises(IsADirectoryError):
        tokenize_stream(source, ByteTokenizer(), prefix, workers=1, documents_per_shard=1, **options)
    in_the_way.rmdir()
    return Path(f"{prefix}.shards")


def test_finished_shards_are_used_again(tmp_path: Path, jsonl: Write, texts_in: Texts) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    shards = interrupted(source, tmp_path / "out")
    # If the shard were tokenised again, its copied content would be replaced.
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


def test_shards_of_other_settings_are_not_mixed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jsonl: Write, texts_of: Draw, files_of: Files
) -> None:
    source = jsonl(tmp_path / "in.jsonl", texts_of(40))
    interrupted(source, tmp_path / "out", seed=1)
    tokenize_stream(source, ByteTokenizer(), tmp_path / "fresh", seed=2, workers=1)
    assert "starting over" not in capsys.readouterr().err

    tokenize_stream(source, ByteTokenizer(), tmp_path / "out", seed=2, workers=1)

    assert "out.shards was begun with other settings or input files: starting over" in capsys.readouterr().err
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


def test_a_damaged_shard_is_an_error_that_names_what_to_remove(tmp_path: Path, jsonl: Write) -> None:
    source = jsonl(tmp_path / "in.jsonl", ["a", "b", "c"])
    shards = interrupted(source, tmp_path / "out")
    os.truncate(shards / "00001.npz", 100)
    os.truncate(shards / "00002.tokens", 1)

    def again() -> Manifest:
        return tokenize_stream(source, ByteTokenizer(), tmp_path / "out", workers=1, documents_per_shard=1)

    with pytest.raises(ValueError, match=r"00001\.npz is damaged .*: remove .*out\.shards and rerun"):
        again()
    (shards / "00001.npz").unlink()
    with pytest.raises(ValueError, match=r"00002\.tokens is damaged: remove .*out\.shards and rerun"):
        again()
    shutil.rmtree(shards)
    assert sum(counts.documents for counts in again().splits.values()) == 3
