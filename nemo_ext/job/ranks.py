"""Starting of a stage's ranks, with their error messages passed to the user unchanged.

On one machine, ranks are child processes. On several Slurm nodes (`ON_NODES`), the job may run in a container without
srun. It therefore writes the command to a file for the batch process, which runs it and writes the exit code to another
file.

torchrun is not used, as it adds a report to every user error, and leaves ranks running when it is killed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nemo_ext.job.files import write_text
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.run_directory import read_config
from nemo_ext.job.workers import usable_cores

ON_NODES = "NEMO_EXT_ON_NODES"
"""Environment variable that names the folder through which a job requests ranks on all nodes of its allocation."""
GPUS = "NEMO_EXT_GPUS"
"""Environment variable that holds the GPU model of the site's nodes, or `none` if ranks train on CPUs."""
ASKED, ENDED = "ranks_asked.json", "ranks_ended.json"
"""Files in the `ON_NODES` folder: the request (Python's arguments, and the log unless it is the job's output), and the
exit code."""
SECONDS_TO_STOP = 30.0
SECONDS_TO_AGREE = 2.0


def run_ranks(command: Sequence[str], ranks: int, logs: Path, seconds_to_stop: float = SECONDS_TO_STOP) -> int:
    """Run a command as `ranks` processes, and wait for them; if one fails, the rest are stopped.

    A single rank gets no process group. If the batch process has set NEMO_EXT_ON_NODES, the ranks run on all nodes. The
    output of all ranks but the first is written to files in the folder `logs`. Ranks on this machine that are still
    running `seconds_to_stop` after an interrupt are killed.

    Returns:
        0, or the exit code of the rank that failed first.

    Raises:
        KeyboardInterrupt: the job was interrupted; raised once the ranks have stopped.
    """
    if ON_NODES in os.environ:
        return _run_on_nodes(command[1:], logs)
    with reserve_port() as held:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for environment in _environments(ranks, held.getsockname()[1]):
                processes.append(_start(command, environment, logs))
            return _watch(processes, logs)
        except BaseException:
            _stop(processes, signal.SIGINT, seconds_to_stop)
            raise


def reserve_port(place: tuple[str, int] = ("127.0.0.1", 0)) -> socket.socket:
    """Bind a socket to an address and port of this machine; port 0 is any free one.

    Until the socket is closed, the system gives the port to no process that asks for a free one. A server can still
    listen on it, because servers set SO_REUSEADDR.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind(place)
    except OSError:
        held.close()
        raise
    return held


def _run_on_nodes(words: Sequence[str], logs: Path) -> int:
    from nemo_ext.job.config import INTERRUPTED  # imports Hydra, which ranks do not need

    for old in logs.glob("rank*.log"):
        old.unlink()
    code = ask_for_ranks(["-m", "nemo_ext.slurm.rank", *words])
    if code and code != INTERRUPTED:
        print(_last_line(sorted(logs.glob("rank*.log")), f"above and {logs}/rank*.log"), file=sys.stderr)
    return code


def ask_for_ranks(words: Sequence[str], log: Path | None = None) -> int:
    """Have the batch process start Python with the arguments `words` on all ranks, and wait for them.

    Args:
        words: Python's arguments, such as `-m MODULE CONFIG`.
        log: file for the ranks' output; if None, the job's output.

    Returns:
        srun's exit code.

    Raises:
        ValueError: the batch process's folder is not visible here.
        KeyboardInterrupt: the job was interrupted; raised once the ranks, which are interrupted too, have stopped.
    """
    folder = Path(os.environ[ON_NODES])
    if not folder.is_dir():
        raise ValueError(f"{folder} is not visible inside the container; add it or a parent folder to container.binds")
    (folder / ENDED).unlink(missing_ok=True)
    write_text(folder / ASKED, json.dumps({"words": [*words], "log": None if log is None else str(log)}))
    try:
        while not (folder / ENDED).is_file():
            time.sleep(0.1)
    except KeyboardInterrupt:
        deadline = time.monotonic() + SECONDS_TO_STOP
        while not (folder / ENDED).is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        raise
    return int((folder / ENDED).read_text())


def _watch(processes: Sequence[subprocess.Popen[bytes]], logs: Path) -> int:
    from nemo_ext.job.config import INTERRUPTED, USER_ERROR  # imports Hydra, which ranks do not need

    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        time.sleep(0.05)
    if not any(codes):
        return 0
    _wait(processes, SECONDS_TO_AGREE)  # a user error ends all ranks, and so does the end of one
    later = [process.poll() for process in processes]
    _stop(processes, signal.SIGTERM)
    failed = later.index(USER_ERROR) if USER_ERROR in later else max(rank for rank, code in enumerate(codes) if code)
    code = later[failed] or 0
    if failed and code != INTERRUPTED:
        print(_last_line([log := rank_log(logs, failed)], str(log)), file=sys.stderr)
    return code


def training_rank(config: Mapping[str, Any]) -> str:
    """Name of the module that a training run's ranks execute, which depends on whether training includes evaluation."""
    every = (config.get("evaluate") or {}).get("every")
    return "nemo_ext.megatron.rank" if every is None else "nemo_ext.evaluation.live.rank"


