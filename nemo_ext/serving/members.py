"""Discovery of an endpoint's replicas through their `endpoint.json`, which each replica touches while it answers.

These files are the only registry, on one machine and on a cluster. A replica counts as alive only once the watcher has
seen a touch, timed by the watcher's own clock, because files of earlier runs are never touched again.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from nemo_ext.endpoint.address import FILE, Address, read_address, write_address

FOLDER = "replicas"
_BEAT, _LOST = 2.0, 15.0
"""Seconds between touches, and seconds without a touch after which a replica counts as gone."""


@contextmanager
def present(run_dir: Path, address: Address, lives: Callable[[], bool]) -> Iterator[Path]:
    """Write an address to a file, touch it as long as `lives` returns True, and remove it at the end of the block.

    A file that another process has replaced is not touched or removed; a missing file is written again.
    """
    file = run_dir / FILE
    write_address(file, address)
    own, ended = file.stat().st_ino, threading.Event()

    def is_own() -> bool:
        try:
            return file.stat().st_ino == own
        except FileNotFoundError:
            return False

    def beat() -> None:
        nonlocal own
        while not ended.wait(_BEAT):
            if not lives():
                continue
            with contextlib.suppress(OSError):
                if not file.exists():
                    write_address(file, address)
                    own = file.stat().st_ino
                if is_own():
                    os.utime(file)

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield file
    finally:
        ended.set()
        beating.join()
        if is_own():
            file.unlink(missing_ok=True)


class Watch:
    """Watcher of a run's replicas, from which a balancer learns which of them are alive."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self._seen: dict[str, tuple[int, float, bool]] = {}

    def living(self) -> Mapping[str, Address]:
        """Return a mapping from name to address of the replicas that are alive."""
        now, addresses = time.monotonic(), dict[str, Address]()
        for file in sorted(self.folder.glob(f"*/{FILE}")):
            name = file.parent.name
            try:
                touched = file.stat().st_mtime_ns
                before, since, lives = self._seen.get(name, (touched, now, False))
                if touched != before:
                    since, lives = now, True
                self._seen[name] = touched, since, lives
                if lives and now - since < _LOST:
                    addresses[name] = read_address(file)
            except (FileNotFoundError, ValueError):
                continue  # the replica is being removed
        return addresses
