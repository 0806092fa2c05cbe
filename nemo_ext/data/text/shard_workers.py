"""Tokenising of the shards of a stream, in this process or in several."""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial

from nemo_ext.data.text.documents import Admission, Part, ReadReport, Source
from nemo_ext.data.text.shards import ShardWork, is_finished, read_rows, tokenize_shard
from nemo_ext.job.workers import in_workers


def complete_shards(
    work: ShardWork,
    shards: Iterator[list[Part]],
    source: Source,
    *,
    workers: int,
    advance: Callable[[int], None],
) -> int:
    """Make the shards that are missing, as far as `max_bytes` needs them; return how many are in use.

    Args:
        advance: Function to call with the input bytes of every shard that is ready.

    Raises:
        RuntimeError: A worker process died.
    """
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
                    rows = read_rows(work.directory, frontier)
                    for digest, size in zip(rows.digests, rows.sizes, strict=True):
                        admission.admit(digest.tobytes(), int(size), ignored)
                frontier += 1
                if admission.full:
                    return frontier
    return frontier


def _ready_shards(work: ShardWork, shards: Iterator[list[Part]], *, workers: int) -> Generator[tuple[int, list[Part]]]:
    """Yield each shard when its files exist, in any order, tokenising those that are missing."""

    def is_there(shard: tuple[int, list[Part]]) -> bool:
        return is_finished(work.directory, shard[0])

    with closing(in_workers(partial(_tokenize, work), enumerate(shards), workers=workers, skip=is_there)) as results:
        for shard, _ in results:
            yield shard


def _tokenize(work: ShardWork, shard: tuple[int, list[Part]]) -> None:
    tokenize_shard(work, *shard)
