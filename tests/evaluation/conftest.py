"""A user-defined benchmark of sums, and an endpoint that knows some of the answers."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

QUICK = ("evaluate.patience=1", "evaluate.attempt_seconds=20", "evaluate.draws=200")


def knows(text: str, share: float) -> bool:
    """True for a fixed subset of texts with the given share."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) < share * (1 << 32)


def answer_to(payload: Mapping[str, Any], reply: type[Any], share: float = 0.5) -> Any:
    """The requested sum, or the sum plus one."""
    asked = payload["messages"][-1]["content"]
    if "refuse me" in asked:
        return reply(status=400, body=b'{"error": {"message": "refused for its content"}}')
    first, second = map(int, re.findall(r"(\d+) \+ (\d+)", asked)[-1])
    right = knows(f"{asked} {payload['seed'] if payload.get('temperature') else ''}", share)
    text = f"\\boxed{{{first + second + (not right)}}}"
    message = {"role": "assistant", "content": text, "reasoning_content": "Let me see."}
    usage = {"prompt_tokens": 7, "completion_tokens": 10 + first % 5}
    choice = {"message": message, "finish_reason": "length" if first == 13 else "stop"}
    return reply(body=json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode())


@pytest.fixture
def answering(endpoint: Any, reply: type[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The endpoint with one model, `m`, and a back-off of hundredths of a second."""
    monkeypatch.setattr("nemo_ext.endpoint.client._FIRST_WAIT", 0.01)
    endpoint.models = ["m"]
    endpoint.reply = lambda payload: answer_to(payload, reply)
    return endpoint


@pytest.fixture
def suite(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows of sums, a benchmark and a suite; returns the suite's file."""

    def write(rows: int = 20, name: str = "sums", **keys: Any) -> Path:
        data = tmp_path / "data"
        data.mkdir(exist_ok=True)
        lines = [
            {"question": f"What is {n} + {2 * n}?", "sum": 3 * n, "kind": "odd" if n % 2 else "even"}
            for n in range(rows)
        ]
        (data / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        benchmark = {
            "data": [f"{name}.jsonl"],
            "source": "nowhere",
            "id": "question",
            "domain": "kind",
            "prompt": "{{ question }}",
            "environment": "math",
            "reference": {"answer": "sum | string"},
            "max_tokens": 64,
            **keys,
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(benchmark))
        place = tmp_path / f"suite_{name}.yaml"
        place.write_text(json.dumps({"benchmarks": [str(tmp_path / f"{name}.yaml")]}))
        return place

    return write


@pytest.fixture
def evaluate(
    answering: Any, tmp_path: Path, command: Callable[..., Any], kept_workers: None
) -> Callable[..., tuple[int, str]]:
    """`nemo-ext evaluate` in this process; returns its exit code and output."""

    def run(*words: str) -> tuple[int, str]:
        places = [f"endpoint={answering.url}", f"run_dir={tmp_path / 'run'}", f"evaluate.data_root={tmp_path / 'data'}"]
        code, out, err = command("evaluate", *places, *QUICK, *words)
        return code, out + err

    return run


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Reads results.json."""

    def read(folder: Path = tmp_path / "run") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / "results.json").read_text())
        return found

    return read


@pytest.fixture(scope="session")
def served_model(served_folder: Path) -> Iterator[str]:
    """URL of the model in `served_folder`, with at most 256 tokens for prompt and answer."""
    import threading

    from nemo_ext.serving.app import Api, Served
    from nemo_ext.serving.listen import bind, server, url_of
    from nemo_ext.serving.load import load
    from nemo_ext.serving.settings import ServingSettings

    served: Served = load(served_folder, ServingSettings(device="cpu", name="tiny"), {})
    socket = bind("127.0.0.1", 0)
    running = server(Api(served).app(None))
    thread = threading.Thread(target=running.run, args=([socket],), daemon=True)
    thread.start()
    yield url_of("127.0.0.1", socket.getsockname()[1])
    running.should_exit = True
    thread.join()
    served.engine.close()
