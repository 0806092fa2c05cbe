"""Safe reading of the pickled parts of Megatron's checkpoints, which can only create known record classes.

torch reads `.metadata` with an unrestricted unpickler (FileSystemReader.read_metadata), and objects in the shards
without `weights_only` (DefaultLoadPlanner.load_bytes): either would run any code that a file names.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import re
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.checkpoint.storage import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
COMMON = "common.pt"
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Environment variable that makes every `torch.load` in a process reject anything except data."""
_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo",),
    f"{_CHECKPOINT}.storage": ("WriteResult",),
    f"{_CHECKPOINT}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),  # torch before 2.4
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
"""Mapping from module to classes in torch 2 and Megatron-Core metadata, except Python's containers and dtypes."""

_SPECIAL = ("__class__", "__bases__", "__name__", "__qualname__")
_MISSING = object()


class Unsafe(CheckpointError):
    """Raised if a pickled file refers to anything other than plain data, and could thus run code."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) == ("torch.serialization", "_get_layout"):
            # A fresh function, so that attributes set by the pickle are discarded with it.
            return lambda layout: torch.serialization._get_layout(layout)
        module = "pathlib" if module == "pathlib._local" else module  # its name in Python 3.13
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        # dtypes are objects, not classes. getattr does not resolve dotted names, which a pickle may contain.
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"names {module}.{name}")


def loads(data: bytes, file: Path) -> Any:
    """Unpickle checkpoint records without running any code that the pickle names.

    Args:
        data: bytes of the pickle.
        file: file that contains the pickle, named in error messages.

    Raises:
        Unsafe: the pickle refers to anything other than known record classes; none of its code has run.
        CheckpointError: the pickle cannot be read.
    """
    try:
        with _classes_unchanged():
            return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a corrupt pickle raises almost any exception
        if isinstance(error, pickle.UnpicklingError) and str(error).startswith(("names ", "sets ")):
            raise Unsafe(
                f"{file} {error}, which checkpoint records never need. It may be an attempt to run a program on your "
                "machine; none of it ran. Do not use this checkpoint"
            ) from None
        raise CheckpointError(f"{file} cannot be read ({first_words(error)}): copy it again") from error


@contextmanager
def _classes_unchanged() -> Iterator[None]:
    """Context manager that undoes changes to allowed classes and enum members, and rejects a pickle that made any."""
    records = [
        getattr(importlib.import_module(module), name, None) for module, names in _RECORDS.items() for name in names
    ]
    classes = [record for record in records if isinstance(record, type)]
    members = [member for kind in classes if issubclass(kind, Enum) for member in kind]
    before = [(target, _attributes(target)) for target in (*classes, *members)]
    changed = False
    try:
        yield
    finally:
        for target, attributes in before:
            # Bypass the target's own setters: an enum's class refuses changes to its members.
            base: Any = type if isinstance(target, type) else object
            now = _attributes(target)
            for name in now.keys() - attributes.keys():
                changed = True
                base.__delattr__(target, name)
            for name, value in attributes.items():
                if now.get(name, _MISSING) is not value and not (name in _SPECIAL and now[name] == value):
                    changed = True
                    base.__setattr__(target, name, value)
    if changed:
        raise pickle.UnpicklingError("sets attributes of a class")


def _attributes(target: object) -> dict[str, Any]:
    """Mapping from name to value of all attributes that can be set on a class or an enum member."""
    return {**vars(target), **{name: getattr(target, name) for name in _SPECIAL if hasattr(target, name)}}


def read_metadata(folder: Path) -> Metadata:
    """Read a checkpoint's metadata.

    Raises:
        CheckpointError: the metadata cannot be read, or is unsafe to read (`Unsafe`).
    """
    from torch.distributed.checkpoint.metadata import Metadata

    file = folder / METADATA
    metadata = loads(file.read_bytes(), file)
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} holds {type(metadata).__name__}, not metadata: copy it again")
    return metadata


def first_words(error: Exception) -> str:
    """Type of an error and the first 80 characters of its message, as torch's messages may fill pages."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def check_objects(folder: Path, metadata: Metadata) -> None:
    """Check that a checkpoint's non-tensor objects (random states, arguments of the run) are plain data.

    Megatron registers its own data classes with torch when it is imported; without it, many of them are rejected.
    Nothing is checked if the user allows arbitrary objects (see `only_data`).

    Raises:
        Unsafe: an object is not plain data; names the file and the class or function.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if os.environ.get(FORCED) == "0":
        return
    if (folder / COMMON).is_file():
        _check_data(folder / COMMON, (folder / COMMON).read_bytes(), "")
    for index, info in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
            file = folder / info.relative_path
            with file.open("rb") as opened:
                opened.seek(info.offset)
                _check_data(file, opened.read(info.length), f" ({index.fqn})")


def _check_data(file: Path, data: bytes, label: str) -> None:
    import torch

    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # long messages for refused objects, almost any exception for corrupt files
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"cannot be read ({first_words(error)})"
        if named:
            reason = f"names {named[1]}, which neither torch nor Megatron registers as data"
        raise Unsafe(
            f"{file}{label} {reason}. It may be an attempt to run a program on your machine; none of it ran. `nemo-ext "
            f"convert` extracts the weights without reading this object; if you trust it, set {FORCED}=0"
        ) from None


def only_data() -> None:
    """Make this process, including Megatron's loader, reject anything except data in checkpoints from now on.

    `TORCH_FORCE_WEIGHTS_ONLY_LOAD=0` in the environment allows arbitrary objects in the shards again.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    if "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ:  # torch refuses both variables at once
        os.environ.setdefault(FORCED, "1")

    def read(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise CheckpointError(
                f"{self.path}: metadata of a single rank is not supported: call read_metadata without rank"
            )
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    setattr(FileSystemReader, "read_metadata", read)  # noqa: B010
