"""Resumable writing of a Hugging Face or Megatron checkpoint, tensor by tensor, with checks and a final rename."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_ext.checkpoint.output import Output, check_room, check_target, has_size, only_writer, was_published
from nemo_ext.checkpoint.parameters import Piece
from nemo_ext.checkpoint.safetensors_files import SafetensorsReader, shard_name, write_index, write_shard
from nemo_ext.checkpoint.storage import (
    CheckpointError,
    Stored,
    check_finite,
    checksum,
    listed,
    size_in_bytes,
    torch_dtype,
)
from nemo_ext.checkpoint.torch_dist import RELEASE, TorchDistReader, TorchDistWriter, write_tracker
from nemo_ext.job.interrupts import interrupts_between
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.workers import usable_cores

if TYPE_CHECKING:
    from torch import Tensor

HUGGING_FACE, MEGATRON = "huggingface", "megatron"
GIGABYTE = 1e9


@dataclass(frozen=True)
class Slot:
    """Tensor in the target checkpoint, or a slice of one; Hugging Face tensors are always whole."""

    piece: Piece
    dtype: str

    @property
    def label(self) -> str:
        """Name of the slot in messages and records."""
        whole = self.piece.shape == self.piece.whole
        return self.piece.key if whole else f"{self.piece.key}[{self.piece.offset[0]}]"

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return size_in_bytes(self.piece.shape, self.dtype)


@dataclass(frozen=True)
class Work:
    """Work item: a set of target tensors that are computed together.

    Attributes:
        slots: tensors to compute.
        make: function that computes them, in order and in their shapes; they are cast to their types afterwards.
        sources: names of the source tensors, for messages.
    """

    slots: tuple[Slot, ...]
    make: Callable[[], Sequence[Tensor]]
    sources: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Total size of the slots in bytes."""
        return sum(slot.bytes for slot in self.slots)


def cut_into_parts(work: Sequence[Work], shard_gigabytes: float) -> list[list[Work]]:
    """Divide work items into consecutive parts of at most one shard; an item larger than a shard gets its own part."""
    labels = [slot.label for item in work for slot in item.slots]
    twice = sorted({label for label, count in Counter(labels).items() if count > 1})
    assert not twice, f"duplicate tensors: {listed(twice)}"
    parts: list[list[Work]] = [[]]
    size = 0
    for item in work:
        if parts[-1] and size + item.bytes > shard_gigabytes * GIGABYTE:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.bytes
    return parts


