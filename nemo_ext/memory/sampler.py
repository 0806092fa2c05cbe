"""Sampler of a run's memory use on each node: processes, host, /dev/shm and GPUs. Does not import torch.

    python -m nemo_ext.memory.sampler DIR -- COMMAND ...    runs COMMAND, sampled by a child process

The Llama-Nemotron authors (section 5.2.2) used the same sources to find the causes of out-of-memory errors: psutil, the
usage of /dev/shm as `df` reports it, and NVML instead of PyTorch's own count. The sampler is a separate process, one on
each node, because a thread would hang with its rank. It writes samples in bytes to `DIR/NODE.jsonl`; the start times of
the run's phases are in `DIR/phases.jsonl`. `nemo_ext.memory.report` reads both.
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
"""Section of a training config that turns the sampler on: `{seconds: 10}`, or null."""

FOLDER = "memory"
"""Name of the folder in a run directory that holds the samples."""

PHASES = "phases.jsonl"

SECONDS = 10.0
"""Default sampling interval in seconds. A sample takes about ten milliseconds of one core."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """Settings of a config's `memory_profile` section."""

    seconds: Annotated[float, Field(ge=0.1, le=3600)]


def interval(config: Mapping[str, Any]) -> float | None:
    """Read the sampling interval in seconds from a config's `memory_profile` section; None if there is no section.

    Raises:
        ValueError: the section has an unknown key, or the interval is not a number from 0.1 to 3600.
    """
    section = config.get(KEY)
    return None if section is None else checked(Profile, section, KEY, strict=True).seconds


def start(directory: Path, *, root: int, seconds: float = SECONDS) -> subprocess.Popen[bytes]:
    """Start a sampler of the process `root` and its descendants, which ends with `root` or with this process.

    It writes a sample to this node's file in `directory` every `seconds`.

    Call this from the main thread, because Linux ties a child process to the thread that started it.
    """
    code = f"from nemo_ext.memory.sampler import follow; follow({root}, {str(directory)!r}, {seconds})"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, start_new_session=True)


@contextmanager
def sampled(directory: Path, seconds: float | None) -> Iterator[None]:
    """Sample this process and its descendants every `seconds` in the context; do nothing if `seconds` is None."""
    with ExitStack() as stack:
        if seconds is not None:
            process = stack.enter_context(start(directory, root=os.getpid(), seconds=seconds))
            stack.callback(process.kill)
        yield


def root_of_ranks() -> int:
    """Return the process id of torchrun or srun's step daemon, the common ancestor of this node's ranks.

    Call this in a rank; it returns the process itself if it is the node's only rank. There may be a container runtime
    between the rank and the daemon.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == "1":
        return os.getpid()
    if "TORCHELASTIC_RUN_ID" not in os.environ and "SLURM_PROCID" in os.environ:
        with suppress(psutil.Error, StopIteration):
            return next(parent.pid for parent in psutil.Process().parents() if parent.name().startswith("slurmstepd"))
    return os.getppid()


class Phases:
    """Log of the start times of the run's phases, written if `directory` is set; file system errors are ignored."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._current: list[str | None] = [None]

    def begin(self, phase: str | None) -> None:
        """End the current phase and start another; None marks the end of the run."""
        if self._directory is not None and phase != self._current[-1]:
            _append(self._directory / PHASES, {"time": round(time.time(), 3), "phase": phase})
        self._current[-1] = phase

    def enter(self, phase: str) -> None:
        """Start a phase that interrupts the current one until `leave` is called."""
        self._current.append(self._current[-1])
        self.begin(phase)

    def leave(self) -> None:
        """End the current phase and resume the one that it interrupted, if any."""
        if len(self._current) > 1:
            self.begin(self._current.pop(-2))

    def during(self, phase: str) -> ExitStack:
        """Enter a phase at once, and return a context manager that leaves it on exit."""
        self.enter(phase)
        stack = ExitStack()
        stack.callback(self.leave)
        return stack


def gpu_memory(what: str) -> list[int]:
    """Return each GPU's `used` or `total` bytes, depending on `what`, from NVML; an empty list without a driver."""
    try:
        pynvml.nvmlInit()
        devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [int(getattr(pynvml.nvmlDeviceGetMemoryInfo(device), what)) for device in devices]
    except pynvml.NVMLError:
        return []


def node_memory(what: str) -> dict[str, Any]:
    """Return this node's memory in bytes: `used` or `total`, depending on `what`.

    The keys are `host`, `shm` (/dev/shm) and `gpu` (a list with one number per GPU).
    """
    memory, shm = psutil.virtual_memory(), psutil.disk_usage("/dev/shm")
    host = memory.total - (memory.available if what == "used" else 0)
    return {"host": host, "shm": getattr(shm, what), "gpu": gpu_memory(what)}


def sample(root: psutil.Process) -> dict[str, Any]:
    """Measure bytes in use: `rss` of `root` and its descendants except this process, and the node's memory."""
    rss = 0
    with suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error):
                rss += process.memory_info().rss if process.pid != os.getpid() else 0
    return {"time": round(time.time(), 3), "rss": rss, **node_memory("used")}


def follow(root: int, directory: str, seconds: float) -> None:
    """Write this node's samples to a file in `directory` every `seconds`, until the process `root` ends."""
    signal.pthread_sigmask(
        signal.SIG_BLOCK, signal.valid_signals()
    )  # a scheduler sends signals to all processes of a job
    end_with_parent(signal.SIGKILL)
    path = Path(directory, f"{os.environ.get('SLURMD_NODENAME') or os.uname().nodename or 'node'}.jsonl")
    if not _append(path, {"start": round(time.time(), 3), "seconds": seconds, "total": node_memory("total")}):
        print(
            f"the memory profile is incomplete: {path} cannot be written; check its permissions and free space",
            file=sys.stderr,
            flush=True,
        )
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            _append(path, sample(process))
            time.sleep(seconds)


def _append(path: Path, line: Mapping[str, Any]) -> bool:
    """Append a line of JSON; return False if the file cannot be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as stream:
            stream.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        return True
    return False


def main() -> None:
    """Start a sampler, then replace this process with the command given on the command line."""
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
        parser.error(f"the command {arguments.command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
