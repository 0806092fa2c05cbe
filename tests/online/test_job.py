"""`nemo-ext online` as a user runs it."""

import json
import math
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.online import job
from nemo_ext.online.job import check, run

SMALL = (
    *("preset=rpo_online", "serving.device=cpu", "rl.batch=8", "micro_batch=8", "rl.lengths={prompt: 256, total: 288}"),
    *("rl.schedule.steps=8", "rl.optimizer.learning_rate=2e-3", "rl.loss.beta=0.1", "memory_profile=null"),
    *("rl.online={generations_per_prompt: 4, rounds: 1}", "evaluate.draws=100", "save_every=4"),
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_a_round_raises_the_reward_and_resumes_after_interrupts(
    speaker: Path,
    letter_tasks: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "run"
    words = [*SMALL, f"model={speaker}", f"tasks.train.path={letter_tasks}", f"tasks.validation.path={letter_tasks}"]
    words.append(f"run_dir={folder}")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(job.rl, "run", stop)
        with pytest.raises(KeyboardInterrupt):
            run(compose("online", words))
    answers = (folder / "rounds/1/answers/generations.jsonl").read_bytes()
    capsys.readouterr()

    from nemo_ext.rl.trl.trainers import Log

    on_log = Log.on_log

    def interrupt(log: Log, args: Any, state: Any, *rest: Any, **more: Any) -> None:
        on_log(log, args, state, *rest, **more)
        if state.global_step == 8 and "loss" in more["logs"]:  # not the summary that the trainer logs at the end
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Log, "on_log", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(compose("online", words))
    assert (folder / "rounds/1/train/model/model.safetensors").is_file(), "the last step of a round ends with its model"
    assert "on this machine during the job" not in capsys.readouterr().err
    run(compose("online", words))

    assert "on this machine during the job" in capsys.readouterr().err, "only for the validation at the end"
    assert (folder / "rounds/1/answers/generations.jsonl").read_bytes() == answers
    before, after = lines(folder / "metrics.jsonl")
    assert (before["rounds"], after["rounds"]) == (0, 1)
    assert after["validation/reward_low"] > before["validation/reward_high"]
    assert (folder / "model" / "model.safetensors").is_file()
    assert "after 1 rounds" in (folder / "report.md").read_text()
    # At first the policy's margin is 0, and the true one eta x (1 - 0): KL of a Bernoulli to a fair coin.
    p = 1 / (1 + math.exp(-3))
    distance = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    assert lines(folder / "rounds/1/train/metrics.jsonl")[0]["loss"] == pytest.approx(distance, abs=1e-3)

    run(compose("online", words))
    assert "served" not in capsys.readouterr().err, "there is nothing left to do"
    with pytest.raises(ValueError, match=r"was started with different settings \(rl\.loss\.eta: 3\.0 -> 1\.0\)"):
        run(compose("online", [*words, "rl.loss.eta=1.0", "rl.online.rounds=2"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("online.colour=3",), "online has no such key"),
        (("online.temperature=-1",), "online.temperature=-1.0: input should be"),
        (
            ("online.environments={code: {colour: 1}}",),
            "online.environments.code is set, but no task has this environment",
        ),
        (
            ("online.group={judge: {endpoint: http://x/v1, model: m}, show: revard_model}",),
            "input should be 'genrm', 'instructed' or 'reward_model'",
        ),
        (("tasks.train.path=nothing.jsonl",), "no such task file"),
        (("rl.lengths={prompt: null, total: 288}",), "online.max_tokens=null"),
        (("rl.loss.length_normalised=true",), "loss.length_normalised: RPO's margins are sums"),
        (("tasks.train.path=bank.jsonl",), "'bank' has several turns"),
        (("save_every=0",), "save_every"),
        (("serving.engine=vllm", "serving.draft=mtp"), "serving.draft=mtp: models of later rounds have no"),
    ],
)
def test_invalid_settings_are_refused_before_serving(
    random_llama: Path,
    letter_tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bank.jsonl").write_text('{"id": "a", "environment": "bank", "prompt": "Hi."}\n')
    given = [*SMALL, f"model={random_llama}", f"tasks.train.path={letter_tasks}"]
    check(compose("online", given))

    with pytest.raises(ValueError, match=r".") as raised:
        check(compose("online", [*given, *words]))

    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=m",), "preset=null: set it to a preset that trains on pairs"),
        (("model=m", "preset=rl_zero"), "grpo generates during training; use `nemo-ext rl`"),
        (("model=m", "preset=dpo_delta"), "rl.online={generations_per_prompt: 4, rounds: 2}"),
        (("preset=rpo_online",), "model=null"),
    ],
)
def test_a_missing_algorithm_or_model_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        check(compose("online", words))

    assert message in str(raised.value)


def test_steps_replace_the_epochs_of_a_preset(random_llama: Path, letter_tasks: Path) -> None:
    words = ["preset=dpo_delta", "rl.online={generations_per_prompt: 4, rounds: 2}", "on_inexpressible=warn"]
    words += ["rl.schedule.steps=2", "rl.batch=8", f"model={random_llama}", f"tasks.train.path={letter_tasks}"]

    assert job._Run(compose("online", words)).training.schedule.total(8) == 2


def test_rounds_have_different_prompts(random_llama: Path, letter_tasks: Path) -> None:
    words = [
        *SMALL,
        f"model={random_llama}",
        f"tasks.train.path={letter_tasks}",
        "rl.online.rounds=3",
        "online.prompts=16",
    ]
    three = job._Run(compose("online", words))
    drawn = [[task.id for task in three.of_round(number)] for number in (1, 2, 3)]

    assert sorted(one for each in drawn for one in each) == sorted(str(number) for number in range(48))
    two = job._Run(compose("online", [*words, "rl.online.rounds=2"]))
    assert [[task.id for task in two.of_round(number)] for number in (1, 2)] == drawn[:2], "more rounds change none"