def write_checkpoint(
    to: Path,
    to_format: str,
    parts: Sequence[Sequence[Work]],
    *,
    identity: dict[str, Any],
    finish: Callable[[Path], None],
    arguments: Mapping[str, Any] | None = None,
    finite: bool = True,
    verify: bool = True,
    progress: bool = True,
    remarks: Sequence[str] = (),
) -> Path:
    """Write a checkpoint folder, and return its path; the same call resumes after an interruption.

    Args:
        to: target folder, which gets this name only when complete.
        to_format: `huggingface` (safetensors files and index) or `megatron` (a checkpoints directory with a release).
        parts: work items of each part. A part is written to one file, and an interruption loses at most one part.
        identity: everything that determines the folder's content, as JSON values.
        finish: function that adds all files except tensors to the folder.
        arguments: arguments for Megatron's loader (see `megatron_arguments`).
        finite: whether NaN and infinity are rejected.
        verify: whether every tensor is read back at the end, and its checksum compared.
        progress: whether a progress bar is shown.
        remarks: notes for the user, stored in the folder's record.

    Raises:
        CheckpointError: a value is NaN or infinite, the disk is full, the folder holds something else, another process
            is writing it, or a file does not read back correctly.
    """
    check_target(to)
    if already_made(to, to_format, parts, identity=identity):
        return to
    total = sum(work.bytes for part in parts for work in part)
    with only_writer(to), contextlib.ExitStack() as at_end:
        if already_made(to, to_format, parts, identity=identity):  # by another process, before the lock was taken
            return to
        identity = _with_parts(to_format, parts, identity)
        output = Output(to, identity)
        at_end.callback(output.close)
        kind: type[_SafetensorsTarget | _TorchDistTarget]
        kind = _SafetensorsTarget if to_format == HUGGING_FACE else _TorchDistTarget
        target = kind(output.folder, parts)
        # A finished part that was lost since then, for example in a power failure, is written again.
        output.done = {n: done for n, done in output.done.items() if has_size(target.file(n), done["size"])}
        check_room(to, sum(w.bytes for n, part in enumerate(parts) if n not in output.done for w in part))
        left = [number for number in range(len(parts)) if number not in output.done]
        sums: dict[str, int] = {}
        with (
            _finished_parts_named(output),
            progress_of("writing", total, enabled=progress) as advance,
            interrupts_between() as interruptible,
            contextlib.closing(_tensors([parts[n] for n in left], sums, interruptible, finite=finite)) as tensors,
        ):
            advance(total - sum(work.bytes for number in left for work in parts[number]))
            for number in left:
                slots = [slot for work in parts[number] for slot in work.slots]
                result = target.write(number, _counted(islice(tensors, len(slots)), advance))
                file = target.file(number)
                checksums = {slot.label: sums.pop(slot.label) for slot in slots}
                output.finished(number, {"result": result, "checksums": checksums, "size": file.stat().st_size}, file)
            target.finish([output.done[number]["result"] for number in range(len(parts))], arguments or {})
        finish(output.folder)
        if verify:
            with progress_of("verifying", total, enabled=progress) as advance, interrupts_between() as interruptible:
                _verify(target.reader(), parts, output, advance, interruptible)
        output.publish({**identity, "remarks": list(remarks)})
    return to


@contextlib.contextmanager
def _finished_parts_named(output: Output) -> Iterator[None]:
    """Context manager that adds the location of the finished parts to the error about a rejected tensor.

    If no part is finished, the temporary files are removed instead.
    """
    try:
        yield
    except CheckpointError as error:
        if not output.done:
            output.clear()
            raise
        raise CheckpointError(
            f"{error}. {len(output.done)} finished files are in {output.folder}: fix this error and run the same "
            "command again to resume from them, or remove the folder to start over"
        ) from error


def already_made(to: Path, to_format: str, parts: Sequence[Sequence[Work]], *, identity: dict[str, Any]) -> bool:
    """True if the folder holds the result of `write_checkpoint` with these arguments; in this case a note is printed.

    Raises:
        CheckpointError: the folder holds something else.
    """
    if not was_published(to, _with_parts(to_format, parts, identity)):
        return False
    notice(f"{to} is already complete")
    return True


def _with_parts(to_format: str, parts: Sequence[Sequence[Work]], identity: dict[str, Any]) -> dict[str, Any]:
    return {"to_format": to_format, "parts": [len(part) for part in parts], **identity}


def _tensors(
    parts: Sequence[Sequence[Work]], sums: dict[str, int], interruptible: Callable[[], None], *, finite: bool
) -> Generator[tuple[Piece, Tensor], None, None]:
    """Compute the tensors of all work items in order; a thread computes the next one while a tensor is written.

    Args:
        sums: mapping to fill with the checksum of each tensor, keyed by its slot's label.
        interruptible: function called between tensors, which raises an exception if the user interrupted the job.
    """

    def make() -> Iterator[tuple[Piece, Tensor]]:
        for work in chain.from_iterable(parts):
            for slot, tensor in zip(work.slots, work.make(), strict=True):
                assert tensor.shape == slot.piece.shape, f"{slot.label}: made {list(tensor.shape)}"
                if finite:
                    check_finite(" + ".join(work.sources) or slot.label, tensor)
                tensor = _cast(slot, tensor, finite=finite).contiguous()
                sums[slot.label] = checksum(tensor)
                yield slot.piece, tensor

    making = make()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, making, None)
        while (pair := coming.result()) is not None:
            interruptible()
            coming = thread.submit(next, making, None)
            yield pair


