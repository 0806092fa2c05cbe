"""Megatron's checkpoints: read completely from any shards; broken files are named."""

import contextlib
import errno
import io
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.storage import CheckpointError, Stored
from nemo_ext.checkpoint.torch_dist import (
    METADATA,
    TRACKER,
    TorchDistReader,
    TorchDistWriter,
    checkpoint_folder,
    write_tracker,
)

TENSORS = {
    "embedding.weight": torch.arange(35.0).reshape(7, 5),
    "experts.weight": torch.arange(24.0).reshape(3, 2, 4).to(torch.bfloat16),
    "norm.weight": torch.ones(5, dtype=torch.float16),
}
Parts = Sequence[Sequence[Piece]]


def cut(key: str, *offsets: tuple[int, ...]) -> list[Piece]:
    """Pieces of a tensor that start at the offsets and extend to the next offset in every dimension."""
    whole = tuple(TENSORS[key].shape)
    pieces = []
    for offset in offsets:
        ends = [
            min([other[n] for other in offsets if other[n] > start], default=whole[n]) for n, start in enumerate(offset)
        ]
        pieces.append(Piece(key, tuple(end - start for start, end in zip(offset, ends, strict=True)), offset, whole))
    return pieces


def values(piece: Piece) -> torch.Tensor:
    return TENSORS[piece.key][tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]


def write(folder: Path, parts: Parts) -> Path:
    """A checkpoint as saved by several ranks: one file for each part."""
    dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in TENSORS.items()}
    writer = TorchDistWriter(folder, [[(piece, dtypes[piece.key]) for piece in part] for part in parts])
    results = [writer.write(number, ((piece, values(piece)) for piece in part)) for number, part in enumerate(parts)]
    assert all(writer.file(number).is_file() for number in range(len(parts)))
    writer.finish(results, {"hidden_size": 5})
    return folder


def whole() -> Parts:
    return [[Piece.from_shape(key, *tensor.shape)] for key, tensor in TENSORS.items()]


def sharded() -> Parts:
    """Four ranks: a table split in both dimensions, single experts, a norm that only the last has."""
    table = cut("embedding.weight", (0, 0), (0, 2), (4, 0), (4, 2))
    experts = cut("experts.weight", (0, 0, 0), (1, 0, 0), (2, 0, 0))
    return [[table[3], experts[0]], [experts[2], table[0]], [table[1]], [table[2], experts[1], *whole()[2]]]


@pytest.mark.parametrize("parts", [whole, sharded])
def test_a_checkpoint_is_read_completely_from_any_layout(tmp_path: Path, parts: Callable[[], Parts]) -> None:
    reader = TorchDistReader(write(tmp_path, parts()))

    assert reader.tensors == {
        "embedding.weight": Stored((7, 5), "float32"),
        "experts.weight": Stored((3, 2, 4), "bfloat16"),
        "norm.weight": Stored((5,), "float16"),
    }
    for key, tensor in TENSORS.items():
        assert torch.equal(reader.read(key), tensor)
        assert reader.read(key).dtype == tensor.dtype
    for piece in cut("experts.weight", (0, 0, 0), (2, 0, 0)):
        assert torch.equal(reader.read_piece(piece), values(piece))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.sets(st.integers(1, 6), max_size=3), columns=st.sets(st.integers(1, 4), max_size=3), seed=st.randoms())
