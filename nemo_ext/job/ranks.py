"""Starting the ranks of a stage on this machine, with their messages passed to the user unchanged.

torchrun would add a report of its own to every mistake, and keeps ranks alive when it is killed itself.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.job.workers import usable_cores

SECONDS_TO_STOP = 30.0
SECONDS_TO_AGREE = 2.0


def run_ranks(command: Sequence[str], ranks: int, logs: Path) -> int:
    """Run a command as `ranks` processes and wait; if one fails the others are stopped.

    A single rank gets no process group. The output of ranks other than the first goes to `logs`.

    Returns:
        0, or the exit code of the rank that failed first.

    Raises:
        KeyboardInterrupt: after the ranks have stopped.
    """
    with reserve_port() as held:
        processes = [_start(command, each, logs) for each in _environments(ranks, held.getsockname()[1])]
        return _watch(processes, logs)


def reserve_port() -> socket.socket:
    """Socket bound to a free port of this machine: until it is closed, no connection and no server that asks for any
    port is given that one, and a process that sets SO_REUSEADDR, as servers do, can listen there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _watch(processes: Sequence[subprocess.Popen[bytes]], logs: Path) -> int:
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                _wait(processes, SECONDS_TO_AGREE)  # a mistake of the user's ends all of them
                spoke = processes[0].poll()
                _stop(processes, signal.SIGTERM)
                if failed and not spoke:
                    print(_last_line(_log(logs, failed)), file=sys.stderr)
                return codes[failed] or 0
            if None not in codes:
                return 0
            time.sleep(0.05)
    except KeyboardInterrupt:
        _stop(processes, signal.SIGINT)
        raise


def training_rank(config: Mapping[str, Any]) -> str:
    """Module that each rank of a training runs: another one if the model is evaluated while it is trained."""
    every = (config.get("evaluate") or {}).get("every")
    return "nemo_ext.megatron.rank" if every is None else "nemo_ext.evaluation.live.rank"


def _environments(ranks: int, port: int) -> list[dict[str, str]]:
    # Set by torchrun or srun where the launcher itself runs under one of them.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    base = {name: value for name, value in rank_environment(ranks).items() if name not in names}
    if ranks == 1:
        return [base]
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _start(command: Sequence[str], environment: dict[str, str], logs: Path) -> subprocess.Popen[bytes]:
    rank = int(environment.get("RANK", 0))
    if not rank:
        return subprocess.Popen(command, env=environment)
    with _log(logs, rank).open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("error: ")), f"error: a rank failed; see {log}")


def _stop(processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    for process in _wait(processes, SECONDS_TO_STOP):
        process.kill()
        process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Processes that still run after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (running := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def rank_environment(ranks: int) -> dict[str, str]:
    """Environment variables of ranks on this machine; those that the user set stay."""
    return {
        # torchrun kills ranks half a minute after a SIGTERM: too soon for a long step and its checkpoint.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600",
        # Threads that spin while they wait for each other cost most of a machine's speed as soon as anything else runs.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        **os.environ,
    }
