"""Recipes with stand-in endpoints that answer by rules."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

QUICK = ("synthesize.patience=1", "synthesize.attempt_seconds=20", "synthesize.attempts=2")
Rule = Callable[[str, Mapping[str, Any]], Any]
"""A model's answer to the last message of a request: text, or a message with `reasoning_content` or `tool_calls`."""


@pytest.fixture
def model(endpoints: Callable[[], Any], reply: type[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts an endpoint whose model answers by a rule, with a back-off of hundredths of a second."""
    monkeypatch.setattr("nemo_ext.endpoint.client._FIRST_WAIT", 0.01)

    def start(rule: Rule, name: str = "m") -> Any:
        served = endpoints()
        served.models = [name]

        def answer(payload: Mapping[str, Any]) -> Any:
            asked = payload["messages"][-1]["content"] if "messages" in payload else payload["prompt"]
            said = rule(asked, payload)
            if not isinstance(said, str | Mapping):
                return said
            message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
            ended = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
            usage = {"prompt_tokens": len(asked.split()), "completion_tokens": len(str(message).split())}
            body = {"choices": [{"message": message, "finish_reason": ended}], "usage": usage}
            return reply(body=json.dumps(body).encode())

        served.reply = answer
        return served

    return start


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines; returns the file."""

    def write(rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return file

    return write


@pytest.fixture
def synthesize(tmp_path: Path, command: Callable[..., Any], kept_workers: None) -> Callable[..., tuple[int, str]]:
    """`nemo-ext synthesize` in this process; returns its exit code and output."""

    def run(*words: str) -> tuple[int, str]:
        options_last = sorted([f"output={tmp_path / 'out'}", *QUICK, *words], key=lambda word: word.startswith("--"))
        code, out, err = command("synthesize", *options_last)
        return code, out + err

    return run


@pytest.fixture
def records(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Records of an output file."""

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()]

    return read


@pytest.fixture
def report(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """report.json of the output."""
    return lambda: json.loads((tmp_path / "out" / "report.json").read_text())
