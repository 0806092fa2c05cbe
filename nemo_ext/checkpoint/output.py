"""A folder that gets its name when complete, is made in parts, and is resumed where it was interrupted."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nemo_ext.checkpoint.storage import CheckpointError, listed
from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import digest
from nemo_ext.job.progress import notice

RECORD = "conversion.json"
LOCK = ".lock"
_HEADROOM = 1.02


class Output:
    """A folder while it is made.

    Attributes:
        path: final path of the folder.
        folder: unfinished folder, which holds the files until then.
        done: part -> its record, for every complete part.
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        """Begin, or go on with what an interrupted run of the same plan left; call inside `only_writer`.

        Args:
            path: the folder to make.
            plan: everything that decides the folder's content, as JSON.
        """
        self.path = path
        self.folder = unfinished(path)
        self.done: dict[int, Any] = {}
        self._plan = digest(plan)
        self._disk = ThreadPoolExecutor(1)
        self._confirmed: list[Future[None]] = []
        record = _read(self.folder / RECORD)
        if record is not None and record.get("plan") == self._plan:
            self.done = {int(part): value for part, value in record["done"].items()}
            _remove_temporary(self.folder)
            if self.done:
                notice(f"{path}: going on after {len(self.done)} finished parts")
        elif any(file.name != LOCK for file in self.folder.iterdir()):
            notice(f"{path}: what an interrupted run left was made from something else: starting over")
            _empty(self.folder)
        self._write_record()

    def finished(self, part: int, value: object, file: Path) -> None:
        """Record a complete part; meanwhile the disk begins to write its file."""
        self.done[part] = value
        self._write_record()
        for confirmed in filter(Future.done, self._confirmed):
            confirmed.result()
        self._confirmed.append(self._disk.submit(_sync_or_remove, file))

    def close(self) -> None:
        """Begin to wait for no more files."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    def clear(self) -> None:
        """Remove what was begun; the folder itself goes with the lock."""
        _empty(self.folder)

    def _write_record(self) -> None:
        write_text(self.folder / RECORD, json.dumps({"plan": self._plan, "done": self.done}))

    def publish(self, record: dict[str, Any]) -> None:
        """Give the folder its name; `record`, on how it was made, stays in it."""
        files = [file for file in self.folder.rglob("*") if file.is_file() and file.name not in (RECORD, LOCK)]
        for confirmed in self._confirmed:
            confirmed.result()
        for file in files:
            _sync(file)
        kept = [file for file in sorted(files) if file.suffix in (".safetensors", ".distcp")]
        sizes = {str(file.relative_to(self.folder)): file.stat().st_size for file in kept}
        (self.folder / LOCK).unlink(missing_ok=True)
        os.replace(self.folder, self.path)
        # Last: until then the record of the parts stands, with which an interrupted run is resumed.
        write_text(self.path / RECORD, json.dumps({**record, "plan": self._plan, "sizes": sizes}, indent=1) + "\n")


def _sync(file: Path) -> None:
    """Wait until the disk has confirmed a file."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def _sync_or_remove(file: Path) -> None:
    """The same; a file of which the disk does not have all is removed: it tells an error once."""
    try:
        _sync(file)
    except OSError:
        file.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """Path of a folder while it is made."""
    return path.with_name(f".{path.name}.unfinished")


def _empty(folder: Path) -> None:
    """Remove everything but the lock, which this process holds."""
    for file in folder.iterdir():
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name != LOCK:
            file.unlink()


def _remove_temporary(folder: Path) -> None:
    """Remove the temporary files of a killed process, whose names begin with a dot."""
    for file in folder.glob(".*"):
        if file.name != LOCK:
            file.unlink()


def was_published(path: Path, plan: dict[str, Any]) -> bool:
    """True if a folder holds the result of the plan.

    Raises:
        CheckpointError: it holds something else, or no longer all of it.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    record = _read(path / RECORD)
    if record is not None and record.get("plan") == digest(plan):
        sizes: dict[str, int] = record.get("sizes", {})
        spoilt = [name for name, size in sizes.items() if not has_size(path / name, size)]
        if spoilt:
            raise CheckpointError(
                f"to={path}: was made, but since then {listed(spoilt)} went missing or changed: remove the folder and "
                "repeat"
            )
        return True
    raise CheckpointError(f"to={path}: exists and holds something else: remove it or choose another name")


def has_size(file: Path, size: int) -> bool:
    """True if a file exists and has this size in bytes."""
    return file.is_file() and file.stat().st_size == size


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Keep a second process from making the same folder, and turn a full disk into a message.

    If nothing was written, nothing is left behind.

    Raises:
        CheckpointError: another process is at it, or the folder cannot be written.
    """
    try:
        unfinished(path).mkdir(parents=True, exist_ok=True)
        with FileLock(unfinished(path) / LOCK, timeout=0):
            try:
                yield
            finally:
                _remove_if_empty(unfinished(path))
    except Timeout:
        raise CheckpointError(f"to={path}: another process is writing it: wait for it or choose another name") from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "make room and run the same command again, which goes on where it was"
            if full
            else "mend it and run the same command again"
        )
        raise CheckpointError(f"to={path}: {error}: {advice}") from error


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder that holds no files but its lock and its record."""
    if not any(file.is_file() and file.name not in (LOCK, RECORD) for file in folder.rglob("*")):
        shutil.rmtree(folder, ignore_errors=True)


def folder_to_make(path: Path) -> Path:
    """Folder that a path stands for: the target of a link, and "." by its name."""
    return path.resolve() if path.is_symlink() or not path.name else path


def check_target(path: Path) -> None:
    """Refuse a path to which the finished folder could not be renamed.

    Raises:
        CheckpointError: a file system is mounted there.
    """
    if os.path.ismount(path):
        raise CheckpointError(
            f"to={path}: a file system is mounted there, which no rename can replace: name a folder in it"
        )


def check_room(path: Path, needed: int) -> None:
    """Refuse to make more than the disk can hold.

    Raises:
        CheckpointError: the disk has too little room; names both sizes.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed * _HEADROOM:
        raise CheckpointError(
            f"to={path}: needs {needed / 1e9:,.1f} GB, {parent} has {free / 1e9:,.1f} GB: make room, or choose another "
            "disk"
        )


def _read(file: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
