"""Reading and writing of weights in a single `model.safetensors`, or in safetensors shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.storage import CheckpointError, Stored, bytes_of, listed, size_in_bytes

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_TYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Mapping from safetensors' type names to torch's, in the order in which safetensors sorts tensors."""
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


class SafetensorsReader:
    """Memory-mapped reader of a folder's tensors, one at a time.

    Attributes:
        tensors: mapping from tensor name to shape and type, for all of the model's files.
        unread: names of other tensor files in the folder, such as adapters or weights in a publisher's own format.

    Raises:
        CheckpointError: a file is missing or truncated, or the index is missing or does not match the files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self._file_of: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        index = _read_index(path)
        files = self._shards(index)
        self.unread = sorted({file.name for file in path.glob("*.safetensors")} - {file.name for file in files})
        for file in files:
            self._read_header(file)
        if index is not None:
            where = {name: file.name for name, file in self._file_of.items()}
            wrong = sorted(name for name in index.keys() | where.keys() if index.get(name) != where.get(name))
            if wrong:
                raise CheckpointError(f"{path}: {INDEX} and the files disagree on {listed(wrong)}: copy both again")

    def _shards(self, index: Mapping[str, str] | None) -> list[Path]:
        if index is not None:
            files = sorted({self.path / name for name in index.values()})
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise CheckpointError(
                    f"{self.path}: files that {INDEX} names are missing ({listed(missing)}): download them again"
                )
            return files
        if (self.path / SINGLE).is_file():
            return [self.path / SINGLE]
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.path} has no *.safetensors files: expected {SINGLE}, or shards with {INDEX}")
        if len(files) > 1:
            raise CheckpointError(
                f"{self.path} has {len(files)} *.safetensors files but no {INDEX}, so missing shards cannot be "
                "detected: download the index too"
            )
        return files

    def _read_header(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    if name in self._file_of:
                        other = self._file_of[name].name
                        raise CheckpointError(
                            f"{file}: tensor {name} is also in {other}: copy both files and {INDEX} again"
                        )
                    part = opened.get_slice(name)
                    dtype = str(part.get_dtype())
                    self.tensors[name] = Stored(tuple(part.get_shape()), _TYPES.get(dtype, dtype))
                    self._file_of[name] = file
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read and may be truncated ({error}): copy it again") from error

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor, which is backed by the memory-mapped file."""
        from safetensors import safe_open

        file = self._file_of[name]
        last = self._open  # a local reference, as several threads may read
        if last is None or last[0] != file:
            last = self._open = file, safe_open(file, framework="pt").__enter__()
        tensor: torch.Tensor = last[1].get_tensor(name)
        return tensor

    def read_piece(self, piece: Piece) -> torch.Tensor:
        """Read a piece, which must be a whole tensor."""
        assert piece.shape == piece.whole
        return self.read(piece.key)

    def files(self) -> Sequence[Path]:
        """Files that hold tensors, and config.json if there is one."""
        return [*sorted(set(self._file_of.values())), *(file for file in [self.path / CONFIG] if file.is_file())]


def _read_index(path: Path) -> dict[str, str] | None:
    file = path / INDEX
    if not file.is_file():
        return None
    try:
        weight_map = json.loads(file.read_text())["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not an index with a weight_map ({error}): copy it again") from error


def tensor_names(path: Path) -> set[str]:
    """Return the names of a folder's tensors, from its index or from its files; empty if it has neither.

    Raises:
        CheckpointError: the index or a file cannot be read.
    """
    index = _read_index(path)
    if index is not None:
        return set(index)
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read and may be truncated ({error}): copy it again") from error
    return names


def shard_name(number: int, count: int) -> str:
    """Hugging Face's file name for shard `number` (from 0) of `count`."""
    return SINGLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def write_shard(file: Path, header: Mapping[str, Stored], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a safetensors file tensor by tensor, under a temporary name until it is complete.

    The safetensors library requires all tensors of a file in memory; the file written here is byte-identical.

    Args:
        header: mapping from tensor name to shape and type, for all of the file's tensors.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    facts: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(header, key=lambda name: (list(_NAMES).index(header[name].dtype), name)):
        stored, start = header[name], end
        end += size_in_bytes(stored.shape, stored.dtype)
        facts[name] = {"dtype": _NAMES[stored.dtype], "shape": stored.shape, "data_offsets": [start, end]}
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    temporary = file.with_name(f".{file.name}")
    try:
        with open(temporary, "wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            for name, tensor in tensors:
                opened.seek(8 + len(text) + facts[name]["data_offsets"][0])
                opened.write(bytes_of(tensor))
    except OSError as error:
        if error.errno is None or error.filename is not None:  # from the source, or naming the file already
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
    temporary.replace(file)


def write_index(folder: Path, files: Mapping[str, str], total_bytes: int) -> None:
    """Write the index for a folder with several shards; `files` maps tensor names to file names."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(files.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