def _counted(tensors: Iterator[tuple[Piece, Tensor]], advance: Callable[[int], None]) -> Iterator[tuple[Piece, Tensor]]:
    for piece, tensor in tensors:
        yield piece, tensor
        advance(tensor.nbytes)


def _cast(slot: Slot, tensor: Tensor, *, finite: bool) -> Tensor:
    """Cast a tensor to the type of its slot; raises CheckpointError if a finite value overflows."""
    dtype = torch_dtype(slot.dtype)
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if finite and not cast.abs().max().isfinite():
        raise CheckpointError(
            f"{slot.label}: values up to {tensor.abs().max().item():.3g} overflow {slot.dtype}: choose another type "
            "with dtype=NAME"
        )
    return cast


def _verify(
    reader: SafetensorsReader | TorchDistReader,
    parts: Sequence[Sequence[Work]],
    output: Output,
    advance: Callable[[int], None],
    interruptible: Callable[[], None],
) -> None:
    """Read every tensor back, and compare its checksum with the record in `output`."""
    slots = [(n, slot) for n, part in enumerate(parts) for work in part for slot in work.slots]

    def is_right(number: int, slot: Slot) -> bool:
        return checksum(reader.read_piece(slot.piece)) == output.done[number]["checksums"][slot.label]

    threads = ThreadPoolExecutor(min(4, usable_cores()))
    try:
        checked = threads.map(is_right, *zip(*slots, strict=True))
        for (_, slot), right in zip(slots, checked, strict=True):
            interruptible()
            if not right:
                raise CheckpointError(
                    f"{slot.label} reads back differently than it was written: remove {output.folder} and run the same "
                    "command again; if this recurs, check the disk for faults"
                )
            advance(slot.bytes)
    finally:
        threads.shutdown(cancel_futures=True)


class _SafetensorsTarget:
    """Target that consists of safetensors shards and an index."""

    def __init__(self, folder: Path, parts: Sequence[Sequence[Work]]) -> None:
        self.folder, self.parts = folder, parts

    def file(self, number: int) -> Path:
        return self.folder / shard_name(number, len(self.parts))

    def write(self, number: int, tensors: Iterator[tuple[Piece, Tensor]]) -> None:
        slots = [slot for work in self.parts[number] for slot in work.slots]
        header = {slot.piece.key: Stored(slot.piece.shape, slot.dtype) for slot in slots}
        write_shard(self.file(number), header, ((piece.key, tensor) for piece, tensor in tensors))

    def finish(self, results: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        count = len(self.parts)
        if count > 1:
            slots = [
                (shard_name(n, count), s) for n, part in enumerate(self.parts) for work in part for s in work.slots
            ]
            files = {slot.piece.key: file for file, slot in slots}
            write_index(self.folder, files, sum(slot.bytes for _, slot in slots))

    def reader(self) -> SafetensorsReader:
        return SafetensorsReader(self.folder)


class _TorchDistTarget:
    """Target that writes a Megatron checkpoint directory with a single `release` checkpoint."""

    def __init__(self, folder: Path, parts: Sequence[Sequence[Work]]) -> None:
        self.folder = folder
        pieces = [[(slot.piece, slot.dtype) for work in part for slot in work.slots] for part in parts]
        self.writer = TorchDistWriter(folder / RELEASE, pieces)

    def file(self, number: int) -> Path:
        return self.writer.file(number)

    def write(self, number: int, tensors: Iterator[tuple[Piece, Tensor]]) -> str:
        return self.writer.write(number, tensors)

    def finish(self, results: Sequence[Any], arguments: Mapping[str, Any]) -> None:
        self.writer.finish(results, arguments)
        write_tracker(self.folder)

    def reader(self) -> TorchDistReader:
        return TorchDistReader(self.folder / RELEASE)
