from collections.abc import Callable
from pathlib import Path

import pytest

from tests.json_lines import write_jsonl


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_ext.endpoint.client._FIRST_WAIT", 0.01)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Function that writes records to a file in the test's folder."""
    return lambda name, records: write_jsonl(tmp_path / name, records)
