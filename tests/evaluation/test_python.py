"""`evaluate.python`: a scripted model at an endpoint computes with Python, and the report counts its calls."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.response import Response
from nemo_ext.evaluation.store import Store
from nemo_ext.rl.sandbox.isolation import SandboxError
from nemo_ext.rl.verifiers import math
from nemo_ext.rl.worlds.python_tool import TOOL

Evaluate = Callable[..., tuple[int, str]]
Read = Callable[..., dict[str, Any]]
Suite = Callable[..., Path]


def calls(code: str) -> dict[str, Any]:
    function = {"name": TOOL.name, "arguments": json.dumps({"code": code})}
    return {"content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def scripted(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Add the numbers of the question in two calls; odd questions begin with an error, and one needs no call."""
    outputs = [message["content"] for message in payload["messages"] if message["role"] == "tool"]
    first, second = map(int, re.findall(r"(\d+) \+ (\d+)", payload["messages"][0]["content"])[0])
    script = [*["1 / 0"] * (first % 2), f"x = {first}", f"x + {second}"]
    if first == 0 or len(outputs) == len(script):
        return {"content": f"\\boxed{{{outputs[-1] if outputs else 0}}}"}
    return calls(script[len(outputs)])


@pytest.fixture
def computing(answering: Any, reply: type[Any]) -> Any:
    """The endpoint with the scripted model."""

    def answer(payload: Mapping[str, Any]) -> Any:
        assert payload["tools"] == [TOOL.schema]
        message = {"role": "assistant", **scripted(payload)}
        usage = {"prompt_tokens": 7, "completion_tokens": 5}
        choice = {"message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        return reply(body=json.dumps({"choices": [choice], "usage": usage}).encode())

    answering.reply = answer
    return answering


def test_answers_with_python_are_scored_and_their_calls_counted(
    evaluate: Evaluate, results: Read, suite: Suite, computing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        f"suite={suite(rows=4)}",
        "evaluate.python={max_calls: 4}",
        "evaluate.judge={endpoint: http://none, model: m}",
    )
    code, output = evaluate(*words)

    assert code == 0, output
    found = results()["benchmarks"]["sums"]
    assert (found["accuracy"], found["environment"]) == (1, "python_tool")
    assert found["calls"] == pytest.approx((0 + 3 + 2 + 3) / 4) and found["failed_calls"] == pytest.approx(2 / 8)
    assert "| sums | python_tool | 100.0%" in (tmp_path / "run" / "report.md").read_text()
    roles = [[turn["role"] for turn in sample.turns] for sample in Store(tmp_path / "run" / "store").answers()]
    assert ["assistant", "tool"] * 3 + ["assistant"] in roles

    # Scored again without executing anything.
    asked = len(computing.requests)
    for file in (tmp_path / "run" / "store").glob("scores-*"):
        file.unlink()
    monkeypatch.setattr("nemo_ext.rl.sandbox.sessions.Sessions.call", None)
    evaluate(*words)
    assert len(computing.requests) == asked and results()["benchmarks"]["sums"] == found


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers that the verifier of mathematics has seen."""
    answers: list[str] = []
    original = math.verify

    def verify(response: Response, *arguments: Any, **settings: Any) -> Any:
        answers.append(response.answer)
        return original(response, *arguments, **settings)

    monkeypatch.setattr(math, "verify", verify)
    return answers


def test_a_failed_sandbox_is_repeated_and_an_answer_verified_once(
    evaluate: Evaluate,
    results: Read,
    suite: Suite,
    computing: Any,
    verified: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (f"suite={suite(rows=2)}", "evaluate.python=true")

    def fail(*_: Any) -> None:
        raise SandboxError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr("nemo_ext.rl.sandbox.sessions.Sessions.call", fail)
        _, output = evaluate(*words)
    first = results()["benchmarks"]["sums"]
    evaluate(*words)
    found = results()["benchmarks"]["sums"]

    assert (first["samples"], first["failed"]) == (1, 1), output
    assert (found["samples"], found["failed"], found["accuracy"], found["calls"]) == (2, 0, 1, 1.5)
    assert sorted(verified) == ["\\boxed{0}", "\\boxed{3}"]


def test_an_interrupted_evaluation_resumes(
    evaluate: Evaluate, results: Read, suite: Suite, computing: Any, reply: type[Any]
) -> None:
    words, answer = (f"suite={suite(rows=4)}", "evaluate.python=true", "evaluate.attempts=1"), computing.reply

    def refuse_third_turns(payload: Mapping[str, Any]) -> Any:
        if sum(message["role"] == "tool" for message in payload["messages"]) == 2:
            return reply(status=503, body=b"{}")
        return answer(payload)

    computing.reply = refuse_third_turns
    evaluate(*words)
    first = results()["benchmarks"]["sums"]
    computing.reply = answer
    evaluate(*words)

    assert first["samples"] == 1 and first["failed"] + first["missing"] == 3
    assert results()["benchmarks"]["sums"]["accuracy"] == 1 and results()["benchmarks"]["sums"]["samples"] == 4


def test_a_full_context_is_a_truncated_answer(
    evaluate: Evaluate, results: Read, suite: Suite, computing: Any, reply: type[Any]
) -> None:
    answer = computing.reply
    full = {
        "error": {"message": "This model's maximum context length is 64 tokens.", "code": "context_length_exceeded"}
    }

    def limited(payload: Mapping[str, Any]) -> Any:
        if sum(message["role"] == "tool" for message in payload["messages"]) == 2:
            return reply(status=400, body=json.dumps(full).encode())
        return answer(payload)

    computing.reply = limited
    evaluate(f"suite={suite(rows=3)}", "evaluate.python=true")

    found = results()["benchmarks"]["sums"]
    assert (found["samples"], found["failed"]) == (3, 0)
    assert found["accuracy"] == pytest.approx(1 / 3) and found["truncated"] == pytest.approx(2 / 3)


def test_unknown_settings_of_the_tool_are_refused(evaluate: Evaluate, suite: Suite, computing: Any) -> None:
    code, output = evaluate(f"suite={suite(rows=1)}", "evaluate.python={max_cals: 3}")

    assert code != 0 and "evaluate.python" in output and "did you mean 'max_calls'" in output
