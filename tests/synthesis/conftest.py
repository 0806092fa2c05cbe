"""Recipes with stand-in endpoints that answer by rules."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

QUICK = ("synthesize.patience=1", "synthesize.attempt_seconds=20", "synthesize.attempts=2")
Rule = Callable[[str, Mapping[str, Any]], Any]
"""A model's answer to the last message of a request: text, or a message with `reasoning_content` or `tool_calls`."""


@dataclass(frozen=True)
class Output:
    """Output folder of a finished run."""

    folder: Path

    @property
    def steps(self) -> dict[str, Any]:
        """Counts of each step, from report.json."""
        steps: dict[str, Any] = json.loads((self.folder / "report.json").read_text())["steps"]
        return steps

    def records(self, name: str) -> list[dict[str, Any]]:
        """Records of an output file."""
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]


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

    return Output(tmp_path / "out").records


@pytest.fixture
def report(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """report.json of the output."""
    return lambda: json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.fixture
def run_recipe(
    tmp_path: Path, model: Callable[..., Any], written: Callable[..., Path], synthesize: Callable[..., Any]
) -> Callable[..., Output]:
    """Runs a recipe on rows with a rule (or an endpoint of `model`) for all roles, or a mapping with one per role."""

    def run(recipe: str, rows: Sequence[Mapping[str, Any]], models: Any, *words: str) -> Output:
        endpoints = []
        for role, rule in (models if isinstance(models, dict) else {"": models}).items():
            served = rule if hasattr(rule, "url") else model(rule)
            endpoints.append(f"{role and f'roles.{role}.'}endpoint={served.url}")
        code, output = synthesize(f"recipe={recipe}", f"input={written(rows)}", *endpoints, *words)
        assert code == 0, output
        return Output(tmp_path / "out")

    return run
