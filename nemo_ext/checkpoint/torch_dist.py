"""Single-process reading and writing of Megatron's checkpoints (`torch_dist`, torch's distributed checkpoint format).

A checkpoint saved at any tensor, pipeline or expert parallel size is read as a set of whole tensors. It is written in
parts, each laid out like one rank's file in a parallel save, so that it may exceed memory and an interrupted write can
be resumed. Neither a process group nor Megatron is required.
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
"""Megatron's name for a checkpoint without a training state."""
VERSION = 3.0
"""Megatron's `checkpoint_version`; below 2, its loader would reorder queries, keys and values."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
"""Prefix of optimizer state keys, with `chained_0.` for a distributed optimizer and expert parallelism
(megatron/core/optimizer/optimizer.py, ChainedOptimizer.sharded_state_dict)."""
EXTRA_STATE = (
    *("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj", "output_layer"),
    *("pre_mlp_layernorm", "input_layernorm", "q_layernorm", "k_layernorm", "output_norm", "final_norm"),
    *("fc1_latent_proj", "fc2_latent_proj", "eh_proj", "enorm", "hnorm", "final_layernorm"),
)
"""Modules that need an `_extra_state` for loading: Megatron's linear layers and, with Transformer Engine, norms."""


def checkpoint_folder(path: Path, iteration: int | None = None) -> Path:
    """Find the folder with `.metadata` that a path refers to.

    Args:
        path: run directory, checkpoints directory or single checkpoint.
        iteration: iteration of the checkpoint; None for the newest.

    Raises:
        CheckpointError: there is no complete checkpoint; lists the available ones.
    """
    if (path / METADATA).is_file():
        return path
    root = path / "checkpoints" if (path / "checkpoints" / TRACKER).is_file() else path
    tracker = root / TRACKER
    if iteration is None:
        if not tracker.is_file():
            raise CheckpointError(
                f"{path} is neither a Hugging Face checkpoint (config.json) nor a Megatron one ({TRACKER} or "
                f"{METADATA}): name the folder of a checkpoint or run"
            )
        word = tracker.read_text(errors="replace").strip()
        if word != RELEASE and not word.isdecimal():
            raise CheckpointError(
                f"{tracker} contains {word[:20]!r}, not a number or {RELEASE}: correct it, or set iteration=NUMBER"
            )
    else:
        word = str(iteration)
    folder = root / (RELEASE if word == RELEASE else f"iter_{int(word):07d}")
    if not (folder / METADATA).is_file():
        complete = sorted(file.parent.name for file in root.glob(f"*/{METADATA}"))
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: choose a complete one (available: {', '.join(complete) or 'none'})"
        )
    return folder


def whole_files(path: Path) -> Metadata:
    """Read a checkpoint's metadata, and check that every file it names has its full length.

    Raises:
        CheckpointError: the metadata is unreadable, or a file is missing or truncated.
    """
    ends: dict[str, int] = {}
    metadata = read_metadata(path)
    try:
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    except (AttributeError, TypeError) as error:  # as after a bit flip
        raise CheckpointError(f"{path / METADATA} cannot be read ({first_words(error)}): copy it again") from error
    for name, end in ends.items():
        if Path(name).name != name:
            raise Unsafe(f"{path / METADATA} names {name}, which is not in its folder: do not use this checkpoint")
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing, although {METADATA} names it: copy it again")
        if file.stat().st_size < end:
            raise CheckpointError(f"{file} is truncated at {file.stat().st_size} of {end} bytes: copy it again")
    return metadata


