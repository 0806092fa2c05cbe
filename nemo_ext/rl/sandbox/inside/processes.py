"""Measures the total usage of all of a program's processes, and kills them."""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_ext.rl.sandbox.inside.confinement import Confinement, become

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Usage:
    """Total usage of a program's processes: their number, and resident memory in bytes."""

    processes: int = 0
    memory: int = 0


def usage(confinement: Confinement) -> Usage:
    """Return the usage of all running processes that a program has started; zeros if there is no /proc."""
    total = Usage()
    if not confinement.has_proc:
        return total
    for process in _members(confinement):
        with contextlib.suppress(OSError), open(f"/proc/{process}/statm") as opened:
            total.memory += int(opened.read().split()[1]) * _PAGE
            total.processes += 1
    return total


def end(confinement: Confinement) -> None:
    """Kill all processes that a program has started, and wait for them, so that no zombies are left."""
    send(confinement, signal.SIGKILL)
    if confinement.namespaces:
        _reap(seconds=None)
        return
    deadline = time.monotonic() + 10
    while members := _members(confinement):
        # Stopped first, so that none can start another in the meantime.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            _send_each(members, number)
        _reap(seconds=0.05)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {members} are still running 10 s after SIGKILL")
    _reap(seconds=0.05)


def send(confinement: Confinement, number: int) -> None:
    """Send the signal with this number to all processes that a program has started."""
    if confinement.namespaces:
        # Sent by process 1 of a namespace, this reaches all other processes in it and none outside.
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, number)
    elif confinement.user is not None:
        _send_all_of(confinement.user, number)
    else:
        _send_each(_members(confinement), number)


def _send_each(members: Iterable[int], number: int) -> None:
    for process in members:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _send_all_of(user: int, number: int) -> None:
    """Signal all processes of a user in one call, made as that user so that no others are signalled."""
    child = os.fork()
    if not child:
        with contextlib.suppress(OSError):
            become(user)
            os.kill(-1, number)
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _reap(seconds: float | None) -> None:
    """Reap ended children until none are left, for about `seconds` seconds at most; without a limit if None."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        try:
            process, _ = os.waitpid(-1, 0 if deadline is None else os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(0.001)


def _members(confinement: Confinement) -> list[int]:
    """Return the IDs of all other processes in the namespace or, without namespaces, of all running descendants."""
    here = os.getpid()
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if confinement.namespaces:
        return [number for number in numbers if number != here]
    children: dict[int, list[int]] = {}
    for number in numbers:
        with contextlib.suppress(OSError), open(f"/proc/{number}/stat", "rb") as opened:
            # The name in front may contain anything, even parentheses and spaces.
            state, parent = opened.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(number)
    descendants, pending = [], [here]
    while pending:
        below = children.get(pending.pop(), [])
        descendants += below
        pending += below
    return descendants


def bytes_on_disk(directory: str, most: int) -> int:
    """Count the bytes on disk below a directory, stopping once it exceeds `most`; each file or folder adds a page."""
    total, pending = 0, [directory]
    while pending and total <= most:
        with contextlib.suppress(OSError):
            for entry in os.scandir(pending.pop()):
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512 + _PAGE
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
    return total
