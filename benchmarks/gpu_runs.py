"""Training runs of one rank each, several at a time, for gpu_curves.py and gpu_train.py."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_ext.job.config import compose
from nemo_ext.job.ranks import rank_environment, reserve_port
from nemo_ext.launch import prepare
from nemo_ext.megatron.run import Run

RANK = Path(__file__).with_name("gpu_rank.py")


def prepared(directory: Path, words: Sequence[str]) -> Path:
    """The written config of a run whose data is tokenised; raises ValueError for a mistake."""
    config = compose("train", [f"run_dir={directory}", *words])
    Run.of(config).tokenized()
    return prepare(config)


def run(config: Path, limit: float, *, lock: Path | None = None, device: bool = True) -> str:
    """Trains; empty, or the line that says why it failed. The log is RUN_DIR/rank.log."""
    environment = {**os.environ, **rank_environment(1), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if not device:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(RANK), str(config), *([] if lock is None else [str(lock)])]
    path = config.with_name("rank.log")
    with path.open("w") as log, reserve_port() as held:
        environment["MASTER_PORT"] = str(held.getsockname()[1])
        try:
            ended = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            return f"not done within {limit:.0f} s"
    if ended.returncode == 0:
        return ""
    said = [line for line in path.read_text(errors="replace").splitlines() if "rror" in line]
    return (said or [f"exit status {ended.returncode}"])[-1].strip().replace("|", "/")[:200]
