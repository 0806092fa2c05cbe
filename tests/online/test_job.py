"""`nemo-ext online` as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.online.job import run

SMALL = (
    *("preset=rpo_online", "serving.device=cpu", "rl.batch=8", "micro_batch=8", "rl.lengths={prompt: 256, total: 288}"),
    *("rl.schedule.steps=6", "rl.optimizer.learning_rate=1e-3", "rl.loss.beta=0.1", "memory_profile=null"),
    *("rl.online={generations_per_prompt: 4, rounds: 2}", "evaluate.draws=100", "save_every=3"),
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_rounds_raise_the_reward_and_a_killed_run_goes_on(
    speaker: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = [*SMALL, f"model={speaker}", f"tasks.train.path={tasks}", f"tasks.validation.path={tasks}"]
    words.append(f"run_dir={folder}")
    command = [sys.executable, "-m", "nemo_ext.cli", "online", *words]
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None and not (folder / "rounds/1/pairs/report.json").is_file():
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    answers = (folder / "rounds/1/answers/generations.jsonl").read_bytes()

    run(compose("online", words))

    assert (folder / "rounds/1/answers/generations.jsonl").read_bytes() == answers
    found = lines(folder / "metrics.jsonl")
    assert [line["rounds"] for line in found] == [0, 1, 2]
    assert found[2]["validation/reward_low"] > found[0]["validation/reward_high"]
    assert (folder / "model" / "model.safetensors").is_file()
    assert "after 2 rounds" in (folder / "report.md").read_text()
    # The first loss is the distance of a margin of 0 from the true one.
    capsys.readouterr()
    run(compose("online", words))
    assert "round" not in capsys.readouterr().err.replace("rounds", "")
