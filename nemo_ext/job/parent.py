"""Termination of child processes, with or by their parent; has no heavy imports."""

import contextlib
import ctypes
import signal
import subprocess


def end_with_parent(number: int) -> None:
    """Make Linux send this process a signal when the thread that started it ends; do nothing on other systems."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def end(process: "subprocess.Popen[bytes]", seconds: float, number: int = signal.SIGTERM) -> int:
    """End a process with a signal, or with SIGKILL if it is still running after `seconds`, and return its exit code."""
    process.send_signal(number)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
