"""`nemo-ext rollouts`: verified rollouts on RL tasks, and a curriculum from them."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.rl.tasks import generate
from nemo_ext.rl.tasks.arithmetic import solution

TASKS = list(generate("arithmetic", 24, seed=1))
Rollouts = Callable[..., tuple[int, str]]


@pytest.fixture
def rollouts(
    endpoint: Any, reply: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]
) -> Callable[..., tuple[int, str]]:
    """The command with an endpoint that always solves the first twelve tasks, and the others half of the time."""
    right = {task.prompt[0].content: (solution(task), place) for place, task in enumerate(TASKS)}

    def answer(payload: dict[str, Any]) -> Any:
        text, place = right[payload["messages"][-1]["content"]]
        if place >= 12 and hashlib.sha256(str(payload["seed"]).encode()).digest()[0] % 2:
            text = "I do not know."
        message = {"role": "assistant", "content": text}
        usage = {"completion_tokens": 5}
        return reply(
            body=json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}).encode()
        )

    monkeypatch.setattr("nemo_ext.endpoint.client._FIRST_WAIT", 0.01)
    endpoint.models, endpoint.reply = ["m"], answer
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task.record())}\n" for task in TASKS))

    def run(*words: str, job: str = "rollouts") -> tuple[int, str]:
        own = [f"endpoint={endpoint.url}", f"rollouts.tasks={tmp_path / 'tasks.jsonl'}", f"run_dir={tmp_path / 'run'}"]
        own += ["evaluate.patience=1", "evaluate.draws=100"]
        code, out, err = command(job, *(own if job == "rollouts" else ()), *words)
        return code, out + err

    return run


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_rollouts_are_verified_and_make_a_curriculum(rollouts: Rollouts, tmp_path: Path) -> None:
    code, output = rollouts("rollouts.samples=4")

    assert code == 0, output
    found = lines(tmp_path / "run")
    assert len(found) == 24 * 4
    assert {line["response"]["content"] for line in found if line["reward"] == 0} == {"I do not know."}
    rates = {task.id: [line["reward"] for line in found if line["id"] == task.id] for task in TASKS}
    assert all(rates[task.id] == [1.0] * 4 for task in TASKS[:12])
    later = [reward for task in TASKS[12:] for reward in rates[task.id]]
    assert 0.25 < sum(later) / len(later) < 0.75
    table = json.loads((tmp_path / "run" / "results.json").read_text())["benchmarks"]["math"]
    assert table["accuracy"] == pytest.approx(sum(line["reward"] for line in found) / len(found))
    words = [f"prompts={tmp_path / 'tasks.jsonl'}", f"rollouts={tmp_path / 'run' / 'rollouts.jsonl'}"]
    code, output = rollouts(*words, f"output={tmp_path / 'curriculum'}", "batch=2", "steps=3", job="curriculum")
    assert code == 0, output
    drawn = [json.loads(line)["id"] for line in (tmp_path / "curriculum" / "curriculum.jsonl").read_text().splitlines()]
    assert set(drawn) <= {task.id for task in TASKS[12:]}


def test_a_task_is_requested_in_its_mode(rollouts: Rollouts, endpoint: Any, tmp_path: Path) -> None:
    modes = (True, False, None)
    tasks = [replace(task, thinking=mode) for task, mode in zip(TASKS, modes, strict=False)]
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(task.record())}\n" for task in tasks))
    asked, answer = {}, endpoint.reply

    def noted(payload: dict[str, Any]) -> Any:
        asked[payload["messages"][-1]["content"]] = payload.get("chat_template_kwargs")
        return answer(payload)

    endpoint.reply = noted
    code, said = rollouts("rollouts.samples=1")

    assert code == 0, said
    wanted = ({"enable_thinking": True}, {"enable_thinking": False}, None)
    assert asked == {task.prompt[0].content: mode for task, mode in zip(tasks, wanted, strict=True)}


def test_more_samples_add_to_the_store(rollouts: Rollouts, endpoint: Any, tmp_path: Path) -> None:
    rollouts("rollouts.samples=2")
    two = lines(tmp_path / "run")
    rollouts("rollouts.samples=3")

    assert len(endpoint.requests) == 24 * 3
    assert {json.dumps(line) for line in two} <= {json.dumps(line) for line in lines(tmp_path / "run")}


def test_task_paths_are_relative_to_the_working_directory(
    rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    code, said = rollouts("rollouts.samples=1", "rollouts.tasks=tasks.jsonl")

    assert code == 0 and len(lines(tmp_path / "run")) == 24, said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rollouts.tasks=nothing.jsonl",), "no such task file"),
        (("rollouts.samples=0",), "samples=0"),
        (("rollouts.temperature=-1",), "rollouts.temperature=-1.0: input should be"),
        (("rollouts.environments={code: {max_tests: 9}}",), "no task has the environment 'code'"),
        (("rollouts.environments={math: {colour: 9}}",), "colour"),
    ],
)
def test_a_mistake_is_reported_in_one_line(rollouts: Rollouts, words: tuple[str, ...], said: str) -> None:
    code, found = rollouts(*words)

    assert (code, said in found, "Traceback" in found) == (2, True, False), found


def test_a_reward_model_gives_the_rewards_once(
    rollouts: Rollouts, endpoint: Any, reply: type[Any], tmp_path: Path
) -> None:
    answer = endpoint.reply

    def both(payload: dict[str, Any]) -> Any:
        last = payload["messages"][-1]
        if last["role"] == "assistant":
            return reply(text=f"reward:{len(last['content'])}.5")
        return reply(text="longer" * 9) if payload["temperature"] == 0.5 else answer(payload)

    endpoint.reply = both
    group = f"rollouts.group={{judge: {{endpoint: '{endpoint.url}', model: m}}, show: reward_model}}"

    for samples in (2, 3):
        code, output = rollouts(f"rollouts.samples={samples}", group)
        assert code == 0, output
        found = lines(tmp_path / "run")
        assert len(found) == 24 * samples
        assert {line["reward"] - len(line["response"]["content"]) for line in found} == {0.5}
        count = len(endpoint.requests)
        rollouts(f"rollouts.samples={samples}", group)
        assert len(endpoint.requests) - count < 3, "only the checks of the endpoints"

    # Other answers, or another judge, have other rewards.
    rollouts("rollouts.samples=3", "rollouts.temperature=0.5", group)
    found = lines(tmp_path / "run")
    assert {line["reward"] - len(line["response"]["content"]) for line in found} == {0.5}
    count = len(endpoint.requests)
    rollouts("rollouts.samples=3", "rollouts.temperature=0.5", group.replace("m}", "m, sampling: {temperature: 1}}"))
    assert len(endpoint.requests) - count >= 24 * 3
