"""Shards: pieces of a stream that are tokenised separately and kept in `<prefix>.shards/` until it is finished.

A shard has two files: the concatenated ids of its documents, and one row per document, which marks it as finished.
"""

import dataclasses
import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_ext.data.text.documents import (
    Admission,
    Document,
    Part,
    ReadReport,
    Source,
    Unit,
    document_digest,
    readable,
    split_position,
)
from nemo_ext.data.text.indexed_dataset import Ids, ids_type
from nemo_ext.data.text.sources import load_source
from nemo_ext.data.text.tokenizers import Tokenizer, load_tokenizer
from nemo_ext.job.files import complete_file, write_text
from nemo_ext.job.progress import notice
from nemo_ext.job.units import Units

_BATCH_BYTES = 1 << 20
_TOKENS, _ROWS = ".tokens", ".npz"


@dataclass(frozen=True, kw_only=True)
class ShardWork:
    """A stream's tokenisation settings, in a form that is cheap to send to worker processes."""

    source: str
    tokenizer: str
    tokenizer_identity: str
    seed: int
    directory: Path


@dataclass(frozen=True)
class ShardRows:
    """Tokens, bytes, split position (see `split_position`) and digest of each document of a shard, in reading order."""

    lengths: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    positions: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint8]
    report: ReadReport


def shards_in(directory: Path) -> Units:
    """Return the shard files in a directory, as units of work."""
    return Units(directory, mark=_ROWS, digits=5)


def open_shards(directory: Path, plan_hash: str) -> None:
    """Create the shard directory; if its shards were made with a different `plan_hash`, empty it first."""
    plan = directory / "plan"
    if directory.exists() and not (plan.exists() and plan.read_text() == plan_hash):
        notice(f"{directory} was begun with other settings or input files: starting over")
        shutil.rmtree(directory)
    if not directory.exists():
        write_text(plan, plan_hash)


def tokenize_shard(work: ShardWork, shard: Unit) -> None:
    """Read and tokenise one shard.

    Raises:
        ValueError: The tokenizer's files changed since the work began, or the source cannot be read.
    """
    source, tokenizer = _loaded(work.source, work.tokenizer)
    if tokenizer.identity != work.tokenizer_identity:
        raise ValueError(f"tokenizer {work.tokenizer} changed during the run: rerun the same command")
    end = np.array([tokenizer.eod], dtype=ids_type(tokenizer.vocab_size)).tobytes()
    report = ReadReport()
    lengths, sizes, positions = list[int](), list[int](), list[int]()
    digests = bytearray()
    with complete_file(shards_in(work.directory).file(shard.number, _TOKENS)) as file:
        for batch in _batches(source, shard.parts, report):
            encoded = tokenizer.encode([document.text for document, _ in batch])
            for (document, data), ids in zip(batch, encoded, strict=True):
                file.write(ids.tobytes() + end)
                lengths.append(len(ids) + 1)
                sizes.append(len(data))
                positions.append(split_position(work.seed, document.id))
                digests += document_digest(data)
    with complete_file(shards_in(work.directory).file(shard.number)) as file:
        np.savez(
            file,
            lengths=np.array(lengths, dtype=np.int64),
            sizes=np.array(sizes, dtype=np.int64),
            positions=np.array(positions, dtype=np.uint64),
            digests=np.frombuffer(digests, dtype=np.uint8).reshape(-1, 16),
            report=np.frombuffer(json.dumps(dataclasses.asdict(report)).encode(), dtype=np.uint8),
        )


def read_rows(directory: Path, shard: int) -> ShardRows:
    """Read the rows of a finished shard; raises ValueError if the file is damaged."""
    path = shards_in(directory).file(shard)
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in ("lengths", "sizes", "positions", "digests")}
            return ShardRows(report=ReadReport(**json.loads(stored["report"].tobytes())), **arrays)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}): remove {directory} and rerun the same command") from error


def open_tokens(directory: Path, shard: int, dtype: type[np.uint16 | np.int32], count: int) -> Ids:
    """Open the `count` token ids of a finished shard as a memory map; raises ValueError if the file is damaged."""
    path = shards_in(directory).file(shard, _TOKENS)
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} is damaged: remove {directory} and rerun the same command")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype)


def complete_shards(
    work: ShardWork,
    shards: Iterable[Unit],
    source: Source,
    *,
    workers: int,
    label: str,
    total: int | None,
) -> int:
    """Tokenise missing shards until the source's `max_bytes` is reached.

    Args:
        total: total size of the shards in bytes; None to show no progress.

    Returns:
        Number of shards, from the first, that are needed for `max_bytes`.

    Raises:
        JobFailed: A worker process died.
    """
    ready: set[int] = set()
    frontier = 0
    admission, ignored = Admission(source), ReadReport()

    def enough(shard: Unit) -> bool:
        nonlocal frontier
        ready.add(shard.number)
        while frontier in ready and not admission.full:
            if source.max_bytes is not None:
                rows = read_rows(work.directory, frontier)
                for digest, size in zip(rows.digests, rows.sizes, strict=True):
                    admission.admit(digest.tobytes(), int(size), ignored)
            frontier += 1
        return admission.full

    units = shards_in(work.directory)
    units.run(partial(tokenize_shard, work), shards, workers=workers, label=label, total=total, enough=enough)
    return frontier


@lru_cache(maxsize=1)
def _loaded(source: str, tokenizer: str) -> tuple[Source, Tokenizer]:
    return load_source(json.loads(source)), load_tokenizer(json.loads(tokenizer))


def _batches(source: Source, parts: Sequence[Part], report: ReadReport) -> Iterator[list[tuple[Document, bytes]]]:
    batch: list[tuple[Document, bytes]] = []
    size = 0
    for part in parts:
        for document, data in readable(source, part, report):
            batch.append((document, data))
            size += len(data)
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
