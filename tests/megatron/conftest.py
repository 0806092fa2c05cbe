"""Training without the imports of torchrun and of every rank: ranks are forked (`rank_server.py`)."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

from nemo_ext import run_directory
from nemo_ext.config import compose

# An example may wait for an import, or for the processor.
hypothesis.settings.register_profile("any_machine", deadline=None)
hypothesis.settings.load_profile("any_machine")

SMALL = (
    "data=mock",
    "train.tokens=5120",
    "train.validate_at_start=false",
    "megatron.seq_length=64",
    "megatron.micro_batch_size=4",
    "megatron.global_batch_size=8",
    "megatron.save_interval=5",
    "megatron.eval_interval=1000",
    "megatron.eval_iters=1",
    "megatron.num_workers=0",
)
"""Ten steps of the tiny Nemotron 3 Nano on synthetic data, a checkpoint after five."""


@pytest.fixture(scope="session")
def rank_server() -> Iterator[subprocess.Popen[str]]:
    """The process whose forked children are ranks."""
    script = Path(__file__).with_name("rank_server.py")
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    yield server
    server.kill()
    server.wait()


@pytest.fixture(scope="session")
def fork_ranks(rank_server: subprocess.Popen[str]) -> Callable[..., None]:
    """Runs the ranks of a config to their end, or kills them once a step is logged."""

    def run(path: Path, ranks: int, kill_at: int | None = None) -> None:
        run_dir = path.resolve().parent
        job: dict[str, Any] = {"config": str(path.resolve()), "ranks": ranks, "log": str(run_dir / run_directory.LOG)}
        job |= {"folder": os.getcwd(), "environment": {**os.environ, "OMP_NUM_THREADS": "1"}}
        assert rank_server.stdin is not None and rank_server.stdout is not None
        print(json.dumps(job), file=rank_server.stdin, flush=True)
        deadline, killed = time.monotonic() + 900, False
        while not select.select([rank_server.stdout], [], [], 0.02 if kill_at else 900)[0]:
            if kill_at and not killed and max(steps(run_dir), default=0) >= kill_at:
                killed = True
                for child in psutil.Process(rank_server.pid).children():
                    child.kill()
            if time.monotonic() > deadline:
                rank_server.kill()  # and with it the ranks that hang
        answer = rank_server.stdout.readline()
        said = (run_dir / run_directory.LOG).read_text(errors="replace")[-4000:]
        fine = {0, -signal.SIGKILL} if killed else {0}  # they may end before the signal comes
        assert answer and set(json.loads(answer)) <= fine, f"{answer}{said}"

    return run


def steps(run_dir: Path) -> list[int]:
    """The steps that a run has logged."""
    lines = run_directory.read_metrics(run_dir / run_directory.METRICS)
    return [line["step"] for line in lines if "loss" in line]


@pytest.fixture(scope="session")
def train_ranks(fork_ranks: Callable[..., None]) -> Callable[..., list[dict[str, Any]]]:
    """Trains as the launcher's ranks do, and gives back the logged training steps; `test_launch.py` has torchrun."""
    from nemo_ext.megatron.fp8 import use_plan

    def run(
        run_dir: Path, *overrides: str, ranks: int = 1, data: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        config = compose("train", [*SMALL, f"run_dir={run_dir}", f"launcher.nproc_per_node={ranks}", *overrides])
        config["data"] = config["data"] if data is None else data
        use_plan(config)
        fork_ranks(run_directory.write_config(run_dir, config), ranks)
        return [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "loss" in line]

    return run


@pytest.fixture
def launched(
    fork_ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`nemo-ext WORDS` in this process with forked ranks, killed at a step where one is given; what it printed."""
    from nemo_ext import cli, launch

    def run(*words: str, kill_at: int | None = None) -> str:
        def run_ranks(run_dir: Path, ranks: int, target: int, console: object) -> None:
            fork_ranks(run_dir / run_directory.CONFIG, ranks, None if kill_at is None or kill_at > target else kill_at)

        monkeypatch.setattr(launch, "_run_ranks", run_ranks)
        monkeypatch.setattr(sys, "argv", ["nemo-ext", *words])
        capfd.readouterr()
        code: object = None
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capfd.readouterr()
        assert not code, err
        return out

    return run
