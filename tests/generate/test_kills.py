"""Killed workers, a killed endpoint and a full disk: the output equals that of an undisturbed run."""

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.ranks import reserve_port

Answers = Callable[..., list[dict[str, Any]]]
STAND_IN = Path(__file__).parents[2] / "benchmarks" / "stand_in.py"
SAMPLES = 2


class Endpoint:
    """The stand-in endpoint in a separate process that keeps its port when restarted."""

    def __init__(self, *words: str) -> None:
        self.held = reserve_port()
        self.port = self.held.getsockname()[1]
        self.words = [sys.executable, str(STAND_IN), f"--port={self.port}", *words]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.words, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def endpoint_process() -> Iterator[Callable[..., Endpoint]]:
    started: list[Endpoint] = []

    def start(*words: str) -> Endpoint:
        started.append(Endpoint(*words))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.held.close()


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """Command line of `nemo-ext generate` on rows of which one in a hundred is refused."""

    def words(endpoint: Endpoint, output: Path, count: int, *more: str) -> list[str]:
        rows = tmp_path / "rows.jsonl"
        if not rows.exists():
            lines = ({"id": n, "question": f"refuse me {n}" if n % 100 == 7 else f"What is {n}?"} for n in range(count))
            rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        own = [f"endpoint=http://127.0.0.1:{endpoint.port}/v1", f"input={rows}", f"output={output}"]
        own += ["generate.template='Q: {{ question }}'", f"samples={SAMPLES}", "generate.part_rows=100"]
        own += ["generate.concurrency=16", "generate.attempt_seconds=2", "generate.attempts=30", "generate.lease=5"]
        return [sys.executable, "-m", "nemo_ext.cli", "generate", *own, *more]

    return words


def lines_of(folder: Path) -> int:
    """Approximate number of answers in parts and journals."""
    journals = sum(file.read_bytes().count(b"\n") for file in folder.glob(".job/journals/*") if file.exists())
    return journals + 100 * SAMPLES * len(list(folder.glob("part-*")))


def dead(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("dead/*.jsonl")) for line in file.open()]


@pytest.mark.parametrize(
    ("kills", "rows"), [pytest.param(3, 600, marks=pytest.mark.slow), pytest.param(20, 3000, marks=pytest.mark.deep)]
)
def test_kills_of_two_workers_and_of_the_endpoint_change_nothing(
    kills: int,
    rows: int,
    endpoint_process: Callable[..., Endpoint],
    command: Callable[..., list[str]],
    answers: Answers,
    tmp_path: Path,
) -> None:
    """One in five kills is of the endpoint."""
    calm, out, draw = tmp_path / "calm", tmp_path / "answers", random.Random(2)
    subprocess.run(command(endpoint_process("--seconds=0"), calm, rows), check=True, stderr=subprocess.DEVNULL)
    endpoint = endpoint_process("--seconds=0.02", "--faults=0.2")
    workers: list[subprocess.Popen[bytes]] = []
    in_work = 0

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "workers.log").open("ab") as log:
            return subprocess.Popen(command(endpoint, out, rows), stderr=log)

    for kill in range(kills):
        workers = [worker for worker in workers if worker.poll() is None]
        while len(workers) < 2:
            workers.append(start())
        before, wanted, end = lines_of(out), draw.randrange(1, 2 * SAMPLES * rows // (3 * kills)), time.monotonic() + 30
        while lines_of(out) - before < wanted and time.monotonic() < end:
            time.sleep(0.02)
        in_work += lines_of(out) > before
        if kill % 5 == 2:
            endpoint.kill()
            endpoint.start()
        else:
            (victim := draw.choice(workers)).kill()
            victim.wait()
    codes = [worker.wait(600) for worker in [*workers, start()]]

    assert codes[-1] == 0, (tmp_path / "workers.log").read_text()
    assert set(codes) <= {0, -9}, (tmp_path / "workers.log").read_text()
    assert in_work > kills / 2
    assert answers(out) == answers(calm)
    assert len(answers(out)) == SAMPLES * (rows - rows // 100)
    assert dead(out) == dead(calm)
    assert len(dead(out)) == SAMPLES * rows // 100
    assert not [*(out / ".job" / "journals").iterdir(), *out.glob(".part-*")]


@pytest.mark.slow
def test_a_job_stopped_by_a_full_disk_can_be_resumed(
    endpoint_process: Callable[..., Endpoint], command: Callable[..., list[str]], answers: Answers, tmp_path: Path
) -> None:
    endpoint, out = endpoint_process("--seconds=0"), tmp_path / "answers"

    def small() -> None:  # for journals and parts; Python gets a similar error as from a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))

    words = command(endpoint, out, 600, "hydra.output_subdir=null")
    without_bytecode = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # would be truncated too
    full = subprocess.run(words, preexec_fn=small, env=without_bytecode, capture_output=True, text=True, check=False)
    again = subprocess.run(words, capture_output=True, text=True, check=False)

    assert full.returncode == 1, full.stderr
    assert [line for line in full.stderr.splitlines() if "error: " in line] == [full.stderr.splitlines()[-1]]
    assert "File too large" in full.stderr
    assert again.returncode == 0, again.stderr
    assert len(answers(out)) == SAMPLES * (600 - 6)
