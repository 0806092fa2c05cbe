"""Fixtures that write corpora, run curation on them and read the output."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from nemo_ext.data.curation.job import run
from nemo_ext.job.config import compose
from tests.json_lines import write_jsonl


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Function that writes records to a JSONL file and returns its path."""
    return lambda records, name="raw.jsonl": write_jsonl(tmp_path / name, records)


@pytest.fixture
def curate(tmp_path: Path) -> Callable[..., Path]:
    """Function that runs the job in this process on the given blocks and returns the output folder."""

    def run_job(source: Path, stages: dict[str, str], *words: str, name: str = "out") -> Path:
        blocks = [f"+curate.blocks.{stage}={block}" for stage, block in stages.items()]
        order = f"curate.stages=[{','.join(stages)}]"
        run(compose("curate", [f"input={source}", f"output={tmp_path / name}", "workers=1", order, *blocks, *words]))
        return tmp_path / name

    return run_job


@pytest.fixture
def lines() -> Callable[[Path], list[dict[str, Any]]]:
    """Function that returns the records of all compressed files below a folder, in order."""
    return _lines


def _lines(folder: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.jsonl.zst")):
        with open(path, "rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            records += map(json.loads, io.BufferedReader(stream))  # type: ignore[type-var]
    return records
