"""Corpora and runs of curation."""

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nemo_ext.data.curation.job import run
from nemo_ext.job.config import compose


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes records as a JSONL file and returns its path."""

    def written(records: Iterable[dict[str, Any]], name: str = "raw.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return written


@pytest.fixture
def curate(tmp_path: Path) -> Callable[..., Path]:
    """Runs the job in this process on stages given as their blocks, and returns the output."""

    def curated(source: Path, stages: dict[str, str], *words: str, name: str = "out") -> Path:
        blocks = [f"+curate.blocks.{stage}={block}" for stage, block in stages.items()]
        listed = f"curate.stages=[{','.join(stages)}]"
        run(compose("curate", [f"input={source}", f"output={tmp_path / name}", "workers=1", listed, *blocks, *words]))
        return tmp_path / name

    return curated


@pytest.fixture
def lines() -> Callable[[Path], list[dict[str, Any]]]:
    """A function that gives the records of the compressed files below a folder, in their order."""
    return _lines


def _lines(place: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(place.rglob("*.jsonl.zst")):
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            found += map(json.loads, io.BufferedReader(stream))  # type: ignore[type-var]
    return found
