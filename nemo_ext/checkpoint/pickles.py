"""Safe reading of the pickled parts of Megatron's checkpoints: they build plain records of torch and Megatron alone.

torch reads `.metadata` with an unrestricted unpickler (FileSystemReader.read_metadata), and objects among the shards
without `weights_only` (DefaultLoadPlanner.load_bytes): either runs any code that a file names.
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
"""Environment variable with which every `torch.load` of a process refuses anything but data."""
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
"""Classes in the metadata of torch 2 and Megatron-Core, besides Python's own containers and torch's types."""

_SPECIAL = ("__class__", "__bases__", "__name__", "__qualname__")
_MISSING = object()


class Unsafe(CheckpointError):
    """A pickled file names something that is not data."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: torch.serialization._get_layout(layout)  # attributes set on this one are lost with it
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 has it
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        # Types are objects, not classes; getattr reads no dotted name, which a pickle may have.
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"names {module}.{name}")


def loads(data: bytes, file: Path) -> Any:
    """Unpickle checkpoint records.

    Args:
        data: the pickle.
        file: file that holds it, for messages.

    Raises:
        Unsafe: it names anything else; none of it ran.
        CheckpointError: it cannot be read.
    """
    try:
        with _classes_unchanged():
            return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # a broken pickle raises almost anything
        if isinstance(error, pickle.UnpicklingError) and str(error).startswith(("names ", "sets ")):
            raise Unsafe(
                f"{file}: {error}, which no checkpoint's records need: it may be there to run a program on your "
                "machine. Nothing of it ran: do not use this checkpoint"
            ) from None
        raise CheckpointError(f"{file}: cannot be read ({first_words(error)}): copy it again") from error


@contextmanager
def _classes_unchanged() -> Iterator[None]:
    """Undo and refuse what a pickle sets on classes and members of enums that it can name: it would outlive it."""
    found = [
        getattr(importlib.import_module(module), name, None) for module, names in _RECORDS.items() for name in names
    ]
    classes = [kind for kind in found if isinstance(kind, type)]
    members = [member for kind in classes if issubclass(kind, Enum) for member in kind]
    before = [(each, _attributes(each)) for each in (*classes, *members)]
    changed = False
    try:
        yield
    finally:
        for each, attributes in before:
            # Not each's own functions: an enum's class refuses to have its members set.
            own: Any = type if isinstance(each, type) else object
            now = _attributes(each)
            for name in now.keys() - attributes.keys():
                changed = True
                own.__delattr__(each, name)
            for name, value in attributes.items():
                if now.get(name, _MISSING) is not value and not (name in _SPECIAL and now[name] == value):
                    changed = True
                    own.__setattr__(each, name, value)
    if changed:
        raise pickle.UnpicklingError("sets attributes of a class")


def _attributes(of: object) -> dict[str, Any]:
    """Everything that can be set on a class or a member of an enum."""
    return {**vars(of), **{name: getattr(of, name) for name in _SPECIAL if hasattr(of, name)}}


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint.

    Args:
        folder: folder with `.metadata`.

    Raises:
        CheckpointError: as `loads`.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    file = folder / METADATA
    found = loads(file.read_bytes(), file)
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{file}: holds {type(found).__name__}, not metadata: copy it again")
    return found


def first_words(error: Exception) -> str:
    """Type of an error and the beginning of its message; torch's run to pages."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def check_objects(folder: Path, metadata: Metadata) -> None:
    """Check that what a checkpoint holds besides tensors (random states, arguments of the run) is data alone.

    Megatron registers its own data classes with torch when it is imported: without Megatron, many of them are refused.
    Nothing is checked where the user allows arbitrary objects (see `only_data`).

    Args:
        folder: folder with `.metadata`.
        metadata: metadata of the checkpoint.

    Raises:
        Unsafe: it is more than data; names the file and what it would have run.
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


def _check_data(file: Path, data: bytes, what: str) -> None:
    import torch

    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # long messages for refused objects, almost any error for broken files
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"names {named[1]}" if named else first_words(error)
        raise Unsafe(
            f"{file}{what}: {reason}, which neither torch nor Megatron knows as data: it may be there to run a program "
            "on your machine. Nothing of it ran. `nemo-ext convert` takes the weights alone out of a checkpoint, and "
            f"reads none of this; if you know what it is, {FORCED}=0 lets it through"
        ) from None


def only_data() -> None:
    """Make this process read all checkpoints as data alone from now on, in Megatron's loader too.

    `TORCH_FORCE_WEIGHTS_ONLY_LOAD=0` in the environment allows arbitrary objects among the shards again.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    if "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ:  # torch takes one of the two
        os.environ.setdefault(FORCED, "1")

    def read(self: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
        if kwargs.get("rank") is not None:
            raise CheckpointError(f"{self.path}: metadata of single ranks are not read")
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    setattr(FileSystemReader, "read_metadata", read)  # noqa: B010
