"""Reading while what was read before is worked on."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor


def read_ahead[T](read: Callable[[int], T], numbers: Sequence[int]) -> Iterator[T]:
    """What `read` returns for these numbers, read on a thread one ahead, the first from now on."""
    pool = ThreadPoolExecutor(1)
    first = [pool.submit(read, number) for number in numbers[:1]]

    def coming() -> Iterator[T]:
        ready: list[Future[T]] = first
        with pool:
            for number in numbers[1:]:
                after = [pool.submit(read, number)]
                yield ready.pop().result()
                ready = after
            for each in ready:
                yield each.result()

    return coming()