def test_any_grid_of_shards_is_read_completely(
    rows: set[int], columns: set[int], seed: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pieces = cut("embedding.weight", *((row, column) for row in {0, *rows} for column in {0, *columns}))
    seed.shuffle(pieces)

    reader = TorchDistReader(write(tmp_path_factory.mktemp("grid"), [pieces[::2], pieces[1::2]]))

    assert torch.equal(reader.read("embedding.weight"), TENSORS["embedding.weight"])
    for piece in cut("embedding.weight", (0, 0), (0, 3), (2, 0), (2, 3), (5, 0), (5, 3)):  # whatever shards it is in
        assert torch.equal(reader.read_piece(piece), values(piece))


def test_numbers_stored_in_another_order_are_read(tmp_path: Path) -> None:
    piece = Piece.from_shape("embedding.weight", 7, 5)
    writer = TorchDistWriter(tmp_path, [[(piece, "float32")]])
    transposed = TENSORS["embedding.weight"].t().contiguous().t()
    writer.finish([writer.write(0, [(piece, transposed)])], {})

    assert torch.equal(TorchDistReader(tmp_path).read("embedding.weight"), TENSORS["embedding.weight"])


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    write(tmp_path, sharded())
    read = {key: torch.empty_like(tensor) for key, tensor in TENSORS.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(read, storage_reader=FileSystemReader(tmp_path), no_dist=True)

    assert all(torch.equal(read[key], tensor) for key, tensor in TENSORS.items())
    common = torch.load(tmp_path / "common.pt", weights_only=False)
    assert (common["checkpoint_version"], common["args"].hidden_size) == (3.0, 5)


def test_pieces_in_another_order_than_planned_are_not_written(tmp_path: Path) -> None:
    first, second = cut("embedding.weight", (0, 0), (4, 0))
    writer = TorchDistWriter(tmp_path, [[(first, "float32"), (second, "float32")]])

    with pytest.raises(AssertionError, match="expected MetadataIndex"):
        writer.write(0, [(second, values(second)), (first, values(first))])


# Broken files


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "release", sharded())


@contextlib.contextmanager
def refusal_names(checkpoint: Path) -> Iterator[None]:
    """The content may be refused if the refusal names the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        if str(checkpoint) not in str(error):
            raise


def metadata_of(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / METADATA).read_bytes())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_metadata_that_is_cut_short_anywhere_is_named(share: float, checkpoint: Path) -> None:
    file = checkpoint / METADATA
    whole_file = file.read_bytes()
    file.write_bytes(whole_file[: int(share * len(whole_file))])
    try:
        with pytest.raises(CheckpointError, match=r"release/\.metadata cannot be read \(.*\): copy it again"):
            TorchDistReader(checkpoint)
    finally:
        file.write_bytes(whole_file)


@pytest.mark.parametrize("text", [b"", b"\x80", b"not a pickle", pickle.dumps(None), pickle.dumps({"a": 1})])
def test_invalid_metadata_is_named(checkpoint: Path, text: bytes) -> None:
    (checkpoint / METADATA).write_bytes(text)

    with pytest.raises(CheckpointError, match=r"release/\.metadata (cannot be read|holds) .*: copy it again"):
        TorchDistReader(checkpoint)


def test_a_file_that_is_missing_or_cut_short_is_named(checkpoint: Path) -> None:
    file = checkpoint / "__1_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(
        CheckpointError, match=rf"__1_0.distcp is truncated at {len(data) - 1} of {len(data)} bytes: copy it again"
    ):
        TorchDistReader(checkpoint)

    file.unlink()
    with pytest.raises(CheckpointError, match=r"__1_0.distcp is missing, although .metadata names it"):
        TorchDistReader(checkpoint)


@pytest.mark.parametrize("lost", ["chunk", "file"])
def test_a_shard_that_the_metadata_lost_is_noticed(checkpoint: Path, lost: str) -> None:
    """Reading would leave that part of the tensor uninitialized."""
    metadata = metadata_of(checkpoint)
    if lost == "chunk":
        metadata.state_dict_metadata["embedding.weight"].chunks.pop()
    else:
        gone = next(index for index in metadata.storage_data if index.fqn == "embedding.weight")
        del metadata.storage_data[gone]
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))

    with pytest.raises(CheckpointError, match=r"\.metadata: tensor embedding.weight is incomplete"):
        TorchDistReader(checkpoint)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_broken_file_is_named_or_gives_a_tensor_of_the_same_shape(data: st.DataObject, checkpoint: Path) -> None:
    """torch reads numbers without a checksum, so only damage around them can be noticed."""
    file = checkpoint / "__2_0.distcp"
    whole_file = file.read_bytes()
    position = data.draw(st.integers(0, len(whole_file) - 1))
    file.write_bytes(whole_file[:position] + data.draw(st.binary(min_size=1, max_size=1)) + whole_file[position + 1 :])
    reader = TorchDistReader(checkpoint)
    try:
        with refusal_names(checkpoint):
            assert reader.read("embedding.weight").shape == (7, 5)
    finally:
        file.write_bytes(whole_file)


def test_a_file_that_is_not_an_archive_is_named(checkpoint: Path) -> None:
    file = checkpoint / "__2_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))

    with pytest.raises(CheckpointError, match=r"embedding.weight cannot be read from .*__2_0.distcp.*: copy the"):
        TorchDistReader(checkpoint).read("embedding.weight")


def in_big_endian(archive: bytes) -> bytes:
    """As torch writes it on an IBM Z."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    return made.getvalue()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensor: in_big_endian(saved(tensor)), "different byte order"),
        (lambda tensor: saved(tensor[:, :2].clone()), r"does not match .metadata: tensor\(.*size=\(7, 2\)"),
        (lambda tensor: saved(tensor.double()), r"does not match .metadata: tensor\("),
        (lambda tensor: saved({"a": tensor}), "does not match .metadata: {'a': "),
        (lambda tensor: saved(tensor, _use_new_zipfile_serialization=False), "PytorchStreamReader"),
    ],
    ids=["big-endian", "shape", "type", "dictionary", "older format"],
)
def test_an_archive_of_something_else_is_named(
    change: Callable[[torch.Tensor], bytes], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = change(TENSORS["embedding.weight"])
    monkeypatch.setattr(torch, "save", lambda value, stream: stream.write(archive))
    piece = Piece.from_shape("embedding.weight", 7, 5)
    writer = TorchDistWriter(tmp_path, [[(piece, "float32")]])
    results = [writer.write(0, [(piece, TENSORS["embedding.weight"])])]
    monkeypatch.undo()
    writer.finish(results, {})

    with pytest.raises(CheckpointError, match=rf"embedding.weight cannot be read from __0_0.distcp \(.*{reason}.*copy"):
        TorchDistReader(tmp_path).read("embedding.weight")


def saved(value: object, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def test_ctrl_c_while_reading_is_not_converted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    reader = TorchDistReader(checkpoint)
    monkeypatch.setattr(torch, "load", interrupted)

    with pytest.raises(KeyboardInterrupt):
        reader.read("norm.weight")


def test_a_full_disk_is_named(tmp_path: Path, small_files: Callable[..., Any]) -> None:
    """`torch.save` then fails on its own archive, with an uninformative error."""
    piece = Piece.from_shape("a", 4096)
    writer = TorchDistWriter(tmp_path, [[(piece, "float32")]])

    with pytest.raises(OSError, match="File too large") as caught, small_files():
        writer.write(0, [(piece, torch.zeros(4096))])
    assert caught.value.errno == errno.EFBIG


def test_a_full_disk_at_the_very_end_is_named(tmp_path: Path, small_files: Callable[..., Any]) -> None:
    piece = Piece.from_shape("a", 4)
    writer = TorchDistWriter(tmp_path, [[(piece, "float32")]])
    result = writer.write(0, [(piece, torch.zeros(4))])

    with pytest.raises(OSError, match="File too large"), small_files():
        writer.finish([result], {"long": "x" * 5000})


# Skipped tensors, and locations of checkpoints


@pytest.mark.parametrize("prefix", ["optimizer.", "chained_0.optimizer.", "chained_12.optimizer."])
def test_optimizer_state_is_counted_and_omitted(tmp_path: Path, prefix: str) -> None:
    """Expert parallelism gives Megatron two optimizers, whose keys are numbered."""
    keys = ["decoder.weight", f"{prefix}state.exp_avg.decoder.weight", f"{prefix}state.fp32_param.decoder.weight"]
    writer = TorchDistWriter(tmp_path, [[(Piece.from_shape(key, 2), "float32") for key in keys]])
    writer.finish([writer.write(0, ((Piece.from_shape(key, 2), torch.ones(2)) for key in keys))], {})

    reader = TorchDistReader(tmp_path)

    assert (list(reader.tensors), reader.left_out) == (["decoder.weight"], 2)


def test_a_checkpoint_is_found_from_any_folder_above_it(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for number in (5, 10):
        write(checkpoints / f"iter_{number:07d}", whole())
    (checkpoints / TRACKER).write_text("10\n")

    for path in (tmp_path, checkpoints):
        assert checkpoint_folder(path) == checkpoints / "iter_0000010"
        assert checkpoint_folder(path, 5) == checkpoints / "iter_0000005"
    assert checkpoint_folder(checkpoints / "iter_0000005") == checkpoints / "iter_0000005"
    with pytest.raises(
        CheckpointError, match=r"iter_0000007 is not a complete checkpoint: .*available: iter_0000005, iter_0000010"
    ):
        checkpoint_folder(tmp_path, 7)

    (checkpoints / TRACKER).write_text("15")  # an iteration whose save was interrupted
    with pytest.raises(CheckpointError, match="iter_0000015 is not a complete checkpoint"):
        checkpoint_folder(tmp_path)
    (checkpoints / TRACKER).write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=f"{TRACKER} contains '.*', not a number or release"):
        checkpoint_folder(tmp_path)

    write(checkpoints / "release", whole())
    write_tracker(checkpoints)
    assert checkpoint_folder(tmp_path) == checkpoints / "release"


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a Hugging Face checkpoint \(config.json\) nor a Megatron one"):
        checkpoint_folder(tmp_path)
