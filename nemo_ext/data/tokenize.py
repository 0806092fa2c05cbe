"""Text to Megatron's .bin/.idx files, in parallel and resumable.

A stream is cut into shards, lists of parts of its source. Workers read and tokenise a shard each and leave it
in `<prefix>.shards/`; then the shards are written in order into `<prefix>_train` and `<prefix>_valid`. What
depends on more than one document (duplicates, `max_bytes`, the split) is decided in that last pass, so the files
are the same byte for byte whatever the number of workers and however often the work was interrupted.

Each file gets its own name only when it is complete, the manifest `<prefix>.json` last of all. Two runs must
not write the same prefix at the same time.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_ext.data.sources import (
    Admission,
    Document,
    Part,
    ReadReport,
    Source,
    document_digest,
    nearest,
    readable,
)
from nemo_ext.data.tokenizers import Ids, Tokenizer, ids_type, load_tokenizer

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
SPLITS = ("train", "valid")
_BLEND_KEYS = ("directory", "tokenizer", "streams")
_BATCH_BYTES = 1 << 20
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, kw_only=True)
class SplitCounts:
    """What one split holds; `tokens` includes the eod of every document, `text_bytes` is UTF-8."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a finished stream holds and what it was made from. A split without documents has no files.

    `skipped` counts by reason what was read and not used; `reached_max_bytes` tells that the source had more.
    `prefix` is where the manifest was found and is not stored, so the files can be moved together.
    """

    prefix: str
    config_hash: str
    source: dict[str, object]
    tokenizer: dict[str, object]
    tokenizer_identity: str
    vocab_size: int
    eod: int
    dtype: str
    validation_share: float
    seed: int
    splits: dict[str, SplitCounts]
    records: int
    skipped: dict[str, int]
    examples: dict[str, list[str]]
    reached_max_bytes: bool

    def split_prefix(self, split: str) -> str:
        """The path without .bin/.idx that Megatron takes for "train" or "valid"."""
        assert split in SPLITS, split
        return f"{self.prefix}_{split}"


@dataclass(frozen=True, kw_only=True)
class _ShardWork:
    """What a worker process needs for any shard, in a form that is cheap to send."""

    source: str
    tokenizer: str
    tokenizer_identity: str
    seed: int
    directory: str


@dataclass(frozen=True)
class _ShardRows:
    """One row a document of a shard, in reading order; `positions` decide the split."""

    lengths: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    positions: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint8]
    report: ReadReport


@dataclass(frozen=True)
class _Selection:
    """For each shard, which of its documents are kept and which of them are for validation."""

    kept: list[npt.NDArray[np.bool_]]
    validation: list[npt.NDArray[np.bool_]]
    report: ReadReport
    full: bool


def tokenize_stream(
    source: Source,
    tokenizer: Tokenizer,
    output_prefix: str | Path,
    *,
    validation_share: float = 0.05,
    seed: int = 1234,
    workers: int | None = None,
    documents_per_shard: int | None = None,
    progress: bool = True,
) -> Manifest:
    """Write `<output_prefix>_train.{bin,idx}`, `_valid.{bin,idx}` and the manifest `<output_prefix>.json`.

    Run again after an interruption, it goes on with the shards that are missing; finished with the same
    settings and input files, it only returns the manifest; with others it starts over and says so.

    A document goes to validation when a hash of (seed, document id) falls below `validation_share`; a stream
    of two or more documents has one in each split at least, unless the share is 0. Every document ends with eod.

    Args:
        workers: Processes (None: one for each core this process may use). One works without starting any;
            more need a main module that can be imported (`if __name__ == "__main__":`).
        documents_per_shard: Cut shards after so many documents (None: by size, about 64 shards). It changes
            how much work an interruption loses, not the files.
        progress: Show a bar on a terminal, else a line now and then, both on stderr.

    Raises:
        ValueError: Wrong settings, a source that cannot be read or is malformed, or one without documents.
        RuntimeError: A worker process died.
    """
    validation_share, seed = _checked_split(validation_share, seed)
    workers = _checked_count("workers", workers) or _usable_cores()
    documents_per_shard = _checked_count("documents_per_shard", documents_per_shard)
    source.check()
    prefix = Path(output_prefix)
    total = sum(path.stat().st_size for _, path in source.inputs())
    fingerprint = source.fingerprint()
    settings: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "source": source.describe(),
        "input_files": fingerprint,
        "tokenizer": tokenizer.identity,
        "validation_share": validation_share,
        "seed": seed,
    }
    config_hash = _hash(settings)
    directory = Path(f"{prefix}.shards")
    finished = _finished(prefix, config_hash)
    if finished is not None:
        shutil.rmtree(directory, ignore_errors=True)
        logger.info("%s: already tokenised with these settings", prefix)
        return finished

    wanted = total if source.max_bytes is None else min(total, source.max_bytes)
    shard_size = min(max(wanted // 64, 1 << 20), 1 << 28)
    _open_shards(directory, _hash([config_hash, documents_per_shard, shard_size]))
    work = _ShardWork(
        source=json.dumps(source.describe()),
        tokenizer=json.dumps(tokenizer.describe()),
        tokenizer_identity=tokenizer.identity,
        seed=seed,
        directory=str(directory),
    )
    shards = _shards(source, max_documents=documents_per_shard or sys.maxsize, max_size=shard_size)
    with _Progress(prefix.name, total, enabled=progress) as shown:
        count = _complete_shards(work, shards, source, workers=workers, advance=shown.advance)
    if source.fingerprint() != fingerprint:
        raise ValueError(f"{prefix}: input files changed while they were read: run again when they are complete")
    selection = _select(directory, count, source, validation_share)
    splits = _write_splits(prefix, directory, selection, tokenizer)
    manifest = Manifest(
        prefix=str(prefix),
        config_hash=config_hash,
        source=json.loads(work.source),
        tokenizer=json.loads(work.tokenizer),
        tokenizer_identity=tokenizer.identity,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        dtype=ids_type(tokenizer.vocab_size).__name__,
        validation_share=validation_share,
        seed=seed,
        splits=splits,
        records=selection.report.records,
        skipped=dict(sorted(selection.report.skipped.items())),
        examples=dict(sorted(selection.report.examples.items())),
        reached_max_bytes=selection.full,
    )
    _write_manifest(manifest, directory)
    shutil.rmtree(directory, ignore_errors=True)
    if selection.report.skipped:
        logger.warning("%s: skipped %s", prefix, selection.report.summary())
    return manifest


def tokenize_blend(
    config: Mapping[str, object], *, workers: int | None = None, progress: bool = True
) -> list[Manifest]:
    """Tokenise every stream of a blend that has a source, after checking all of them.

    Args:
        config: `directory`, `tokenizer` (see `load_tokenizer`), `streams`, and, if wanted, `validation_share`,
            `seed`, `workers` and `documents_per_shard` as in `tokenize_stream`. A stream is a mapping with `name`,
            `weight`, `source` (see `Source.from_config`; without one the stream's files must exist already) and
            `prefix` (where its files go; `<directory>/<name>` if left out). Weights are only checked: sampling
            uses them.
        workers: Goes before the config's.

    Returns:
        The manifests of the streams with a source, in their order.

    Raises:
        ValueError: Or FileNotFoundError, before any work, when anything in `config` is wrong or missing.
    """
    known = (*_BLEND_KEYS, "validation_share", "seed", "workers", "documents_per_shard")
    _check_keys(config, known, required=_BLEND_KEYS, where="blend")
    directory, tokenizer_config, streams = (config[key] for key in _BLEND_KEYS)
    if not isinstance(directory, str | Path) or not str(directory):
        raise ValueError(f"blend: directory must be a path, not {directory!r}")
    if not isinstance(tokenizer_config, Mapping):
        raise ValueError(f"blend: tokenizer must be a mapping such as {{kind: byte}}, not {tokenizer_config!r}")
    if not isinstance(streams, Sequence) or isinstance(streams, str) or not streams:
        raise ValueError(f"blend: streams must be a list of at least one stream, not {streams!r}")
    validation_share, seed = _checked_split(config.get("validation_share", 0.05), config.get("seed", 1234))
    workers = _checked_count("workers", config.get("workers") if workers is None else workers)
    documents_per_shard = _checked_count("documents_per_shard", config.get("documents_per_shard"))
    tokenizer = load_tokenizer(tokenizer_config)
    names: set[str] = set()
    work: dict[Path, Source] = {}
    for number, stream in enumerate(streams, start=1):
        name, prefix, source = _checked_stream(stream, Path(directory), where=f"stream {number} of {len(streams)}")
        if name in names or prefix in work:
            raise ValueError(f"blend: two streams are named {name!r} or write {prefix}: give each its own")
        names.add(name)
        if source is not None:
            work[prefix] = source
    return [
        tokenize_stream(
            source,
            tokenizer,
            prefix,
            validation_share=validation_share,
            seed=seed,
            workers=workers,
            documents_per_shard=documents_per_shard,
            progress=progress,
        )
        for prefix, source in work.items()
    ]


def read_manifest(prefix: str | Path) -> Manifest:
    """Read the manifest `<prefix>.json` of a finished stream.

    Raises:
        ValueError: There is none, or the file is not a manifest of this format.
    """
    path = Path(f"{prefix}.json")
    try:
        values = json.loads(path.read_bytes())
        if values.pop("format_version") != FORMAT_VERSION:
            raise ValueError("another format version")
        values["splits"] = {split: SplitCounts(**counts) for split, counts in values["splits"].items()}
        return Manifest(prefix=str(prefix), **values)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such manifest: tokenise the stream first") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path}: not a manifest of tokenised data ({error!r}): choose another prefix, or remove the file"
        ) from error


# --------------------------------------------------------------------------- before the work


def _checked_split(validation_share: object, seed: object) -> tuple[float, int]:
    # False and True are ints, but nobody means 0 and 1 by them.
    number = isinstance(validation_share, int | float) and not isinstance(validation_share, bool)
    if not isinstance(validation_share, int | float) or not number or not 0 <= validation_share < 1:
        raise ValueError(f"validation_share must be a number from 0 to below 1, not {validation_share!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be a whole number, not {seed!r}")
    return float(validation_share), seed


def _checked_count(name: str, count: object) -> int | None:
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count >= 1):
        return count
    raise ValueError(f"{name} must be a whole number of at least 1, or null for the default, not {count!r}")


def _check_keys(config: Mapping[str, object], known: Sequence[str], *, required: Sequence[str], where: str) -> None:
    for key in config:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}: {nearest(str(key), known)}")
    for key in required:
        if key not in config:
            raise ValueError(f"{where}: the key {key!r} is missing")


def _checked_stream(stream: object, directory: Path, *, where: str) -> tuple[str, Path, Source | None]:
    """Name, output prefix and, if it has one, source of a stream of a blend."""
    if not isinstance(stream, Mapping):
        raise ValueError(f"{where}: must be a mapping with name, weight and source, not {stream!r}")
    _check_keys(stream, ("name", "weight", "source", "prefix"), required=("name", "weight"), where=where)
    name, weight, config = stream["name"], stream["weight"], stream.get("source")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"{where}: name must be letters, digits, '.', '_' and '-' (it names files), not {name!r}")
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 < weight < float("inf"):
        raise ValueError(f"stream {name!r}: weight must be above 0, not {weight!r}: or leave the stream out")
    prefix = Path(stream.get("prefix") or directory / name)
    if config is None:
        return name, prefix, None
    if not isinstance(config, Mapping):
        raise ValueError(f"stream {name!r}: source must be a mapping with a kind, not {config!r}")
    try:
        source = Source.from_config(config)
        source.check()
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"stream {name!r}: {error}") from error
    return name, prefix, source


def _usable_cores() -> int:
    # Slurm and containers give a process fewer cores than the machine has; macOS cannot say.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _hash(settings: object) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _finished(prefix: Path, config_hash: str) -> Manifest | None:
    """The manifest, if the stream was finished with these settings and its files are whole."""
    if not Path(f"{prefix}.json").exists():
        return None
    manifest = read_manifest(prefix)
    if manifest.config_hash != config_hash:
        logger.warning("%s: made from other settings or input files: starting over", prefix)
        return None
    width = np.dtype(manifest.dtype).itemsize
    for split, counts in manifest.splits.items():
        data, index = (Path(f"{manifest.split_prefix(split)}.{end}") for end in ("bin", "idx"))
        whole = data.exists() and index.exists() and data.stat().st_size == counts.tokens * width
        if counts.documents and not whole:
            logger.warning("%s: %s is missing or cut short: starting over", prefix, data.with_suffix(".{bin,idx}"))
            return None
    return manifest


def _open_shards(directory: Path, plan_hash: str) -> None:
    """Make the shards' directory, emptying it if another plan began it."""
    plan = directory / "plan"
    if directory.exists() and not (plan.exists() and plan.read_text() == plan_hash):
        logger.warning("%s: begun with other settings or input files: starting over", directory)
        shutil.rmtree(directory)
    if not directory.exists():
        directory.mkdir(parents=True)
        unfinished = _unfinished(plan)
        unfinished.write_text(plan_hash)
        _publish(unfinished, plan)


def _shards(source: Source, *, max_documents: int, max_size: int) -> Iterator[list[Part]]:
    """The parts of a source in lists of at most so many documents and bytes, or of one part."""
    shard: list[Part] = []
    documents = size = 0
    for part in source.parts(max_documents=max_documents, max_size=max_size):
        if shard and (documents + part.documents > max_documents or size + part.size > max_size):
            yield shard
            shard, documents, size = [], 0, 0
        shard.append(part)
        documents, size = documents + part.documents, size + part.size
    if shard:
        yield shard


# ------------------------------------------------------------------------- shards in workers


def _complete_shards(
    work: _ShardWork,
    shards: Iterator[list[Part]],
    source: Source,
    *,
    workers: int,
    advance: Callable[[int], None],
) -> int:
    """Make the shards that are missing, as far as `max_bytes` needs them; return how many are in use."""
    ready: set[int] = set()
    frontier = 0
    admission, ignored = Admission(source), ReadReport()
    with closing(_ready_shards(work, shards, workers=workers)) as results:
        for index, parts in results:
            advance(sum(part.size for part in parts))
            ready.add(index)
            while frontier in ready:
                ready.remove(frontier)
                if source.max_bytes is not None:
                    rows = _read_rows(Path(work.directory), frontier)
                    for digest, size in zip(rows.digests, rows.sizes, strict=True):
                        admission.admit(digest.tobytes(), int(size), ignored)
                frontier += 1
                if admission.full:
                    return frontier
    return frontier


def _ready_shards(work: _ShardWork, shards: Iterator[list[Part]], *, workers: int) -> Generator[tuple[int, list[Part]]]:
    """Yield each shard when its files are there, in any order, tokenising those that are not."""
    if workers == 1:
        for index, parts in enumerate(shards):
            if not _rows_path(Path(work.directory), index).exists():
                tokenize_shard(work, index, parts)
            yield index, parts
        return
    # spawn: a fork of a process with torch's threads in it may hang.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_prepare_worker)
    running: dict[Future[None], tuple[int, list[Part]]] = {}
    try:
        for index, parts in enumerate(shards):
            if _rows_path(Path(work.directory), index).exists():
                yield index, parts
                continue
            running[pool.submit(tokenize_shard, work, index, parts)] = index, parts
            if len(running) >= 2 * workers:
                yield from _collect(running)
        while running:
            yield from _collect(running)
    except KeyboardInterrupt:
        logger.warning("stopping: the shards under way are finished first, and all are kept for the next run")
        raise
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process died ({error}). If memory ran out, use fewer workers; if none could start, the "
            'main script must be a file that does its work below `if __name__ == "__main__":`. Finished shards '
            "are kept: run the same command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _collect(running: dict[Future[None], tuple[int, list[Part]]]) -> Iterator[tuple[int, list[Part]]]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        shard = running.pop(future)
        future.result()
        yield shard


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and end when the parent is killed: a pool's worker would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no thread pool in each of many workers
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@lru_cache(maxsize=1)
def _loaded(source: str, tokenizer: str) -> tuple[Source, Tokenizer]:
    return Source.from_config(json.loads(source)), load_tokenizer(json.loads(tokenizer))


def tokenize_shard(work: _ShardWork, index: int, parts: Sequence[Part]) -> None:
    """Read and tokenise one shard: the ids in one file, then the rows, which mark it as finished."""
    source, tokenizer = _loaded(work.source, work.tokenizer)
    if tokenizer.identity != work.tokenizer_identity:
        raise ValueError(f"tokenizer {work.tokenizer} changed while it was in use: run again")
    dtype = ids_type(tokenizer.vocab_size)
    end = np.array([tokenizer.eod], dtype=dtype).tobytes()
    report = ReadReport()
    lengths, sizes, positions = list[int](), list[int](), list[int]()
    digests = bytearray()
    tokens_path = _tokens_path(Path(work.directory), index)
    unfinished = _unfinished(tokens_path)
    with open(unfinished, "wb") as file:
        for batch in _batches(source, parts, report):
            encoded = tokenizer.encode([document.text for document, _ in batch])
            for (document, data), ids in zip(batch, encoded, strict=True):
                file.write(ids.tobytes() + end)
                lengths.append(len(ids) + 1)
                sizes.append(len(data))
                positions.append(split_position(work.seed, document.id))
                digests += document_digest(data)
    _publish(unfinished, tokens_path)
    rows_path = _rows_path(Path(work.directory), index)
    unfinished = _unfinished(rows_path)
    with open(unfinished, "wb") as file:
        np.savez(
            file,
            lengths=np.array(lengths, dtype=np.int64),
            sizes=np.array(sizes, dtype=np.int64),
            positions=np.array(positions, dtype=np.uint64),
            digests=np.frombuffer(digests, dtype=np.uint8).reshape(-1, 16),
            report=np.frombuffer(json.dumps(dataclasses.asdict(report)).encode(), dtype=np.uint8),
        )
    _publish(unfinished, rows_path)


def split_position(seed: int, document_id: str) -> int:
    """Place of a document in [0, 2**64), the same for ever: below `validation_share` of it is validation."""
    name = f"{seed}\0{document_id}".encode(errors="surrogateescape")  # file names need not be UTF-8
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


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


# ----------------------------------------------------------------------------- the last pass


def _select(directory: Path, count: int, source: Source, validation_share: float) -> _Selection:
    """Go through the rows of all shards in order and decide what becomes of each document."""
    kept: list[npt.NDArray[np.bool_]] = []
    validation: list[npt.NDArray[np.bool_]] = []
    admission, report = Admission(source), ReadReport()
    lowest, highest = (1 << 64, 0, 0), (-1, 0, 0)  # position, shard, row
    for shard in range(count):
        rows = _read_rows(directory, shard)
        report.add(rows.report)
        admitted = [
            admission.admit(digest.tobytes(), int(size), report)
            for digest, size in zip(rows.digests, rows.sizes, strict=True)
        ]
        kept.append(np.array(admitted, dtype=np.bool_))
        validation.append(kept[-1] & (rows.positions < np.uint64(int(validation_share * 2**64))))
        for row in np.flatnonzero(kept[-1]):
            here = int(rows.positions[row]), shard, int(row)
            lowest, highest = min(lowest, here), max(highest, here)
    source.finish(report)
    documents = sum(int(flags.sum()) for flags in kept)
    held_out = sum(int(flags.sum()) for flags in validation)
    if documents == 0:
        raise ValueError(f"{source.kind} source: no documents in {report.records} records: {report.summary()}")
    if documents >= 2 and held_out == 0 and validation_share > 0:
        validation[lowest[1]][lowest[2]] = True
    if held_out == documents:
        validation[highest[1]][highest[2]] = False
    return _Selection(kept, validation, report, admission.full)


def _write_splits(prefix: Path, directory: Path, selection: _Selection, tokenizer: Tokenizer) -> dict[str, SplitCounts]:
    """Write the selected documents with Megatron's own writer and put the files in place."""
    # Imports torch, which the workers do without.
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    dtype = ids_type(tokenizer.vocab_size)
    chosen = {
        "train": [kept & ~held for kept, held in zip(selection.kept, selection.validation, strict=True)],
        "valid": selection.validation,
    }
    counts: dict[str, SplitCounts] = {}
    written: dict[Path, Path] = {}
    absent: list[Path] = []
    for split in SPLITS:
        data, index = Path(f"{prefix}_{split}.bin"), Path(f"{prefix}_{split}.idx")
        documents = sum(int(flags.sum()) for flags in chosen[split])
        if documents == 0:  # Megatron cannot open an empty .bin
            counts[split] = SplitCounts()
            absent += [data, index]
            continue
        tokens = text_bytes = 0
        # In the shards' directory, which is removed in the end: a killed run leaves nothing else behind.
        unfinished = {path: _unfinished(directory / path.name) for path in (data, index)}
        builder = IndexedDatasetBuilder(str(unfinished[data]), dtype=dtype)
        for shard, flags in enumerate(chosen[split]):
            rows = _read_rows(directory, shard)
            ends = np.cumsum(rows.lengths)
            stored = _open_tokens(directory, shard, dtype, int(rows.lengths.sum()))
            for row in np.flatnonzero(flags):
                length = int(rows.lengths[row])
                builder.add_document(stored[ends[row] - length : ends[row]], [length])
            tokens += int(rows.lengths[flags].sum())
            text_bytes += int(rows.sizes[flags].sum())
        builder.finalize(str(unfinished[index]))
        written |= unfinished
        counts[split] = SplitCounts(documents=documents, tokens=tokens, text_bytes=text_bytes)
    # An older manifest must not describe the new files, nor old files remain beside the new manifest.
    Path(f"{prefix}.json").unlink(missing_ok=True)
    for path in absent:
        path.unlink(missing_ok=True)
    for path, complete in written.items():
        _publish(complete, path)
    return counts


def _write_manifest(manifest: Manifest, directory: Path) -> None:
    values = dataclasses.asdict(manifest)
    del values["prefix"]
    unfinished = _unfinished(directory / "manifest.json")
    unfinished.write_text(json.dumps({"format_version": FORMAT_VERSION} | values, indent=2) + "\n")
    _publish(unfinished, Path(f"{manifest.prefix}.json"))


def _open_tokens(directory: Path, shard: int, dtype: type[np.uint16 | np.int32], count: int) -> Ids:
    path = _tokens_path(directory, shard)
    if path.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{path} is damaged: remove {directory} and run again")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype)


def _read_rows(directory: Path, shard: int) -> _ShardRows:
    path = _rows_path(directory, shard)
    try:
        with np.load(path) as stored:
            return _ShardRows(
                lengths=stored["lengths"],
                sizes=stored["sizes"],
                positions=stored["positions"],
                digests=stored["digests"],
                report=ReadReport(**json.loads(stored["report"].tobytes())),
            )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}): remove {directory} and run again") from error


