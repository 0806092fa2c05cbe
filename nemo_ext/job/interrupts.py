"""Interrupts that Python would lose, or that would break what they land in."""

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
"""A signal within this time after another is the same one: a rank has it from the terminal and from its launcher."""


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Interrupts the main thread again until a KeyboardInterrupt gets through.

    An exception in `__del__`, in a callback of a weak reference or in an at-fork hook, such as those of `logging`, ends
    there: Python reports it to `sys.unraisablehook` and goes on. No signal is repeated that was not lost so, because a
    second one means to end at once.
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
            # Later, as it would be lost here again; threading.Thread takes locks that what was interrupted may hold.
            _thread.start_new_thread(again, ())

    sys.unraisablehook = hook
    try:
        yield
    finally:
        over.set()
        sys.unraisablehook = before


@contextmanager
def interrupts_between() -> Iterator[Callable[[], None]]:
    """Holds a first interrupt back until the function that it yields is called, or until the end.

    A KeyboardInterrupt in the middle of a thread pool's locks leaves them taken, and the pool is waited for for ever;
    where `torch.save` opens or closes its archive it ends the process with SIGABRT. A second one is not held back.
    """
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(number)) and threading.current_thread() is threading.main_thread()
    }
    came: list[tuple[int, float]] = []
    told = False

    def hold(number: int, frame: FrameType | None) -> None:
        if not came:
            came.append((number, time.monotonic()))
        elif time.monotonic() - came[0][1] > SECONDS_OF_ONE:
            handlers[signal.Signals(number)](number, frame)

    def let_through() -> None:
        nonlocal told
        if came and not told:
            told = True
            number, _ = came[0]
            handlers[signal.Signals(number)](number, None)

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield let_through
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    let_through()
