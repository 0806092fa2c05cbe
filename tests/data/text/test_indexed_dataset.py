from pathlib import Path

import numpy as np
import pytest

from nemo_ext.data.text.indexed_dataset import ids_type, write_index


@pytest.mark.parametrize("size", [2, 257, 65499, 65500, 131072])
def test_ids_have_the_type_that_megatron_chooses(size: int) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")

    assert ids_type(size) is indexed_dataset.DType.optimal_dtype(size)


@pytest.mark.parametrize("vocab_size", [257, 131072])
def test_the_index_equals_that_of_megatrons_writer_byte_for_byte(tmp_path: Path, vocab_size: int) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    dtype = ids_type(vocab_size)
    lengths = np.array([3, 1, 70_000, 2], dtype=np.int64)
    theirs = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for length in lengths:
        theirs.add_document(np.zeros(length, dtype=dtype), [int(length)])
    theirs.finalize(str(tmp_path / "theirs.idx"))

    write_index(tmp_path / "ours.idx", lengths, dtype)

    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def test_a_document_that_the_format_cannot_hold_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a document has 2,147,483,648 tokens; split it, as Megatron's format"):
        write_index(tmp_path / "x.idx", np.array([1, 1 << 31]), np.uint16)
    assert not (tmp_path / "x.idx").exists()
