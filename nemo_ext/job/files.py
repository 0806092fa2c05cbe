"""Files that are renamed when complete, and folders that only one process writes to at a time."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

A_DAY = 86400.0
"""Seconds for which jobs that share a folder wait for its lock."""
_MEBIBYTE = 1 << 20
_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing|inline_container.*unexpected pos"
)
"""Pattern of error messages, including torch's, of writes that fail because the disk is full."""


def no_room(place: Path, error: str = "") -> str:
    """Message if the disk of a folder is full, or if the error message `error` reports a full disk; "" otherwise.

    For a folder that does not exist yet, the nearest existing parent is checked.
    """
    there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    has = os.statvfs(there)
    if has.f_files and not has.f_favail:
        return f"no inode left in {place}"
    if has.f_bavail * has.f_frsize < _MEBIBYTE:
        return f"no space left in {place}"
    line = next((line.strip() for line in error.splitlines() if _FULL.search(line)), "")
    return line and f"no space left: {line}"  # possibly on another disk, such as a cache's


@contextmanager
def only_run_in(directory: Path, key: str = "run_dir", *, wait: float = 0.0) -> Iterator[None]:
    """Create a directory and lock it against other runs, waiting for a run that holds the lock.

    Args:
        key: config key that sets the directory, for messages.
        wait: maximum time to wait for the lock, in seconds.

    Raises:
        ValueError: another run is using the directory, or it cannot be written.
    """
    lock = FileLock(directory / ".lock")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait)
    except Timeout:
        raise ValueError(f"{directory}: another run is using this directory; wait for it or choose {key}=...") from None
    except OSError as error:
        raise ValueError(f"{key}={directory}: {error.strerror}; choose a writable directory") from error
    with lock:
        yield


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it, so that no reader sees a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished(path)
    temporary.write_text(text)
    temporary.replace(path)


def unfinished(path: Path) -> Path:
    """Temporary path that a file has until it is published."""
    # The name contains the process id, as a worker that outlives a killed run may still write the same shard.
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def publish(complete: Path, path: Path) -> None:
    """Flush a complete file to disk, then rename it, so that a power failure cannot leave a truncated file."""
    with open(complete, "rb") as file:
        os.fsync(file.fileno())
    os.replace(complete, path)


@contextmanager
def complete_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file for writing under a temporary name; it is renamed at the end, or removed after an error."""
    try:
        with open(unfinished(path), "wb") as file:
            yield file
    except BaseException:
        unfinished(path).unlink(missing_ok=True)
        raise
    publish(unfinished(path), path)


@contextmanager
def folder_for_one(prefix: Path, work: str) -> Iterator[Path]:
    """Create a folder for a path prefix's unfinished files, lock it against other processes, and remove it at the end.

    Files left by a killed process are removed first. `work` becomes part of the folder's name.

    Raises:
        ValueError: another process is using the folder, or it cannot be written.
    """
    folder = prefix.with_name(f".{prefix.name}.{work}")
    with only_run_in(folder, "prefix"):
        for left in folder.glob(f"{prefix.name}*"):
            left.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
