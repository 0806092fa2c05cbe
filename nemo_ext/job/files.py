"""Files that get their name when complete, and folders that one process at a time writes in."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

_MEBIBYTE = 1 << 20
_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing|inline_container.*unexpected pos"
)
"""Parts of the errors of a write to a full disk, torch's too."""


def no_room(place: Path, error: str = "") -> str:
    """What a file system lacks for more files in a folder, or a full disk in an error's text; "" for neither.

    A folder that is not there yet has the file system of the one above it.
    """
    there = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    has = os.statvfs(there)
    if has.f_files and not has.f_favail:
        return f"no inode left in {place}"
    if has.f_bavail * has.f_frsize < _MEBIBYTE:
        return f"no space left in {place}"
    line = next((line.strip() for line in error.splitlines() if _FULL.search(line)), "")
    return line and f"no space left: {line}"  # perhaps on another disk, such as that of a cache


@contextmanager
def only_run_in(directory: Path, key: str = "run_dir", *, wait: float = 0.0) -> Iterator[None]:
    """Makes the directory and keeps a second run out of it while this one lives, after waiting for the first.

    `key` is the config key by which the user chose the directory, for messages; `wait` is in seconds.

    Raises:
        ValueError: another run is in it, or it cannot be written.
    """
    lock = FileLock(directory / ".lock")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait)
    except Timeout:
        raise ValueError(f"{directory}: another run is using this directory; wait for it or choose {key}=...") from None
    except OSError as error:
        raise ValueError(f"{key}={directory}: {error.strerror}; choose a directory that can be written") from error
    with lock:
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished(path)
    temporary.write_text(text)
    temporary.replace(path)


def unfinished(path: Path) -> Path:
    """Path under which a file is written until it is published."""
    # With the process in its name: a worker that outlives a killed run may still be writing the same shard.
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def publish(complete: Path, path: Path) -> None:
    """Sync a complete file to disk, then give it its name: a power cut must not leave a named stump."""
    with open(complete, "rb") as file:
        os.fsync(file.fileno())
    os.replace(complete, path)


@contextmanager
def complete_file(path: Path) -> Iterator[IO[bytes]]:
    """File open for writing bytes, which gets its name at the end; what was written is removed after an error."""
    try:
        with open(unfinished(path), "wb") as file:
            yield file
    except BaseException:
        unfinished(path).unlink(missing_ok=True)
        raise
    publish(unfinished(path), path)


@contextmanager
def folder_for_one(prefix: Path, work: str) -> Iterator[Path]:
    """Folder for unfinished files of a path prefix, held by one process at a time and removed at the end.

    What a killed process left of them is removed; `work` is a part of the folder's name.

    Raises:
        ValueError: another process has it, or it cannot be written.
    """
    folder = prefix.with_name(f".{prefix.name}.{work}")
    with only_run_in(folder, "prefix"):
        for left in folder.glob(f"{prefix.name}*"):
            left.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