# ------------------------------------------------------------------------ files and progress


def _tokens_path(directory: Path, shard: int) -> Path:
    return directory / f"{shard:05d}.tokens"


def _rows_path(directory: Path, shard: int) -> Path:
    return directory / f"{shard:05d}.npz"


def _unfinished(path: Path) -> Path:
    # With the process in its name: a worker that outlives a killed run may still be writing the same shard.
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _publish(unfinished: Path, path: Path) -> None:
    """Give a complete file its name, its content first: a power cut must not leave a named stump."""
    with open(unfinished, "rb") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


class _Progress:
    """A bar over the bytes of input on a terminal, else a line every few seconds."""

    def __init__(self, label: str, total: int, *, enabled: bool) -> None:
        self._label, self._total, self._done = label, total, 0
        self._lines = enabled and not sys.stderr.isatty()
        self._last_line = time.monotonic()
        self._bar = None
        if enabled and not self._lines:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit="B", unit_scale=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._lines:
            self._line("stopped" if kind else "read")

    def advance(self, size: int) -> None:
        """Note that a shard with `size` bytes of input is ready."""
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
        elif self._lines and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._line("reading")

    def _line(self, state: str) -> None:
        done, total = self._done / 1e6, self._total / 1e6
        print(f"{self._label}: {state} {done:.1f} of {total:.1f} MB of input", file=sys.stderr, flush=True)
