"""A process that ends with the one that started it, or by it; imports nothing heavy."""

import contextlib
import ctypes
import signal
import subprocess


def end_with_parent(number: int) -> None:
    """Makes Linux send this process a signal when the thread that started it ends; does nothing elsewhere."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def end(process: "subprocess.Popen[bytes]", seconds: float, number: int = signal.SIGTERM) -> int:
    """Ends a process by a signal, or by SIGKILL after so many seconds; returns its exit code."""
    process.send_signal(number)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
