"""Interrupts that Python would lose, or that would break what they land in."""

import _thread
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SECONDS_UNTIL_AGAIN = 0.05


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
    """Holds a first SIGINT back until the function that it yields is called, or until the end.

    A KeyboardInterrupt in the middle of a thread pool's locks leaves them taken, and the pool is waited for for ever;
    where `torch.save` opens or closes its archive it ends the process with SIGABRT. A second SIGINT is not held back.
    """
    before, held = signal.getsignal(signal.SIGINT), False
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal held
        held = not held
        if not held:
            before(number, frame)

    def let_through() -> None:
        nonlocal held
        if held:
            held = False
            before(signal.SIGINT, None)

    signal.signal(signal.SIGINT, hold)
    try:
        yield let_through
    finally:
        signal.signal(signal.SIGINT, before)
    let_through()
