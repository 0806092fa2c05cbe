"""Files that get their name when they are complete."""

import os
from pathlib import Path


def unfinished(path: Path) -> Path:
    """Where to write a file until it is published."""
    # With the process in its name: a worker that outlives a killed run may still be writing the same shard.
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def publish(complete: Path, path: Path) -> None:
    """Give a complete file its name, its content first: a power cut must not leave a named stump."""
    with open(complete, "rb") as file:
        os.fsync(file.fileno())
    os.replace(complete, path)
