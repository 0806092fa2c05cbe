"""Reading and writing of Hugging Face's tensor files: complete files are read, corrupt files are named."""

import errno
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.rounding import undone_by_bfloat16
from nemo_ext.checkpoint.safetensors_files import INDEX, SafetensorsReader, shard_name, write_index, write_shard
from nemo_ext.checkpoint.storage import CheckpointError, Stored, check_tensors

FIRST = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
SECOND = {"c": torch.zeros(2, 2, dtype=torch.float16)}


def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    header = {name: Stored(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}
    write_shard(file, header, reversed(tensors.items()))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards with their index."""
    write(tmp_path / shard_name(0, 2), FIRST)
    write(tmp_path / shard_name(1, 2), SECOND)
    write_index(tmp_path, {"c": shard_name(1, 2), "a": shard_name(0, 2), "b": shard_name(0, 2)}, 40)
    return tmp_path


def test_shards_are_read_as_one_checkpoint(sharded: Path) -> None:
    reader = SafetensorsReader(sharded)

    assert reader.tensors == {
        "a": Stored((2, 3), "float32"),
        "b": Stored((4,), "bfloat16"),
        "c": Stored((2, 2), "float16"),
    }
    for name in "acbca":  # back and forth between the files
        assert torch.equal(reader.read(name), (FIRST | SECOND)[name])
    assert torch.equal(reader.read_piece(Piece.from_shape("a", 2, 3)), FIRST["a"])
    assert [file.name for file in reader.files()] == [shard_name(0, 2), shard_name(1, 2)]


def test_the_index_is_written_as_hugging_face_writes_it(
    sharded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from huggingface_hub import save_torch_state_dict

    theirs = tmp_path_factory.mktemp("theirs")
    save_torch_state_dict(FIRST | SECOND, theirs, max_shard_size=36)

    ours = json.loads((sharded / INDEX).read_text())
    assert ours["metadata"]["total_size"] == 6 * 4 + 4 * 2 + 4 * 2
    assert ours == json.loads((theirs / INDEX).read_text())
    assert (sharded / shard_name(0, 2)).read_bytes() == (theirs / shard_name(0, 2)).read_bytes()


def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    """It sorts by type and name; a header of any length is padded."""
    tensors = {
        "norm.\u00e9": torch.tensor(1.5, dtype=torch.float64),
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4, dtype=torch.float16),
        "A": torch.arange(5, dtype=torch.float16),
    }
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})

    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_lone_file_needs_no_index(tmp_path: Path) -> None:
    write(tmp_path / shard_name(0, 1), FIRST)

    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert set(SafetensorsReader(tmp_path).tensors) == {"a", "b"}


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -9, -1])
def test_a_file_that_is_cut_short_is_named(sharded: Path, kept: int) -> None:
    """Cut in the length of the header, in the header, and in the data."""
    file = sharded / shard_name(0, 2)
    file.write_bytes(file.read_bytes()[:kept])

    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors cannot be read.* copy it again"):
        SafetensorsReader(sharded)


@pytest.mark.parametrize("header", [b"{", b"\xff\xfe", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}'])
def test_an_invalid_header_is_named(sharded: Path, header: bytes) -> None:
    (sharded / shard_name(0, 2)).write_bytes(struct.pack("<Q", len(header)) + header)

    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors cannot be read"):
        SafetensorsReader(sharded)


def test_every_missing_shard_is_named(sharded: Path) -> None:
    (sharded / shard_name(1, 2)).unlink()

    with pytest.raises(CheckpointError, match=rf"{INDEX} names are missing \({shard_name(1, 2)}\)"):
        SafetensorsReader(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()

    with pytest.raises(CheckpointError, match=f"2 .*but no {INDEX}.* download the index too"):
        SafetensorsReader(sharded)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights.update(d=shard_name(1, 2)),
        lambda weights: weights.pop("b"),
        lambda weights: weights.update(b=shard_name(1, 2)),
    ],
    ids=["names a tensor that is nowhere", "leaves one out", "puts one elsewhere"],
)
def test_an_index_that_disagrees_is_refused(sharded: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((sharded / INDEX).read_text())
    change(index["weight_map"])
    (sharded / INDEX).write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match=rf"{INDEX} and the files disagree on [bd]: copy both again"):
        SafetensorsReader(sharded)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\x00", b"[]", b"{}", b'{"weight_map": ["a"]}'])
def test_an_invalid_index_is_refused(sharded: Path, text: bytes) -> None:
    (sharded / INDEX).write_bytes(text)

    with pytest.raises(CheckpointError, match=f"{INDEX} is not an index with a weight_map"):
        SafetensorsReader(sharded)


def test_a_duplicate_tensor_is_refused(sharded: Path) -> None:
    write(sharded / shard_name(1, 2), SECOND | {"a": FIRST["a"]})

    with pytest.raises(CheckpointError, match=r"model-00002.*: tensor a is also in model-00001.*: copy both"):
        SafetensorsReader(sharded)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors files: expected model.safetensors"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.uint8, "U8"), (torch.bool, "BOOL")]
)
def test_unusual_types_keep_their_name(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    save_file({"a": torch.zeros(3).to(dtype)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)

    assert reader.tensors == {"a": Stored((3,), name)}
    with pytest.raises(CheckpointError, match=rf"1 tensors are of an unsupported type .*: a is {name}$"):
        check_tensors(reader, {"a": (3,)})


def test_a_shard_that_does_not_fit_on_the_disk_is_removed(tmp_path: Path, small_files: Callable[..., Any]) -> None:
    with pytest.raises(OSError, match=r"File too large.*model.safetensors") as caught, small_files():
        write(tmp_path / "model.safetensors", {"a": torch.zeros(4096)})

    assert caught.value.errno == errno.EFBIG
    assert not (tmp_path / "model.safetensors").exists()


def test_changes_that_bfloat16_cannot_show_are_counted(tmp_path: Path) -> None:
    start, trained = tmp_path / "start", tmp_path / "trained"
    ones, half = torch.ones(4), torch.ones(2, dtype=torch.bfloat16)
    for folder in (start, trained):
        folder.mkdir()
    save_file({"a": ones, "b": half, "removed": ones.clone()}, start / "model.safetensors")
    # The next value of bfloat16 above 1 is 1 + 2 ** -7.
    moved = ones + torch.tensor([0.0, 2**-10, 2**-9, 2**-7])
    save_file({"a": moved, "b": half + 1, "new": ones.clone()}, trained / "model.safetensors")

    assert undone_by_bfloat16(start, trained) == 2 / 3
    assert undone_by_bfloat16(start, start) is None
