"""Files that get their name when they are complete."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_ext.job.run_directory import only_run_in


def unfinished(path: Path) -> Path:
    """Where to write a file until it is published."""
    # With the process in its name: a worker that outlives a killed run may still be writing the same shard.
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def publish(complete: Path, path: Path) -> None:
    """Give a complete file its name, its content first: a power cut must not leave a named stump."""
    with open(complete, "rb") as file:
        os.fsync(file.fileno())
    os.replace(complete, path)


@contextmanager
def folder_for_one(prefix: Path, work: str) -> Iterator[Path]:
    """A folder for files of a prefix that are not finished, which no other process has; it is removed at the end.

    Args:
        prefix: what the files begin with; what a killed process left of them is removed.
        work: what is done with them, a part of the folder's name.

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
