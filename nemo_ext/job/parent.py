"""A process that ends with the one that started it; imports nothing heavy."""

import contextlib
import ctypes


def end_with_parent(number: int) -> None:
    """Makes Linux send this process a signal when the thread that started it ends; does nothing elsewhere."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
