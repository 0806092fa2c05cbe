"""Pool of worker processes that end with their parent."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process

from nemo_ext.job.job import JobFailed
from nemo_ext.job.progress import notice


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    # Slurm and containers give a process fewer cores than the machine has; macOS does not report this.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_workers[Item, Result](
    do: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    skip: Callable[[Item], bool] = lambda item: False,
    ordered: bool = False,
) -> Generator[tuple[Item, Result | None]]:
    """Yield each item with the result of `do`, or with None if the item is skipped.

    Args:
        do: function to apply, in spawned processes or, with one worker, in this process.
        skip: function of an item that returns True if the item is done already.
        ordered: whether to yield results in the order of the items rather than as they become ready.

    Raises:
        JobFailed: a worker process died.
    """
    if workers == 1:
        for item in items:
            yield item, None if skip(item) else do(item)
        return
    # spawn, because a fork of a process with torch's threads may hang.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=prepare_worker)
    running: dict[Future[Result], Item] = {}
    try:
        for item in items:
            if skip(item):
                while ordered and running:
                    yield from _collect(running, ordered)
                yield item, None
                continue
            with _without_ctrl_c():
                running[pool.submit(do, item)] = item
            if len(running) >= 2 * workers:
                yield from _collect(running, ordered)
        while running:
            yield from _collect(running, ordered)
    except KeyboardInterrupt:
        notice("stopping once the running shards are finished; all finished shards are kept for the next run")
        raise
    except BrokenProcessPool as error:
        raise JobFailed(
            f"a worker process died ({error}). If memory ran out, use fewer workers; if no worker could start, the "
            'main script must be a file that does its work below `if __name__ == "__main__":`. Finished shards '
            "are kept: run the same command again"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Defer Ctrl-C until the block ends, because a process that is just starting would end with a traceback."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _collect[Item, Result](running: dict[Future[Result], Item], ordered: bool) -> Iterator[tuple[Item, Result]]:
    done = {next(iter(running))} if ordered else wait(running, return_when=FIRST_COMPLETED).done
    for future in done:
        item = running.pop(future)
        yield item, future.result()


def prepare_worker() -> None:
    """Make a worker process ignore Ctrl-C, which its parent handles, and exit when the parent dies.

    Otherwise, a pool's worker would wait for work forever after its parent is killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # No thread pools in workers.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
