"""Training without the imports of torchrun and of every rank: ranks are forked (`rank_server.py`)."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_ext import run_directory
from nemo_ext.config import compose

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
def train_ranks(rank_server: subprocess.Popen[str]) -> Callable[..., list[dict[str, Any]]]:
    """Trains as the launcher's ranks do, and gives back the logged training steps; `test_launch.py` has torchrun."""
    from nemo_ext.megatron.fp8 import use_plan

    def run(
        run_dir: Path, *overrides: str, ranks: int = 1, data: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        config = compose("train", [*SMALL, f"run_dir={run_dir}", f"launcher.nproc_per_node={ranks}", *overrides])
        config["data"] = config["data"] if data is None else data
        use_plan(config)
        path, log = run_directory.write_config(run_dir, config), run_dir / run_directory.LOG
        assert rank_server.stdin is not None and rank_server.stdout is not None
        job: dict[str, Any] = {"config": str(path), "ranks": ranks, "log": str(log)}
        job["environment"] = {**os.environ, "OMP_NUM_THREADS": "1"}
        print(json.dumps(job), file=rank_server.stdin, flush=True)
        if not select.select([rank_server.stdout], [], [], 900)[0]:
            rank_server.kill()  # and with it the ranks that hang
        answer = rank_server.stdout.readline()
        said = log.read_text(errors="replace")[-4000:] if log.exists() else ""
        assert answer and json.loads(answer) == [0] * ranks, f"{answer}{said}"
        return [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "loss" in line]

    return run
