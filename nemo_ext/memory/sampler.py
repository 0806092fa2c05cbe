"""Sampler of a run's memory over time on every node: its processes, the host, /dev/shm and the GPUs. Without torch.

    python -m nemo_ext.memory.sampler DIR -- COMMAND ...    runs COMMAND, sampled by a child process

The Llama-Nemotron authors (section 5.2.2) used the same to find causes of out-of-memory errors: psutil, the usage of
/dev/shm as `df` reports it, and NVML instead of PyTorch's own count. The sampler is a separate process, one on each
node, because a thread would hang with its rank. `DIR/NODE.jsonl` has the samples in bytes, `DIR/phases.jsonl` the start
times of the phases of the run; `nemo_ext.memory.report` reads both.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import pynvml
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.settings import STRICT, checked

KEY = "memory_profile"
"""Config key of a training run: `{seconds: 10}`, or null."""

FOLDER = "memory"
"""Folder of the samples in a run directory."""

PHASES = "phases.jsonl"

SECONDS = 10.0
"""Default interval between samples. A sample takes about ten milliseconds of one core."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """Settings of the section `memory_profile` of a config."""

    seconds: Annotated[float, Field(ge=0.1, le=3600)]


def interval(config: Mapping[str, Any]) -> float | None:
    """Seconds between samples from a run's `memory_profile`, or None without one.

    Raises:
        ValueError: unknown key, or a value other than a number from 0.1 to 3600.
    """
    section = config.get(KEY)
    return None if section is None else checked(Profile, section, KEY, strict=True).seconds


def start(directory: Path, *, root: int, seconds: float = SECONDS) -> subprocess.Popen[bytes]:
    """Start a sampler that ends with this process or with `root`.

    Call it from the main thread: Linux ties a child to the thread that started it.
    """
    code = f"from nemo_ext.memory.sampler import follow; follow({root}, {str(directory)!r}, {seconds})"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, start_new_session=True)


@contextmanager
def sampled(directory: Path, seconds: float | None) -> Iterator[None]:
    """Sample this process and its descendants in the context; does nothing if `seconds` is None."""
    with ExitStack() as stack:
        if seconds is not None:
            process = stack.enter_context(start(directory, root=os.getpid(), seconds=seconds))
            stack.callback(process.kill)
        yield


def root_of_ranks() -> int:
    """Process id of the common parent of this node's ranks, called in one of them: torchrun, or srun's step daemon.

    There may be a container runtime between a rank and the daemon.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ and "SLURM_PROCID" in os.environ:
        with suppress(psutil.Error, StopIteration):
            return next(parent.pid for parent in psutil.Process().parents() if parent.name().startswith("slurmstepd"))
    return os.getppid()


class Phases:
    """Log of the start times of phases of the run, if there is a directory. File system errors do not end the run."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._current: list[str | None] = [None]

    def begin(self, phase: str | None) -> None:
        """Start a phase and end the previous phase; None ends the run."""
        if self._directory is not None and phase != self._current[-1]:
            _append(self._directory / PHASES, {"time": round(time.time(), 3), "phase": phase})
        self._current[-1] = phase

    def enter(self, phase: str) -> None:
        """Start a phase that interrupts the current phase until `leave`."""
        self._current.append(self._current[-1])
        self.begin(phase)

    def leave(self) -> None:
        """Resume the interrupted phase."""
        if len(self._current) > 1:
            self.begin(self._current.pop(-2))

    def during(self, phase: str) -> ExitStack:
        """Enter a phase, and return a context manager that leaves it."""
        self.enter(phase)
        stack = ExitStack()
        stack.callback(self.leave)
        return stack


def gpu_memory(what: str) -> list[int]:
    """Bytes `used` or `total` on each GPU that NVML reports to this process; empty without a driver."""
    try:
        pynvml.nvmlInit()
        devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [int(getattr(pynvml.nvmlDeviceGetMemoryInfo(device), what)) for device in devices]
    except pynvml.NVMLError:
        return []


def node_memory(what: str) -> dict[str, Any]:
    """Bytes `used` or `total` on this node: `host`, `shm` in /dev/shm, and `gpu`, a list with one per GPU."""
    memory, shm = psutil.virtual_memory(), psutil.disk_usage("/dev/shm")
    host = memory.total - (memory.available if what == "used" else 0)
    return {"host": host, "shm": getattr(shm, what), "gpu": gpu_memory(what)}


def sample(root: psutil.Process) -> dict[str, Any]:
    """Bytes in use: `rss` of a process and all its descendants, except this process, and the node's memory."""
    rss = 0
    with suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                rss += process.memory_info().rss if process.pid != os.getpid() else 0
    return {"time": round(time.time(), 3), "rss": rss, **node_memory("used")}


def follow(root: int, directory: str, seconds: float) -> None:
    """Write this node's samples until a process ends."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, signal.valid_signals()
    )  # a scheduler sends signals to all processes of a job
    end_with_parent(signal.SIGKILL)
    path = Path(directory, f"{os.environ.get('SLURMD_NODENAME') or os.uname().nodename or 'node'}.jsonl")
    if not _append(path, {"start": round(time.time(), 3), "seconds": seconds, "total": node_memory("total")}):
        print(
            f"the memory profile is incomplete: {path} cannot be written: check its permissions and space",
            file=sys.stderr,
            flush=True,
        )
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            _append(path, sample(process))
            time.sleep(seconds)


def _append(path: Path, line: Mapping[str, Any]) -> bool:
    """Append a line; False if the file system refuses."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as stream:
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        return True
    return False


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(usage="python -m nemo_ext.memory.sampler DIR [--seconds S] -- COMMAND ...")
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds between two samples (default: 10)")
    parser.add_argument("command", metavar="COMMAND", nargs="+")
    arguments = parser.parse_args()
    interval({KEY: {"seconds": arguments.seconds}})
    start(arguments.directory, root=os.getpid(), seconds=arguments.seconds)
    try:
        os.execvp(arguments.command[0], arguments.command)
    except OSError as error:
        parser.error(f"{arguments.command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