class TorchDistReader:
    """Reader of the model tensors in a Megatron checkpoint.

    Attributes:
        path: folder with `.metadata`.
        tensors: mapping from key to shape and type, for the model's tensors only.
        left_out: number of tensors that do not belong to the model (optimizer state).

    Raises:
        CheckpointError: the metadata is unreadable, or a file is missing or truncated.
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
                # Otherwise the missing part would be read as uninitialised memory.
                raise CheckpointError(f"{self.path / METADATA}: tensor {key} is incomplete: use another checkpoint")
            self._shards[key] = {
                tuple(offset): _Shard(tuple(offset), tuple(sizes), places[name, offset])
                for (name, offset), sizes in shards.items()
            }
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            self.tensors[key] = Stored(tuple(stored.size), dtype)

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor, assembled from the shards it was saved in.

        Raises:
            CheckpointError: a file does not match the metadata.
        """
        return self.read_piece(Piece.from_shape(name, *self.tensors[name].shape))

    def read_piece(self, piece: Piece) -> torch.Tensor:
        """Read a piece of a tensor; only shards that overlap it are read.

        Raises:
            CheckpointError: a file does not match the metadata.
        """
        import torch

        tensor = torch.empty(piece.shape, dtype=getattr(torch, self.tensors[piece.key].dtype))
        shards = self._shards[piece.key]
        same = shards.get(piece.offset)  # a single expert is often exactly one shard
        for shard in [same] if same is not None and same.shape == piece.shape else shards.values():
            starts = tuple(map(max, piece.offset, shard.offset))
            ends = tuple(o + n for o, n in zip(piece.offset, piece.shape, strict=True))
            ends = tuple(map(min, ends, (o + n for o, n in zip(shard.offset, shard.shape, strict=True))))
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            try:
                self._copy(shard, tensor[_slices(starts, ends, piece.offset)], _slices(starts, ends, shard.offset))
            except Exception as error:  # a corrupt archive raises almost any exception
                raise CheckpointError(
                    f"{self.path}: tensor {piece.key} cannot be read from {shard.place.relative_path} "
                    f"({first_words(error)}): copy the checkpoint again"
                ) from error
        return tensor

    def _copy(self, shard: _Shard, target: torch.Tensor, part: tuple[slice, ...]) -> None:
        """Fill `target` with the slice `part` of a shard; a whole shard is read without an intermediate copy."""
        import torch

        if target.shape == shard.shape and target.is_contiguous():
            shard.read_into(target, self.path)
            return
        last = self._last
        if last is None or last[0] != shard:  # keeps the shard for the next expert in it
            self._last = None  # frees memory before the next allocation
            whole = torch.empty(shard.shape, dtype=target.dtype)
            shard.read_into(whole, self.path)
            last = self._last = shard, whole
        target.copy_(last[1][part])

    def files(self) -> Sequence[Path]:
        """Files that hold tensors, and the metadata file."""
        names = {info.relative_path for info in self._metadata.storage_data.values()}
        return [*(self.path / name for name in sorted(names)), self.path / METADATA]


