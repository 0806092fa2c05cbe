"""Output folder that is written in resumable parts and renamed to its final name when complete."""

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
    """Output folder that is being written.

    Attributes:
        path: final path of the folder.
        folder: temporary folder, which holds the files until publication.
        done: mapping from the number of each complete part to its record.
    """

    def __init__(self, path: Path, plan: dict[str, Any]) -> None:
        """Resume from the finished parts of an interrupted run with the same plan, or else start over.

        Only call this inside `only_writer`. The plan is everything that determines the folder's content, as JSON.
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
            for file in self.folder.glob(".*"):  # left by a killed process
                if file.name != LOCK:
                    file.unlink()
            if self.done:
                notice(f"{path}: resuming after {len(self.done)} finished files")
        elif any(file.name != LOCK for file in self.folder.iterdir()):
            notice(f"{path}: starting over, as an interrupted run left files that were made with other settings")
            _empty(self.folder)
        self._write_record()

    def finished(self, part: int, value: object, file: Path) -> None:
        """Record a part as complete, with the record `value`, and start flushing its file to disk in the background."""
        self.done[part] = value
        self._write_record()
        for confirmed in filter(Future.done, self._confirmed):
            confirmed.result()
        self._confirmed.append(self._disk.submit(_sync_or_remove, file))

    def close(self) -> None:
        """Stop flushing files, without waiting for a flush in progress."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    def clear(self) -> None:
        """Remove everything written so far, except the lock; `only_writer` removes the empty folder."""
        _empty(self.folder)

    def _write_record(self) -> None:
        write_text(self.folder / RECORD, json.dumps({"plan": self._plan, "done": self.done}))

    def publish(self, record: dict[str, Any]) -> None:
        """Rename the folder to its final name, and store its provenance, `record`, in it."""
        files = [file for file in self.folder.rglob("*") if file.is_file() and file.name not in (RECORD, LOCK)]
        for confirmed in self._confirmed:
            confirmed.result()
        for file in files:
            _sync(file)
        kept = [file for file in sorted(files) if file.suffix in (".safetensors", ".distcp")]
        sizes = {str(file.relative_to(self.folder)): file.stat().st_size for file in kept}
        (self.folder / LOCK).unlink(missing_ok=True)
        os.replace(self.folder, self.path)
        # Written last: until then the record of the parts, which a resume needs, must survive.
        write_text(self.path / RECORD, json.dumps({**record, "plan": self._plan, "sizes": sizes}, indent=1) + "\n")


def _sync(file: Path) -> None:
    """Flush a file to disk."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def _sync_or_remove(file: Path) -> None:
    """Flush a file to disk; on failure, remove it, because the kernel reports a write error only once."""
    try:
        _sync(file)
    except OSError:
        file.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """Temporary path that a folder has while it is being written."""
    return path.with_name(f".{path.name}.unfinished")


def _empty(folder: Path) -> None:
    """Remove everything except the lock, which this process holds."""
    for file in folder.iterdir():
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name != LOCK:
            file.unlink()


def was_published(path: Path, plan: dict[str, Any]) -> bool:
    """True if a folder holds the complete result of the plan; False if it is missing or empty.

    Raises:
        CheckpointError: the folder holds something else, or files are missing or changed.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    record = _read(path / RECORD)
    if record is not None and record.get("plan") == digest(plan):
        sizes: dict[str, int] = record.get("sizes", {})
        spoilt = [name for name, size in sizes.items() if not has_size(path / name, size)]
        if spoilt:
            raise CheckpointError(
                f"to={path} was complete, but {listed(spoilt)} went missing or changed since: remove the folder and "
                "run the same command again"
            )
        return True
    raise CheckpointError(f"to={path} exists and holds something else: remove it or choose another name")


def has_size(file: Path, size: int) -> bool:
    """True if a file exists and is `size` bytes long."""
    return file.is_file() and file.stat().st_size == size


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Context manager that locks an output folder against other processes, and turns disk errors into clear messages.

    The temporary folder is removed if nothing was written to it.

    Raises:
        CheckpointError: another process is writing the folder, or it cannot be written.
    """
    try:
        unfinished(path).mkdir(parents=True, exist_ok=True)
        with FileLock(unfinished(path) / LOCK, timeout=0):
            try:
                yield
            finally:
                if not any(file.is_file() and file.name not in (LOCK, RECORD) for file in unfinished(path).rglob("*")):
                    shutil.rmtree(unfinished(path), ignore_errors=True)
    except Timeout:
        raise CheckpointError(
            f"to={path} is being written by another process: wait for it, or choose another name"
        ) from None
    except OSError as error:
        advice = "free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "fix the cause"
        raise CheckpointError(
            f"to={path} cannot be written ({error}): {advice} and run the same command again to resume"
        ) from error


def folder_to_make(path: Path) -> Path:
    """Path of an output folder, resolved if it is a link or has no name (such as ".")."""
    return path.resolve() if path.is_symlink() or not path.name else path


def check_target(path: Path) -> None:
    """Reject a target path that the finished folder cannot be renamed to.

    Raises:
        CheckpointError: the path is a mount point.
    """
    if os.path.ismount(path):
        raise CheckpointError(f"to={path} is a mount point, which a rename cannot replace: name a folder inside it")


def check_room(path: Path, needed: int) -> None:
    """Reject an output that is larger than the free disk space; `needed` is its size in bytes.

    Raises:
        CheckpointError: the disk has too little free space; names both sizes.
    """
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed * _HEADROOM:
        raise CheckpointError(
            f"to={path} requires {needed / 1e9:,.1f} GB, but {parent} has {free / 1e9:,.1f} GB free: free disk space, "
            "or choose another disk"
        )


def _read(file: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
