"""Batch jobs with a stand-in endpoint, whose answers depend only on the request."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.data.text.user_files import pyarrow_module

REFUSED = "refuse me"
QUICK = ("generate.patience=1", "generate.attempt_seconds=20")


def answer_to(payload: Mapping[str, Any], reply: type[Any]) -> Any:
    """An answer derived from the request's content, or HTTP 400 for content that is refused."""
    asked = json.dumps([payload.get("messages"), payload.get("prompt"), payload.get("seed")])
    if REFUSED in asked:
        return reply(status=400, body=b'{"error": {"message": "refused for its content"}}')
    text = hashlib.sha256(asked.encode()).hexdigest()[:16]
    choice = {"message": {"role": "assistant", "content": text}, "text": text, "finish_reason": "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": len(text)}
    return reply(body=json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode())


@pytest.fixture
def answering(endpoint: Any, reply: type[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The endpoint with one model, `m`, and a back-off of hundredths of a second."""
    monkeypatch.setattr("nemo_ext.endpoint.client._FIRST_WAIT", 0.01)
    endpoint.models = ["m"]
    endpoint.reply = lambda payload: answer_to(payload, reply)
    return endpoint


@pytest.fixture
def generate(answering: Any, tmp_path: Path, command: Callable[..., Any]) -> Callable[..., tuple[int, str]]:
    """`nemo-ext generate` in this process; returns its exit code and output."""

    def run(*words: str) -> tuple[int, str]:
        places = [f"endpoint={answering.url}", f"output={tmp_path / 'answers'}"]
        code, out, err = command("generate", *places, *QUICK, *words)
        return code, out + err

    return run


@pytest.fixture
def answers(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """All answers of an output in order, without `seconds`."""

    def read(folder: Path = tmp_path / "answers") -> list[dict[str, Any]]:
        parquet, rows = pyarrow_module().parquet, list[dict[str, Any]]()
        for part in sorted(folder.glob("part-*.parquet")):
            rows += parquet.read_table(part).to_pylist()
        for row in rows:
            del row["seconds"]
        return rows

    return read
