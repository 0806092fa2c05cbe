"""Leases on units of work for workers on several nodes that share a folder, with detection of dead workers.

A lease is a file that its holder touches regularly. As the nodes' clocks may differ, each worker uses its own
clock to measure how long a file has not been touched. Two workers may briefly hold the same lease, which must be
harmless.
"""

import contextlib
import json
import os
import platform
import time
import uuid
from pathlib import Path

import psutil

_CLOCK = 300.0
"""Seconds by which a process's start time may appear to change, as the system clock may be adjusted."""


class Leases:
    """Leases in a folder, as seen by one worker.

    Args:
        seconds: time in seconds after which a lease that has not been touched is free.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self._held: set[str] = set()
        self._seen: dict[str, tuple[int, float]] = {}
        self._me = {
            "id": uuid.uuid4().hex,
            "place": _place(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
        }

    def take(self, name: str) -> bool:
        """Take a lease if it is free, and return True; return False if another worker holds it."""
        file = self.folder / name
        if file.exists():
            if not self._lost(file):
                return False
            aside = self.folder / f".{name}.{uuid.uuid4().hex}"
            with contextlib.suppress(FileNotFoundError):  # another worker took it
                file.rename(aside)
                aside.unlink()
        try:
            with open(file, "x") as new:
                new.write(json.dumps(self._me))
        except FileExistsError:
            return False
        self._held.add(name)
        return True

    def holds(self, name: str) -> bool:
        """True if this worker holds the lease."""
        return name in self._held

    def touch(self) -> None:
        """Touch all of this worker's leases, to show that it is alive."""
        for name in list(self._held):
            if self._is_ours(name):
                os.utime(self.folder / name)
            else:  # taken from us while we were stopped
                self._held.discard(name)

    def drop(self, name: str) -> None:
        """Release a lease."""
        if name in self._held and self._is_ours(name):
            (self.folder / name).unlink(missing_ok=True)
        self._held.discard(name)

    def _is_ours(self, name: str) -> bool:
        try:
            return bool(json.loads((self.folder / name).read_text())["id"] == self._me["id"])
        except (OSError, ValueError, LookupError):
            return False

    def _lost(self, file: Path) -> bool:
        try:
            touched = file.stat().st_mtime_ns
            holder = json.loads(file.read_text() or "{}")
        except (FileNotFoundError, ValueError):
            return False
        if holder.get("place") == self._me["place"] and not _runs(holder):
            return True
        before, since = self._seen.get(file.name, (None, 0.0))
        if before != touched:
            self._seen[file.name] = touched, time.monotonic()
            return False
        return time.monotonic() - since > self.seconds


def _place() -> str:
    """Name of this machine and process namespace, as containers number their processes separately."""
    try:
        return f"{platform.node()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _runs(holder: dict[str, float]) -> bool:
    """Return whether the process that took a lease on this machine still runs; `holder` has its pid and start time."""
    try:
        return abs(psutil.Process(int(holder["pid"])).create_time() - holder["started"]) < _CLOCK
    except (psutil.NoSuchProcess, KeyError):
        return False
