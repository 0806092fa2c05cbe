"""Tokenisation of text into Megatron's .bin/.idx files, in parallel and resumable.

A stream is cut into shards, lists of parts of its source. Workers tokenise shards into `<prefix>.shards/`; then one
process writes them in order to `<prefix>_train` and `<prefix>_valid`. Decisions that depend on several documents
(duplicates, `max_bytes`, the split) are made in this last pass, so the files are byte-identical for any number of
workers and interruptions. Each file gets its final name only when it is complete; the manifest `<prefix>.json` comes
last. A second run that would write the same prefix at the same time is rejected.
"""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from nemo_ext.data.streams import Blend, Stream, read_blend
from nemo_ext.data.text.documents import Source, cut
from nemo_ext.data.text.indexed_dataset import ids_type
from nemo_ext.data.text.manifest import FORMAT_VERSION, Manifest, finished_manifest, write_manifest
from nemo_ext.data.text.shards import ShardWork, complete_shards, open_shards
from nemo_ext.data.text.splits import select, write_splits
from nemo_ext.data.text.tokenizers import Tokenizer
from nemo_ext.job.files import folder_for_one
from nemo_ext.job.made_of import digest
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.settings import checked_share, checked_whole
from nemo_ext.job.workers import usable_cores

_NO_LIMIT = sys.maxsize


def tokenize_blend(
    config: Mapping[str, object],
    *,
    workers: int | None = None,
    progress: bool = True,
    tokenizer_key: str = "data.tokenizer",
) -> list[Manifest]:
    """Tokenise all streams of a blend that have a source, after checking all of them.

    Args:
        config: A blend; see `read_blend`.
        workers: Number of processes; overrides the config's.
        progress: True to show progress on stderr: a bar on a terminal, occasional lines elsewhere.

    Returns:
        Manifests of the streams that have a source, in the blend's order.

    Raises:
        ValueError: `config` is invalid (before any work), input cannot be read to its end, or output cannot be written.
        JobFailed: A worker process died.
    """
    try:
        blend = read_blend(config if workers is None else {**config, "workers": workers}, tokenizer_key)
    except OSError as error:
        raise ValueError(f"the input cannot be read ({error}): correct the cause and rerun the same command") from error
    manifests = []
    for stream in blend.streams:
        try:
            manifests.append(_tokenize(stream, blend, progress=progress))
        except OSError as error:  # such as a full disk or missing permissions, which the user can correct
            raise ValueError(
                f"tokenising {stream.prefix} failed ({error}): correct the cause; the same command resumes"
            ) from error
    return manifests


def tokenize_stream(
    source: Source,
    tokenizer: Tokenizer,
    output_prefix: str | Path,
    *,
    validation_share: float = 0.05,
    seed: int = 1234,
    workers: int | None = None,
    documents_per_shard: int = _NO_LIMIT,
    progress: bool = True,
) -> Manifest:
    """Write `<output_prefix>_train.{bin,idx}`, `_valid.{bin,idx}` and the manifest `<output_prefix>.json`.

    After an interruption, the same call resumes with the missing shards; if the stream is finished, it only returns the
    manifest. With other settings or input files it starts over, with a notice; files written with a different
    tokenizer are rejected.

    A document goes to validation if a hash of (seed, document id) falls below `validation_share`; a stream of two or
    more documents has at least one in each split, unless the share is 0. Every document ends with eod.

    Args:
        workers: Number of processes (None: one per core this process may use). With 1, no processes are started; more
            require a main module that can be imported (`if __name__ == "__main__":`).
        documents_per_shard: Maximum number of documents per shard; by default, shards are cut by size, into about 64.
            It determines how much work an interruption loses, but does not affect the files.
        progress: True to show progress on stderr: a bar on a terminal, occasional lines elsewhere.

    Raises:
        ValueError: A setting is invalid, or the source cannot be read, is malformed or has no documents.
        JobFailed: A worker process died.
    """
    prefix = Path(output_prefix)
    stream = Stream(name=prefix.name, prefix=prefix, source=source, inputs=source.check())
    blend = Blend(
        streams=[stream],
        tokenizer=tokenizer,
        validation_share=checked_share("validation_share", validation_share, below_one=True),
        seed=checked_whole("seed", seed),
        workers=None if workers is None else checked_whole("workers", workers, least=1),
    )
    documents = checked_whole("documents_per_shard", documents_per_shard, least=1)
    return _tokenize(stream, blend, documents_per_shard=documents, progress=progress)


def _tokenize(stream: Stream, blend: Blend, *, documents_per_shard: int = _NO_LIMIT, progress: bool = True) -> Manifest:
    prefix, source, tokenizer = stream.prefix, stream.source, blend.tokenizer
    fingerprint = source.fingerprint(stream.inputs)
    config_hash = _hash(
        {
            "format_version": FORMAT_VERSION,
            "source": source.describe(),
            "input_files": fingerprint,
            "tokenizer": tokenizer.identity,
            "validation_share": blend.validation_share,
            "seed": blend.seed,
        }
    )
    directory = Path(f"{prefix}.shards")
    finished = finished_manifest(prefix, config_hash, tokenizer.identity)
    if finished is not None:
        shutil.rmtree(directory, ignore_errors=True)
        notice(f"{stream.name}: already tokenised: {finished.contents()}")
        return finished

    with folder_for_one(prefix, "tokenising"):
        total = sum(path.stat().st_size for _, path in stream.inputs)
        size = total if source.max_bytes is None else min(total, source.max_bytes)
        shard_size = min(max(size // 64, 1 << 20), 1 << 28)
        resumed = directory.exists()
        open_shards(directory, _hash([config_hash, documents_per_shard, shard_size]))
        work = ShardWork(
            source=json.dumps(source.describe()),
            tokenizer=json.dumps(tokenizer.describe()),
            tokenizer_identity=tokenizer.identity,
            seed=blend.seed,
            directory=directory,
        )
        shards = cut({stream.name: source}, max_documents=documents_per_shard, max_size=shard_size)
        try:
            workers, shown = blend.workers or usable_cores(), total if progress else None
            count = complete_shards(work, shards, source, workers=workers, label=f"{stream.name}: reading", total=shown)
            if source.fingerprint(source.inputs()) != fingerprint:
                raise ValueError(
                    f"input files of {prefix} changed while they were read: run the same command again once they are "
                    "complete"
                )
            selection = select(directory, count, source, blend.validation_share)
        except ValueError:  # the input was refused: once it is corrected, these shards no longer match it
            if not resumed:
                shutil.rmtree(directory, ignore_errors=True)
            raise
        with progress_of(f"{stream.name}: writing", selection.size, enabled=progress) as advance:
            splits = write_splits(prefix, directory, selection, tokenizer.vocab_size, advance=advance)
        manifest = Manifest(
            prefix=str(prefix),
            config_hash=config_hash,
            source=json.loads(work.source),
            tokenizer=json.loads(work.tokenizer),
            tokenizer_identity=tokenizer.identity,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            dtype=ids_type(tokenizer.vocab_size).__name__,
            validation_share=blend.validation_share,
            seed=blend.seed,
            splits=splits,
            report=selection.report,
            reached_max_bytes=selection.full,
        )
        write_manifest(manifest, directory)
        shutil.rmtree(directory, ignore_errors=True)
    notice(f"{stream.name}: {manifest.contents()}{manifest.skipped()}; {manifest.where()}")
    return manifest


def _hash(settings: object) -> str:
    return digest(settings)[:16]
