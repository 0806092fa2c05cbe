"""Files of JSON lines, and the data that NeMo Gym ships."""

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def gym_data(server: str) -> Path:
    """Folder of one of Gym's servers with its examples; the test is skipped without Gym."""
    found = find_spec("resources_servers")
    if found is None or not found.submodule_search_locations:
        pytest.skip("nemo-gym is not installed")
    return Path(next(iter(found.submodule_search_locations))) / server / "data"
