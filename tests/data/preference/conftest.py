"""Small files of generations, and readers of output files."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

Write = Callable[[Path, Iterable[Mapping[str, Any]]], Path]


@pytest.fixture(scope="session")
def jsonl_of() -> Write:
    """Write records as JSONL; returns the path."""

    def write(path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture(scope="session")
def lines_of() -> Callable[[Path], list[dict[str, Any]]]:
    """Read JSONL."""

    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    return read
