"""Megatron's checkpoints (`torch_dist`, torch's distributed checkpoint format), read and written by one process.

A checkpoint saved at any tensor, pipeline or expert parallel size is read as one set of whole tensors. It is written in
parts, each as one rank of a parallel save would write it, so it may be larger than memory, and an interrupted write can
be resumed. No process group and no Megatron are needed.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.pickles import COMMON, METADATA, Unsafe, first_words, loads, read_metadata
from nemo_ext.checkpoint.storage import CheckpointError, Stored, bytes_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.metadata import Metadata

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""Megatron's name for weights without a training state."""
VERSION = 3.0
"""Megatron's `checkpoint_version`: below 2 it would reorder queries, keys and values."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""Prefix of the keys of optimizer state; `chained_0.` with a distributed optimizer and expert parallelism
(megatron/core/optimizer/optimizer.py, ChainedOptimizer.sharded_state_dict)."""
EXTRA_STATE = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj", "output_layer"),
    *("pre_mlp_layernorm", "input_layernorm", "q_layernorm", "k_layernorm", "output_norm", "final_norm"),
)
"""Modules that ask for an `_extra_state` when they load: Megatron's linears and, with Transformer Engine, norms."""


def checkpoint_folder(path: Path, iteration: int | None = None) -> Path:
    """The folder with `.metadata` of a run directory, a checkpoints directory or one checkpoint.

    Args:
        path: path of any of the three.
        iteration: iteration of the checkpoint; None for the newest.

    Raises:
        CheckpointError: there is none; names those that were found.
    """
    if (path / METADATA).is_file():
        return path
    root = path / "checkpoints" if (path / "checkpoints" / TRACKER).is_file() else path
    tracker = root / TRACKER
    if iteration is None:
        if not tracker.is_file():
            raise CheckpointError(
                f"{path}: neither a Hugging Face checkpoint (config.json) nor one of Megatron ({TRACKER} or {METADATA})"
            )
        word = tracker.read_text(errors="replace").strip()
        if word != RELEASE and not word.isdecimal():
            raise CheckpointError(f"{tracker}: {word[:20]!r}: expected a number or {RELEASE}: give iteration=NUMBER")
    else:
        word = str(iteration)
    folder = root / (RELEASE if word == RELEASE else f"iter_{int(word):07d}")
    if not (folder / METADATA).is_file():
        there = sorted(each.parent.name for each in root.glob(f"*/{METADATA}"))
        raise CheckpointError(f"{folder}: no complete checkpoint; there are {', '.join(there) or 'none'}")
    return folder


def whole_files(path: Path) -> Metadata:
    """Metadata of a checkpoint, after a check that every file it names is there in full length.

    Args:
        path: the folder with `.metadata`.

    Raises:
        CheckpointError: unreadable metadata, or a file that is missing or cut short.
    """
    ends: dict[str, int] = {}
    metadata = read_metadata(path)
    try:
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    except (AttributeError, TypeError) as error:  # what a flipped bit makes of it
        raise CheckpointError(f"{path / METADATA}: cannot be read ({first_words(error)}): copy it again") from error
    for name, end in ends.items():
        if Path(name).name != name:
            raise Unsafe(f"{path / METADATA}: names {name}, which is not in its folder: do not use this checkpoint")
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though {METADATA} names it")
        if file.stat().st_size < end:
            raise CheckpointError(f"{file}: cut short at {file.stat().st_size} of {end} bytes: copy it again")
    return metadata


