import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_ext.data.blends.sizes import Size, indexed_tokens, size_of
from nemo_ext.data.text.documents import Source
from nemo_ext.data.text.indexed_dataset import write_index
from nemo_ext.data.text.tokenizers import load_tokenizer
from nemo_ext.data.tokenize import tokenize_stream


def foreign(prefix: Path, lengths: list[int], *, split: str = "train") -> Path:
    """Write files as other projects do: .bin and .idx without a manifest."""
    index = Path(f"{prefix}_{split}.idx")
    write_index(index, np.array(lengths, dtype=np.int64), np.int32)
    index.with_suffix(".bin").write_bytes(bytes(4 * sum(lengths)))
    return index


@pytest.mark.parametrize("lengths", [[5], [5, 1, 700], [0, 3], [3, 0]])
def test_tokens_are_counted_without_the_manifest(tmp_path: Path, lengths: list[int]) -> None:
    foreign(tmp_path / "a", lengths)

    assert size_of(tmp_path / "a") == Size(tokens=sum(lengths), known="files")
    assert size_of(tmp_path / "a", assumed=7) == Size(tokens=sum(lengths), known="files")


def test_tokens_of_files_written_by_megatron(tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=dtype)
        builder.add_document(torch.arange(12), [5, 7])
        builder.add_item(torch.arange(3))
        builder.end_document()
        builder.finalize(str(tmp_path / "a.idx"))

        assert indexed_tokens(tmp_path / "a.idx") == 15


def test_the_size_of_tokenised_files_is_the_manifest_s(tmp_path: Path, jsonl: Callable[..., Source]) -> None:
    source = jsonl(tmp_path / "texts.jsonl", [f"text {number}" for number in range(40)])
    manifest = tokenize_stream(source, load_tokenizer({"kind": "byte"}), tmp_path / "a", workers=1, progress=False)

    assert size_of(tmp_path / "a") == Size(tokens=manifest.splits["train"].tokens, known="files")
    (tmp_path / "a_train.idx").unlink()
    with pytest.raises(ValueError, match=r"a\.json lists .* training tokens, but .*a_train\.idx does not exist"):
        size_of(tmp_path / "a")


def test_without_files_a_size_is_assumed_or_unknown(tmp_path: Path) -> None:
    assert size_of(tmp_path / "a") is None
    assert size_of(tmp_path / "a", assumed=7) == Size(tokens=7, known="assumed")


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_stream_is_an_error(tmp_path: Path, lengths: list[int]) -> None:
    foreign(tmp_path / "a", lengths)

    with pytest.raises(ValueError, match="a has no training tokens"):
        size_of(tmp_path / "a", assumed=7)


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    index = foreign(tmp_path / "a", [5, 6])
    whole = index.read_bytes()
    data = index.with_suffix(".bin")

    for damaged, message in (
        (b"", "not an index"),
        (b"something else" * 9, "not an index"),
        (whole[:-1], "is truncated"),
        (whole[:40], "is truncated"),
        (whole[:9] + struct.pack("<Q", 2) + whole[17:], "version 2"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            size_of(tmp_path / "a")
    index.write_bytes(whole)
    data.write_bytes(bytes(43))
    with pytest.raises(ValueError, match=r"has 43 bytes, .* lists 44"):
        size_of(tmp_path / "a")
    data.unlink()
    with pytest.raises(ValueError, match=r"a_train\.bin does not exist, but its index"):
        size_of(tmp_path / "a")
