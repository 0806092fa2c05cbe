"""Iterator that reads ahead in a background thread."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor


def read_ahead[T](read: Callable[[int], T], numbers: Sequence[int]) -> Iterator[T]:
    """Yield `read(number)` for each number, reading one item ahead in a thread; the first read starts immediately."""
    pool = ThreadPoolExecutor(1)
    first = [pool.submit(read, number) for number in numbers[:1]]

    def coming() -> Iterator[T]:
        ready: list[Future[T]] = first
        with pool:
            for number in numbers[1:]:
                after = [pool.submit(read, number)]
                yield ready.pop().result()
                ready = after
            for future in ready:
                yield future.result()

    return coming()