class TorchDistReader:
    """Reader of the model's tensors in one checkpoint.

    Attributes:
        path: the folder with `.metadata`.
        tensors: key -> shape and type, of the model alone.
        left_out: number of tensors that are not the model's (optimizer state).

    Raises:
        CheckpointError: unreadable metadata, or a file that is missing or cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self.left_out = 0
        self._shards: dict[str, dict[tuple[int, ...], _Shard]] = {}
        self._last: tuple[_Shard, torch.Tensor] | None = None
        self._metadata = whole_files(path)
        self._list_tensors()

    def _list_tensors(self) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        places = {(index.fqn, index.offset): info for index, info in self._metadata.storage_data.items()}
        for key, stored in self._metadata.state_dict_metadata.items():
            if not isinstance(stored, TensorStorageMetadata):
                continue
            if _OPTIMIZER.match(key):
                self.left_out += 1
                continue
            shards = {(key, chunk.offsets): chunk.sizes for chunk in stored.chunks}
            if sum(map(prod, shards.values())) != prod(stored.size) or not shards.keys() <= places.keys():
                # Reading would give whatever was in memory for the part that is missing.
                raise CheckpointError(f"{self.path / METADATA}: {key} is not there as a whole: take another checkpoint")
            self._shards[key] = {
                tuple(offset): _Shard(tuple(offset), tuple(sizes), places[name, offset])
                for (name, offset), sizes in shards.items()
            }
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            self.tensors[key] = Stored(tuple(stored.size), dtype)

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor, put together from whatever shards it was saved in.

        Raises:
            CheckpointError: a file does not hold what the metadata says.
        """
        return self.read_piece(Piece.of(name, *self.tensors[name].shape))

    def read_piece(self, piece: Piece) -> torch.Tensor:
        """A part of a tensor, of which only the shards that hold it are read.

        Raises:
            CheckpointError: see `read`.
        """
        import torch

        made = torch.empty(piece.shape, dtype=getattr(torch, self.tensors[piece.key].dtype))
        shards = self._shards[piece.key]
        same = shards.get(piece.offset)  # of many experts, one is a shard as it is
        for shard in [same] if same is not None and same.shape == piece.shape else shards.values():
            starts = tuple(map(max, piece.offset, shard.offset))
            ends = tuple(o + n for o, n in zip(piece.offset, piece.shape, strict=True))
            ends = tuple(map(min, ends, (o + n for o, n in zip(shard.offset, shard.shape, strict=True))))
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            try:
                self._copy(shard, made[_slices(starts, ends, piece.offset)], _slices(starts, ends, shard.offset))
            except Exception as error:  # a broken archive raises almost anything
                raise CheckpointError(
                    f"{self.path}: {piece.key} cannot be read from {shard.place.relative_path} ({first_words(error)}): "
                    "copy the checkpoint again"
                ) from error
        return made

    def _copy(self, shard: _Shard, made: torch.Tensor, part: tuple[slice, ...]) -> None:
        """Fill a tensor with a part of a shard, straight from the file if it is all of it."""
        import torch

        if made.shape == shard.shape and made.is_contiguous():
            shard.read_into(made, self.path)
            return
        last = self._last
        if last is None or last[0] != shard:  # shards of several experts are asked for one expert after the other
            self._last = None  # frees the memory before more is asked for
            whole = torch.empty(shard.shape, dtype=made.dtype)
            shard.read_into(whole, self.path)
            last = self._last = shard, whole
        made.copy_(last[1][part])

    def files(self) -> Sequence[Path]:
        """The files that hold tensors, and the metadata that says where."""
        names = {info.relative_path for info in self._metadata.storage_data.values()}
        return [*(self.path / name for name in sorted(names)), self.path / METADATA]


