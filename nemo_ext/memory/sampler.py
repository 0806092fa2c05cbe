"""Samples a run's memory over time on every node: its processes, the host, /dev/shm and the GPUs. No torch.

    python -m nemo_ext.memory.sampler DIR --root PID        samples PID and the processes below it until PID ends
    python -m nemo_ext.memory.sampler DIR -- COMMAND ...    samples COMMAND while it runs, and ends with its exit code

The Llama-Nemotron authors (section 5.2.2) built the same to find what ran out of memory: psutil, the usage of /dev/shm
as `df` reports it, and NVML instead of PyTorch's own count. The sampler is a separate process, one on each node,
because a thread would hang with its rank. `DIR/NODE.jsonl` has the samples in bytes, `DIR/phases.jsonl` the time at
which each phase of the run began; `nemo_ext.memory.report` reads both.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.progress import notice
from nemo_ext.job.settings import STRICT, checked

KEY = "memory_profile"
"""Config key of a training run: `{seconds: 10}`, or null."""

FOLDER = "memory"
"""Folder of the samples in a run directory."""

PHASES = "phases.jsonl"

SECONDS = 10.0
"""Default interval between samples. A sample takes some ten milliseconds of one core."""

TOLERANCE, LEAST_CHANGE = 0.01, 1 << 20
"""A sample is written if a value changed by more than this share of itself and more than these bytes ..."""

HELD = 30
"""... or if it is this many samples after the last one written. Memory in training is constant for hours: the file of a
week has a tenth of the lines that it would have with every sample."""

STOP = signal.SIGRTMIN
"""Signal that ends a sampler, which ignores the signals that a scheduler sends to all processes of a job."""

_LOOK = 10.0
"""Maximum delay in seconds until the end of the root is noticed."""

_TO_ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Profile:
    """The section `memory_profile` of a config."""

    seconds: Annotated[float, Field(ge=0.1, le=3600)]


def interval(config: Mapping[str, Any]) -> float | None:
    """Seconds between samples from a run's `memory_profile`, or None without one.

    Raises:
        ValueError: for an unknown key, or anything but a number from 0.1 to 3600.
    """
    given = config.get(KEY)
    return None if given is None else checked(Profile, given, KEY, strict=True).seconds


def start(directory: Path, *, root: int, seconds: float = SECONDS) -> subprocess.Popen[bytes] | None:
    """Starts a sampler that ends with this process or with `root`; None, and a notice, if that fails.

    Call it from the main thread: Linux ties a child to the thread that started it.
    """
    words = [str(directory), "--root", str(root), "--parent", str(os.getpid()), "--seconds", str(seconds)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-m", "nemo_ext.memory.sampler", *words],
            stdin=subprocess.DEVNULL,
            # A reader of the run's pipes would wait for the sampler to close them.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        notice(f"no memory profile: {error}")
        return None


@contextmanager
def sampled(directory: Path, seconds: float | None) -> Iterator[None]:
    """Samples this process and its descendants until the block ends; without `seconds` does nothing."""
    process = None if seconds is None else start(directory, root=os.getpid(), seconds=seconds)
    try:
        yield
    finally:
        if process is not None:
            process.send_signal(STOP)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:  # a file system that hangs
                process.kill()


def root_of_ranks() -> int:
    """Process id of the common parent of this node's ranks, called in one of them: torchrun, or srun's step daemon.

    A container runtime may stand between a rank and the daemon.
    """
    above = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" not in os.environ:
        return above
    with suppress(psutil.Error):
        for process in psutil.Process().parents():
            if process.name().startswith("slurmstepd"):
                return process.pid
    return above


class Phases:
    """Records when each phase of the run begins, if there is a folder. File system errors lose entries, not the run."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._current: str | None = None
        self._before: list[str | None] = []

    def begin(self, phase: str | None) -> None:
        """Begins a phase and ends the one before it; None ends the run."""
        if phase == self._current:
            return
        self._current = phase
        if self._directory is not None:
            with suppress(OSError):
                self._directory.mkdir(parents=True, exist_ok=True)
                _append(self._directory / PHASES, {"time": round(time.time(), 3), "phase": phase})

    def enter(self, phase: str) -> None:
        """Begins a phase that interrupts the current one until `leave`."""
        self._before.append(self._current)
        self.begin(phase)

    def leave(self) -> None:
        """Resumes the phase that was interrupted."""
        if self._before:
            self.begin(self._before.pop())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context manager that enters a phase and leaves it."""
        self.enter(phase)
        try:
            yield
        finally:
            self.leave()


def gpu_memory() -> Callable[[str], list[int | None]]:
    """A function of the bytes `used` or `total` on each GPU that this process sees through NVML.

    A GPU that does not answer has None; without a driver or `nvidia-ml-py` there are no GPUs.
    """
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        devices = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # no binding, no driver, or one that this binding does not support
        return lambda what: []

    def of(device: Any, what: str) -> int | None:
        try:
            return int(getattr(nvml.nvmlDeviceGetMemoryInfo(device), what))
        except nvml.NVMLError:
            return None

    return lambda what: [of(device, what) for device in devices]


class Sampler:
    """Measures memory; that of the root process is counted with that of all its descendants, except this process."""

    def __init__(self, root: int) -> None:
        self._gpus = gpu_memory()
        self._root: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._root = psutil.Process(root)

    def ended(self) -> bool:
        """True if the root has ended or is a zombie."""
        try:
            return self._root is None or not self._root.is_running() or self._root.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True

    def sample(self) -> dict[str, Any]:
        """Bytes in use now: `rss` of all processes, `host`, `shm` in /dev/shm, and `gpu`, a list with one per GPU."""
        memory = psutil.virtual_memory()
        now = {"time": round(time.time(), 3), "rss": self._resident(), "host": memory.total - memory.available}
        return self._with_others(now, "used")

    def totals(self) -> dict[str, Any]:
        """Total bytes of each memory on this node: `host`, `shm` and `gpu`."""
        return self._with_others({"host": psutil.virtual_memory().total}, "total")

    def _with_others(self, line: dict[str, Any], what: str) -> dict[str, Any]:
        """The line with the bytes `used` or `total` of /dev/shm, 0 where there is none, and of GPUs, if any."""
        line["shm"] = 0
        with suppress(OSError):
            line["shm"] = int(getattr(shutil.disk_usage("/dev/shm"), what))
        gpus = self._gpus(what)
        return {**line, "gpu": gpus} if gpus else line

    def _resident(self) -> int:
        total = 0
        if self._root is None:  # ended before the sampler began
            return total
        with suppress(psutil.Error):
            for process in (self._root, *self._root.children(recursive=True)):
                if process.pid != os.getpid():
                    with suppress(psutil.Error):
                        total += process.memory_info().rss
        return total


class Record:
    """The file of this node: a line for the start, then one for each sample that differs from the last one written."""

    def __init__(self, directory: Path, *, seconds: float, totals: Mapping[str, Any]) -> None:
        self.path = directory / f"{os.environ.get('SLURMD_NODENAME') or platform.node() or 'node'}.jsonl"
        self._written: dict[str, Any] | None = None
        self._highest: list[int] = []
        self._held: list[dict[str, Any]] = []
        self._failed = False
        self._line({"start": round(time.time(), 3), "seconds": seconds, "total": totals})

    def add(self, sample: dict[str, Any]) -> None:
        """Writes the sample, or holds it back."""
        last = self._written
        due = last is None or len(self._held) + 1 >= HELD or _changed(_values(last), _values(sample))
        # A value above all that were written is written: the file must keep peaks.
        if due or any(
            now is not None and now > most + LEAST_CHANGE
            for most, now in zip(self._highest, _values(sample), strict=True)
        ):
            self._write(sample)
        else:
            self._held.append(sample)

    def failed(self, error: Exception) -> None:
        """Records, once, why samples are missing."""
        if not self._failed:
            self._failed = self._line({"error": f"{type(error).__name__}: {error}"})

    def close(self) -> None:
        """Writes the newest sample, if it was held back."""
        if self._held:
            self._write(self._held[-1])

    def _write(self, sample: dict[str, Any]) -> None:
        self._held = []
        # A sample that could not be written does not count as the last one, so that a gap remains a gap.
        self._written = sample if self._line(sample) else None
        values = [value or 0 for value in _values(sample)]
        self._highest = [max(pair) for pair in zip(self._highest or values, values, strict=True)]

    def _line(self, line: Mapping[str, Any]) -> bool:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _append(self.path, line)
        except OSError:
            return False
        return True


def _append(path: Path, line: Mapping[str, Any]) -> None:
    """Appends a line in one write, on a new line even if the file ends with one that a kill cut off."""
    text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    with path.open("ab+", buffering=0) as stream:
        if (size := stream.seek(0, os.SEEK_END)) > 0:
            stream.seek(size - 1)
            if stream.read(1) != b"\n":
                text = b"\n" + text
        stream.write(text)


def _values(sample: Mapping[str, Any]) -> list[int | None]:
    return [sample["rss"], sample["host"], sample["shm"], *sample.get("gpu", ())]


def _changed(old: Sequence[int | None], new: Sequence[int | None]) -> bool:
    for before, now in zip(old, new, strict=True):
        if before is None or now is None:
            if before is not now:
                return True
        elif abs(now - before) > max(LEAST_CHANGE, TOLERANCE * before):
            return True
    return False


def _sample(
    record: Record,
    sampler: Sampler,
    seconds: float,
    *,
    numbers: Sequence[int],
    ended: Callable[[], bool],
    told: Callable[[int], bool],
) -> None:
    """Samples until `ended` (checked between samples) or `told` (called for each signal of `numbers`) is True.

    The signals must be blocked.
    """
    due = time.monotonic()
    over = False
    while not over:
        try:
            record.add(sampler.sample())
        except Exception as error:  # must never stop the run
            record.failed(error)
        due = max(due + seconds, time.monotonic())
        while not over and (left := due - time.monotonic()) > 0:
            got = signal.sigtimedwait(numbers, min(left, _LOOK))
            over = ended() if got is None else told(got.si_signo)
        over = over or ended()
    record.close()


def _wrap(command: Sequence[str], directory: Path, seconds: float) -> int:
    """Runs a command as a child and samples it; returns its exit code, 128 + N if signal N ended it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide the exit code
    numbers = (*_TO_ALL, signal.SIGCONT, signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        end_with_parent(signal.SIGTERM)

    try:
        # A new session, as signals to this process group would reach the command twice.
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=in_child)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126

    def told(number: int) -> bool:
        if number == signal.SIGCHLD:
            return process.poll() is not None
        process.send_signal(number)
        return False

    sampler = Sampler(process.pid)
    record = Record(directory, seconds=seconds, totals=sampler.totals())
    _sample(record, sampler, seconds, numbers=numbers, ended=lambda: process.poll() is not None, told=told)
    code = process.wait()
    return code if code >= 0 else 128 - code


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_ext.memory.sampler",
        description="Samples the memory of processes, host, /dev/shm and GPUs into DIR/NODE.jsonl.",
        usage="%(prog)s DIR [--seconds S] (--root PID | -- COMMAND ...)",
    )
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("--root", type=int, help="measure this process and its descendants until it ends")
    parser.add_argument("--parent", type=int, help="end with this process too, the one that starts the sampler")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="seconds between two samples (default: %(default)g)"
    )
    words = list(words)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    given = parser.parse_args(own)
    try:
        seconds = interval({KEY: {"seconds": given.seconds}})
    except ValueError as error:
        parser.error(str(error))
    assert seconds is not None
    if (given.root is None) == (not command):
        parser.error("give either --root PID or -- COMMAND ...")
    if command:
        return _wrap(command, given.directory, seconds)
    signal.pthread_sigmask(signal.SIG_BLOCK, (*_TO_ALL, STOP))
    end_with_parent(signal.SIGTERM)
    parent, sampler = given.parent or os.getppid(), Sampler(given.root)

    def ended() -> bool:
        return os.getppid() != parent or sampler.ended()

    def told(number: int) -> bool:
        return number == STOP or ended()

    record = Record(given.directory, seconds=seconds, totals=sampler.totals())
    _sample(record, sampler, seconds, numbers=(*_TO_ALL, STOP), ended=ended, told=told)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
