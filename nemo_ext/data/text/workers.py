"""Making the shards of a stream, in this process or in several."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing import connection, get_context, parent_process

from nemo_ext.data.text.documents import Admission, Part, ReadReport, Source
from nemo_ext.data.text.shards import ShardWork, is_finished, read_rows, tokenize_shard
from nemo_ext.job.progress import notice


def usable_cores() -> int:
    """How many cores this process may use."""
    # Slurm and containers give a process fewer cores than the machine has; macOS cannot say.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
        advance: Called with the bytes of input of every shard that is ready.

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
    """Yield each shard when its files are there, in any order, tokenising those that are not."""

    def is_there(shard: tuple[int, list[Part]]) -> bool:
        return is_finished(work.directory, shard[0])

    with closing(in_workers(partial(_tokenize, work), enumerate(shards), workers=workers, skip=is_there)) as results:
        for shard, _ in results:
            yield shard


def _tokenize(work: ShardWork, shard: tuple[int, list[Part]]) -> None:
    tokenize_shard(work, *shard)


def in_workers[Item, Result](
    do: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    skip: Callable[[Item], bool] = lambda item: False,
) -> Generator[tuple[Item, Result | None]]:
    """Each item with what `do` makes of it, in any order; what is to be skipped comes with None.

    Args:
        do: what is done, in a process that spawned; with one worker here.
        items: read as they are needed.
        workers: processes.
        skip: whether an item is done already.

    Raises:
        RuntimeError: a worker process died.
    """
    if workers == 1:
        for item in items:
            yield item, None if skip(item) else do(item)
        return
    # spawn: a fork of a process with torch's threads in it may hang.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=prepare_worker)
    running: dict[Future[Result], Item] = {}
    try:
        for item in items:
            if skip(item):
                yield item, None
                continue
            with _without_ctrl_c():
                running[pool.submit(do, item)] = item
            if len(running) >= 2 * workers:
                yield from _collect(running)
        while running:
            yield from _collect(running)
    except KeyboardInterrupt:
        notice("stopping: the shards under way are finished first, and all are kept for the next run")
        raise
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process died ({error}). If memory ran out, use fewer workers; if none could start, the "
            'main script must be a file that does its work below `if __name__ == "__main__":`. Finished shards '
            "are kept: run the same command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Holds Ctrl-C back until the end: a process that is started meanwhile would die of it with a traceback."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _collect[Item, Result](running: dict[Future[Result], Item]) -> Iterator[tuple[Item, Result]]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        item = running.pop(future)
        yield item, future.result()


def prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and end when the parent is killed: a pool's worker would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # no thread pool in each of many workers
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