@dataclass(frozen=True)
class _Shard:
    """A part of a tensor that is one archive of `torch.save` in a file.

    Attributes:
        offset: offset of the part in the whole tensor.
        shape: shape of the part.
        place: file, and offset and length of the archive in bytes (torch's `_StorageInfo`).
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: Any

    def read_into(self, made: torch.Tensor, folder: Path) -> None:
        """Fill a contiguous tensor of the shape with one read from the file, where torch's loader copies three times.

        Raises:
            ValueError: the archive holds something else.
        """
        import torch
        from torch.distributed.checkpoint.utils import _create_file_view

        with open(folder / self.place.relative_path, "rb") as file:
            archive: Any = _create_file_view(file, self.place.offset, self.place.length)
            records = torch._C.PyTorchFileReader(archive)
            if "byteorder" in records.get_all_records() and records.get_record("byteorder") != sys.byteorder.encode():
                raise ValueError("numbers of another byte order")  # torch would crash in swapping what is not there
            archive.seek(0)
            found = torch.load(archive, map_location="meta", weights_only=True)
            if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (made.shape, made.dtype):
                raise ValueError(f"not what .metadata says: {found!r}")
            numbers = found.untyped_storage()
            start, size = numbers._checkpoint_offset, numbers.nbytes()
            if start is None or not 0 <= start <= self.place.length - size:
                raise ValueError("numbers outside their archive")
            whole = found.is_contiguous() and size == made.nbytes
            flat = made.reshape(-1) if whole else torch.empty(size // made.itemsize, dtype=made.dtype)
            file.seek(self.place.offset + start)
            if file.readinto(bytes_of(flat)) != flat.nbytes:
                raise ValueError("cut short")
            if not whole:
                made.copy_(flat.as_strided(found.shape, found.stride(), int(found.storage_offset())))


def _slices(starts: Sequence[int], ends: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - o, end - o) for start, end, o in zip(starts, ends, offset, strict=True))


class TorchDistWriter:
    """Writes a checkpoint in parts; each part is a file of its own.

    Args:
        folder: folder to write; made if it is missing.
        parts: pieces of each part with their types.
    """

    def __init__(self, folder: Path, parts: Sequence[Sequence[tuple[Piece, str]]]) -> None:
        from torch.distributed.checkpoint import FileSystemWriter
        from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
        from torch.distributed.checkpoint.planner import SavePlan

        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._writer = FileSystemWriter(folder, sync_files=False, overwrite=True)
        self._writer.set_up_storage_writer(True)
        plans = [SavePlan([_write_item(piece, dtype) for piece, dtype in part]) for part in parts]
        keys = dict.fromkeys(piece.key for part in parts for piece, _ in part)
        wholes = {piece.key: piece.whole for part in parts for piece, _ in part}
        plans.append(SavePlan([_bytes_item(name) for name in _extra_states(keys, wholes)]))
        self._plans, self._metadata = create_default_global_save_plan(plans)

    def file(self, part: int) -> Path:
        """Path of a part's file."""
        return self.folder / f"__{part}_0.distcp"

    def write(self, part: int, pieces: Iterable[tuple[Piece, torch.Tensor]]) -> str:
        """Write one part from its pieces, in order; returns its result for `finish`.

        Raises:
            OSError: the disk is full, for example.
        """

        def tensors() -> Iterator[torch.Tensor]:
            for item, (piece, tensor) in zip(self._plans[part].items, pieces, strict=True):
                index = item.index
                assert (piece.key, piece.offset) == (index.fqn, index.offset), f"asked for {index}, got {piece}"
                tensor = tensor.detach()
                whole_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
                yield tensor if whole_storage else tensor.clone()  # torch.save would write all of the storage

        return self._write_file(part, tensors())

    def _write_file(self, part: int, values: Iterator[object]) -> str:
        """Write a file as `FileSystemWriter.write_data` does, which would keep all of its tensors in memory."""
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.storage import WriteResult
        from torch.utils import serialization

        settings: Any = serialization.config
        results, start = [], 0
        # The archives' own checksums take longer than writing, and neither torch nor Megatron reads them.
        with open(self.file(part), "wb") as stream, settings.patch("save.compute_crc32", False):
            for item, value in zip(self._plans[part].items, values, strict=True):
                try:
                    torch.save(value, stream)
                except RuntimeError as error:
                    raise _reason(error) from error
                size = stream.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(self.file(part).name, start, size)))
                start += size
        return pickle.dumps(results).hex()

    def finish(self, results: Sequence[str], arguments: Mapping[str, Any]) -> None:
        """Make the parts a checkpoint: write metadata and Megatron's common state.

        Args:
            results: results of `write`, for every part in order.
            arguments: arguments of the saving run that Megatron's loader reads. Without `hybrid_layer_pattern` it
                takes the layers for those of a GPTModel, which are numbered otherwise.
        """
        # Objects are stored as a list, like every shard that Megatron saves; None: nothing to restore.
        objects = len(self._plans) - 1
        common = self._write_file(objects, repeat([None], len(self._plans[objects].items)))
        made = [loads(bytes.fromhex(result), self.folder) for result in (*results, common)]
        self._writer.finish(self._metadata, made)
        arguments = {**arguments, "no_save_optim": True, "no_save_rng": True}
        arguments |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        common_state = {"args": Namespace(**arguments), "checkpoint_version": VERSION, "iteration": 0}
        (self.folder / COMMON).write_bytes(_saved(common_state).getvalue())
        (self.folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )


def write_tracker(checkpoints: Path) -> None:
    """Name the release checkpoint as the newest."""
    (checkpoints / TRACKER).write_text(RELEASE)


def _reason(error: BaseException) -> BaseException:
    """The full disk or Ctrl-C behind an error of `torch.save`, which then fails to close its archive."""
    earlier: BaseException | None = error
    while earlier is not None:
        if isinstance(earlier, OSError | KeyboardInterrupt):
            return earlier
        earlier = earlier.__context__
    return error


def _write_item(piece: Piece, dtype: str) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    offset, shape, whole = torch.Size(piece.offset), torch.Size(piece.shape), torch.Size(piece.whole)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offset, shape),
        properties=TensorProperties(dtype=getattr(torch, dtype)),
        size=whole,
    )
    return WriteItem(MetadataIndex(piece.key, offset), WriteItemType.SHARD, tensor_data=data)


def _bytes_item(name: str) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _extra_states(keys: Iterable[str], wholes: Mapping[str, Sequence[int]]) -> list[str]:
    """Names of the modules' extra states, as Megatron shards them: one per module, or per expert."""
    names = ["output_layer._extra_state/shard_0_1"]  # also where the output layer is the embedding
    for key in keys:
        module, _, parameter = key.rpartition(".")
        if key.endswith(".in_proj.weight.z"):
            module = module.removesuffix(".weight")
        elif parameter != "weight":
            continue
        if module.rpartition(".")[2] in EXTRA_STATE:
            count = wholes[key][0] if ".experts.experts." in key else 1
            names += [f"{module}._extra_state/shard_{number}_{count}" for number in range(count)]
    return list(dict.fromkeys(names))


def _saved(value: object) -> io.BytesIO:
    import torch

    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
