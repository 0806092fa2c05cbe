"""Handling of interrupts that Python would lose, or that would arrive at an unsafe moment."""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS_UNTIL_AGAIN = 0.05
SECONDS_OF_ONE = 0.5
"""Signals within this time count as one, as a rank receives both its terminal's and its launcher's."""


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Repeat lost interrupts of the main thread until a KeyboardInterrupt gets through.

    Python reports an exception in `__del__`, in a weak reference callback or in an at-fork hook (such as those of
    `logging`) to `sys.unraisablehook` and continues. Only signals lost in this way are repeated, because a second
    signal would end the process at once.
    """
    before, over = sys.unraisablehook, threading.Event()

    def again() -> None:
        if over.wait(SECONDS_UNTIL_AGAIN):
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):  # a shell's background jobs ignore SIGINT
                signal.pthread_kill(threading.main_thread().ident or 0, number)
                return

    def hook(lost: "sys.UnraisableHookArgs") -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
        elif not sys.is_finalizing():
            # From a new thread, as it would be lost again here. threading.Thread takes locks that the interrupted code
            # may hold.
            _thread.start_new_thread(again, ())

    sys.unraisablehook = hook
    try:
        yield
    finally:
        over.set()
        sys.unraisablehook = before


@contextmanager
def signals_to(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call a function for each SIGINT and SIGTERM until the block ends, even if the shell has SIGINT ignored."""
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupts_between() -> Iterator[Callable[[], None]]:
    """Defer the first interrupt until the yielded function is called, or until the block ends.

    A KeyboardInterrupt can leave a thread pool's locks held, so that waiting for the pool never ends. In `torch.save`,
    it can abort the process with SIGABRT. A second interrupt is not deferred.
    """
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number)) and threading.current_thread() is threading.main_thread()
    }
    deferred: list[tuple[int, float]] = []
    delivered = False

    def hold(number: int, frame: FrameType | None) -> None:
        if not deferred:
            deferred.append((number, time.monotonic()))
        elif time.monotonic() - deferred[0][1] > SECONDS_OF_ONE:
            handlers[signal.Signals(number)](number, frame)

    def let_through() -> None:
        nonlocal delivered
        if deferred and not delivered:
            delivered = True
            number, _ = deferred[0]
            handlers[signal.Signals(number)](number, None)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield let_through
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    let_through()
