"""Common parts of reading and writing checkpoints of either kind: tensors by name, checks, checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

WEIGHT_TYPES = ("bfloat16", "float16", "float32", "float64")
"""Types that weights come in; anything else is a quantised or broken checkpoint."""
NO_TYPE = f"of a type that weights do not have ({', '.join(WEIGHT_TYPES)} are known)"
SHOWN = 5


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written: says which file or tensor, and what to do."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint.

    Attributes:
        shape: shape of the tensor.
        dtype: name of its type, such as `bfloat16`.
    """

    shape: Shape
    dtype: str


class Reader(Protocol):
    """A checkpoint of either kind, opened for reading."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Name -> shape and type."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor."""
        ...

    def files(self) -> Sequence[Path]:
        """The files that hold tensors."""
        ...


def fingerprint(reader: Reader) -> list[list[object]]:
    """Names, sizes and modification times of a checkpoint's files: another list, another checkpoint."""
    return files_identity(reader.files())


def files_identity(files: Iterable[Path]) -> list[list[object]]:
    """Names, sizes and modification times of files."""
    stats = [(path.name, path.stat()) for path in sorted(files)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, not copied if it is contiguous."""
    import torch

    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(bytes_of(tensor))


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinity.

    Raises:
        CheckpointError: numbers are not finite; names the tensor and how many.
    """
    import torch

    if tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        count = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{name}: {count} of {tensor.numel()} numbers are NaN or infinite: take an earlier checkpoint, or pass "
            "check_finite=false to take it as it is"
        )


def check_tensors(reader: Reader, expected: Mapping[str, Shape], *, ignored: Sequence[str] = ()) -> None:
    """Check a checkpoint's tensors against a model's: all present, none extra, shapes and types right.

    Args:
        reader: the checkpoint.
        expected: name -> shape.
        ignored: names of tensors that may be there and are not read.

    Raises:
        CheckpointError: tensors are missing, extra, or of another shape or type; names them.
    """
    found = reader.tensors
    missing = [name for name in expected if name not in found]
    skipped = set(ignored)
    extra = [name for name in found if name not in expected and name not in skipped]
    shapes = [
        f"{name} is {list(found[name].shape)}, the model wants {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    types = [
        f"{name} is {found[name].dtype}" for name in expected if name in found and found[name].dtype not in WEIGHT_TYPES
    ]
    problems = (("missing", missing), ("not of this model", extra), ("of another shape", shapes), (NO_TYPE, types))
    refuse_any(f"{reader.path}: ", *problems)


def refuse_any(where: str, *problems: tuple[str, Sequence[str]]) -> None:
    """Refuse tensors with problems, given as pairs of what is wrong and names.

    Raises:
        CheckpointError: there are any; begins with `where`.
    """
    if told := [f"{len(names)} tensors are {what}: {listed(names)}" for what, names in problems if names]:
        raise CheckpointError(where + "; ".join(told))


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def size_in_bytes(shape: Shape, dtype: str) -> int:
    """Bytes of a tensor."""
    return prod(shape) * torch_dtype(dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of a name such as `bfloat16`.

    Raises:
        ValueError: the name is unknown; names the known ones.
    """
    import torch

    if name not in WEIGHT_TYPES:
        raise ValueError(f"dtype={name}: expected one of {', '.join(WEIGHT_TYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