def _environments(ranks: int, port: int) -> list[dict[str, str]]:
    # Set if the launcher itself runs under torchrun or srun.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    base = {name: value for name, value in rank_environment(ranks).items() if name not in names}
    if ranks == 1:
        return [base]
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [base | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _start(command: Sequence[str], environment: dict[str, str], logs: Path) -> subprocess.Popen[bytes]:
    rank, ended = int(environment.get("RANK", 0)), partial(end_with_parent, signal.SIGTERM)
    if not rank:
        return subprocess.Popen(command, env=environment, preexec_fn=ended)
    with rank_log(logs, rank).open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=ended)


def rank_log(logs: Path, rank: int) -> Path:
    """Return the path of a rank's log; rank 0 has one only on several nodes, for errors that the user can correct."""
    return logs / f"rank{rank}.log"


def _last_line(logs: Sequence[Path], see: str) -> str:
    lines = [line for log in logs for line in reversed(log.read_text(errors="replace").splitlines())]
    return next((line for line in lines if line.startswith("error: ")), f"error: a rank failed; see {see}")


def _stop(
    processes: Sequence[subprocess.Popen[bytes]], number: signal.Signals, seconds: float = SECONDS_TO_STOP
) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    for process in _wait(processes, seconds):
        process.kill()
        process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Wait for processes for at most `seconds`, and return those that are still running."""
    deadline = time.monotonic() + seconds
    while (running := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running


def rank_environment(ranks: int) -> dict[str, str]:
    """Environment variables for `ranks` ranks on this machine; variables set by the user take precedence."""
    return {
        # By default, torchrun kills ranks 30 s after a SIGTERM, too soon for a long step and its checkpoint.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600",
        # Spinning threads slow the machine down severely as soon as other processes run.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        **os.environ,
    }


def training_command(config: Path, ranks: int, log: Path) -> tuple[list[str], dict[str, str]]:
    """Command that runs a training run's ranks, here or on all nodes, and its environment variables.

    On SIGTERM, the ranks save and end. A single rank is started without torchrun, which imports torch as well.

    Args:
        ranks: number of ranks on this machine.
        log: file for the ranks' output, used on all nodes.
    """
    environment = rank_environment(ranks)
    if ON_NODES in os.environ:
        command = ["-m", "nemo_ext.job.ranks", str(log), "-m", "nemo_ext.slurm.rank", str(config)]
        return [sys.executable, *command], environment
    module = ["-m", training_rank(read_config(config)), str(config)]
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return [sys.executable, *torchrun, *module], environment
    # torchrun's variables; port 0 is any free port. The launcher itself may run under torchrun.
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return [sys.executable, "-u", *module], environment


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the batch process signals the ranks
        signal.signal(ignored, signal.SIG_IGN)
    sys.exit(ask_for_ranks(sys.argv[2:], Path(sys.argv[1])))