@dataclass(frozen=True)
class _Shard:
    """Slice of a tensor, stored as one `torch.save` archive in a file.

    Attributes:
        offset: offset of the slice in the whole tensor.
        shape: shape of the slice.
        place: file name, and offset and length of the archive in bytes (torch's `_StorageInfo`).
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    place: Any

    def read_into(self, target: torch.Tensor, folder: Path) -> None:
        """Fill a contiguous tensor with a single read from the file in `folder` (torch's loader makes three copies).

        Raises:
            ValueError: the archive does not match the metadata.
        """
        import torch
        from torch.distributed.checkpoint.utils import _create_file_view

        with open(folder / self.place.relative_path, "rb") as file:
            archive: Any = _create_file_view(file, self.place.offset, self.place.length)
            records = torch._C.PyTorchFileReader(archive)
            if "byteorder" in records.get_all_records() and records.get_record("byteorder") != sys.byteorder.encode():
                raise ValueError(
                    "the archive has a different byte order than this machine"
                )  # torch would crash on swapping the bytes of a meta tensor
            archive.seek(0)
            stored = torch.load(archive, map_location="meta", weights_only=True)
            if not isinstance(stored, torch.Tensor) or (stored.shape, stored.dtype) != (target.shape, target.dtype):
                raise ValueError(f"the archive does not match .metadata: {stored!r}")
            numbers = stored.untyped_storage()
            start, size = numbers._checkpoint_offset, numbers.nbytes()
            if start is None or not 0 <= start <= self.place.length - size:
                raise ValueError("the data are outside the archive")
            whole = stored.is_contiguous() and size == target.nbytes
            flat = target.reshape(-1) if whole else torch.empty(size // target.itemsize, dtype=target.dtype)
            file.seek(self.place.offset + start)
            if file.readinto(bytes_of(flat)) != flat.nbytes:
                raise ValueError("the archive is truncated")
            if not whole:
                target.copy_(flat.as_strided(stored.shape, stored.stride(), int(stored.storage_offset())))


def _slices(starts: Sequence[int], ends: Sequence[int], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - o, end - o) for start, end, o in zip(starts, ends, offset, strict=True))


class TorchDistWriter:
    """Writer of a checkpoint in parts, with one file per part.

    Args:
        folder: folder to write, created if missing.
        parts: for each part, its pieces and their dtypes.
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
        """Write a part of the checkpoint to its file.

        Args:
            pieces: pieces and their values, in the order given to the constructor.

        Returns:
            A string to pass to `finish`.

        Raises:
            OSError: the file cannot be written, for example because the disk is full.
        """

        def tensors() -> Iterator[torch.Tensor]:
            for item, (piece, tensor) in zip(self._plans[part].items, pieces, strict=True):
                index = item.index
                assert (piece.key, piece.offset) == (index.fqn, index.offset), f"expected {index}, got {piece}"
                tensor = tensor.detach()
                whole_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
                yield tensor if whole_storage else tensor.clone()  # torch.save would write the whole storage

        return self._write_file(part, tensors())

    def _write_file(self, part: int, values: Iterator[object]) -> str:
        """Write values to a part's file like `FileSystemWriter.write_data`, but hold only one in memory at a time.

        Returns:
            torch's `WriteResult`s, pickled and in hexadecimal form.
        """
        import torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.storage import WriteResult
        from torch.utils import serialization

        settings: Any = serialization.config
        results, start = [], 0
        # The archives' internal checksums take longer than writing, and neither torch nor Megatron reads them.
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
        """Complete the checkpoint: write metadata and Megatron's common state.

        Args:
            results: results of `write` for all parts, in order.
            arguments: arguments that Megatron's loader reads from the checkpoint. Without `hybrid_layer_pattern`, it
                assumes a GPTModel, whose layers are numbered differently.
        """
        # Extra states are stored as lists, like all objects that Megatron shards; None means nothing to restore.
        objects = len(self._plans) - 1
        common = self._write_file(objects, repeat([None], len(self._plans[objects].items)))
        written = [loads(bytes.fromhex(result), self.folder) for result in (*results, common)]
        self._writer.finish(self._metadata, written)
        arguments = {**arguments, "no_save_optim": True, "no_save_rng": True}
        arguments |= {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        common_state = {"args": Namespace(**arguments), "checkpoint_version": VERSION, "iteration": 0}
        (self.folder / COMMON).write_bytes(_saved(common_state).getvalue())
        (self.folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )


def write_tracker(checkpoints: Path) -> None:
    """Write the tracker file that names the release checkpoint as the newest."""
    (checkpoints / TRACKER).write_text(RELEASE)


def _reason(error: BaseException) -> BaseException:
    """Return the OSError or KeyboardInterrupt behind a failure of `torch.save`; the failure itself if there is none."""
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
        chunk=ChunkStorageMetadata(offset, shape), properties=TensorProperties(dtype=getattr(torch, dtype)), size=whole
    )
    return WriteItem(MetadataIndex(piece.key, offset), WriteItemType.SHARD, tensor_data=data)


def _bytes_item(name: str) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _extra_states(keys: Iterable[str], wholes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the keys of the modules' extra states in a Megatron checkpoint, one per module or one per expert.

    `wholes` maps these keys to the shapes of the whole tensors.
    """
    names = ["output_layer._extra_state/shard_0_1"]  # also with tied embeddings
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
