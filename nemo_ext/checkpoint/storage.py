"""Code shared by both checkpoint formats: tensor metadata, the reader protocol, checks and checksums."""

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
"""Supported weight dtypes; a checkpoint with any other is quantised or corrupt."""
NO_TYPE = f"of an unsupported type (supported: {', '.join(WEIGHT_TYPES)})"
SHOWN = 5


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be read or written; the message names the file or tensor, and what to do."""


@dataclass(frozen=True)
class Stored:
    """Shape and type of a tensor in a checkpoint.

    Attributes:
        shape: shape of the tensor.
        dtype: name of its type, such as `bfloat16`.
    """

    shape: Shape
    dtype: str


class Reader(Protocol):
    """Protocol of a checkpoint reader, implemented for safetensors (Hugging Face) and torch_dist (Megatron)."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Mapping from tensor name to shape and type."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        ...

    def files(self) -> Sequence[Path]:
        """Files that hold tensors."""
        ...


def fingerprint(reader: Reader) -> list[list[object]]:
    """Name, size and modification time of each of a checkpoint's files, which change when the checkpoint does."""
    return files_identity(reader.files())


def files_identity(files: Iterable[Path]) -> list[list[object]]:
    """Name, size in bytes and modification time in nanoseconds of each file, as JSON values."""
    stats = [(path.name, path.stat()) for path in sorted(files)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if it is contiguous."""
    import torch

    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(bytes_of(tensor))


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Reject NaN and infinity; `name` names the tensor in the message.

    Raises:
        CheckpointError: values are not finite; says how many.
    """
    import torch

    if tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        count = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"{name}: {count} of {tensor.numel()} values are NaN or infinite: use an earlier checkpoint, or pass "
            "check_finite=false to accept them"
        )


def check_tensors(reader: Reader, expected: Mapping[str, Shape], *, ignored: Sequence[str] = ()) -> None:
    """Check that a checkpoint has exactly a model's tensors, with the right shapes and supported types.

    Args:
        expected: mapping from the names of the model's tensors to their shapes.
        ignored: names of tensors that may be present but are not read.

    Raises:
        CheckpointError: tensors are missing, unexpected, or have a wrong shape or type; names them.
    """
    stored, skipped = reader.tensors, set(ignored)
    missing = [name for name in expected if name not in stored]
    extra = [name for name in stored if name not in expected and name not in skipped]
    common = [(name, stored[name], shape) for name, shape in expected.items() if name in stored]
    shapes = [f"{name} is {list(t.shape)}, expected {list(shape)}" for name, t, shape in common if t.shape != shape]
    types = [f"{name} is {t.dtype}" for name, t, _ in common if t.dtype not in WEIGHT_TYPES]
    problems = (
        ("missing", missing),
        ("not part of this model", extra),
        ("of a different shape", shapes),
        (NO_TYPE, types),
    )
    refuse_any(f"{reader.path} does not match its model (copy it again, or correct the config): ", *problems)


def refuse_any(where: str, *problems: tuple[str, Sequence[str]]) -> None:
    """Raise an error that lists problems with tensors, if there are any.

    Args:
        where: start of the message.
        problems: pairs of a problem and the names of the tensors that have it.

    Raises:
        CheckpointError: a tensor has a problem.
    """
    if lines := [f"{len(names)} tensors are {problem}: {listed(names)}" for problem, names in problems if names]:
        raise CheckpointError(where + "; ".join(lines))


def listed(names: Sequence[str]) -> str:
    """Text that lists the first five names, and the number of further ones."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def size_in_bytes(shape: Shape, dtype: str) -> int:
    """Size in bytes of a tensor of this shape and type."""
    return prod(shape) * torch_dtype(dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with a name such as `bfloat16`.

    Raises:
        ValueError: the name is unknown; lists the known ones.
    """
    import torch

    if name not in WEIGHT_TYPES:
        raise ValueError(f"dtype={name!r}: expected one of {', '.join(WEIGHT_TYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
