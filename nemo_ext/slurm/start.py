"""Start of a job on its first node: its record, the handling of Slurm's signals, and requeueing.

On SIGUSR2, which Slurm sends before the time limit, the work saves a checkpoint and the job is requeued. Without the
signal, this happens at the limit. A failed start is repeated as long as starts write new checkpoints. Slurm itself
requeues jobs that a node failure has killed.
"""

import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from nemo_ext.job.config import FAILED, USER_ERROR
from nemo_ext.job.files import no_room, write_text
from nemo_ext.job.ranks import reserve_port
from nemo_ext.slurm import attempts, beside, ends
from nemo_ext.slurm.cluster import call, duration
from nemo_ext.slurm.settings import Settings
from nemo_ext.slurm.status import queued

RANKS = ("--kill-on-bad-exit=1", "--distribution=block:block", "--cpu-bind=cores")
"""Options of srun for ranks. By default, Slurm distributes tasks cyclically over a node's sockets without binding. With
two sockets, half of the ranks would run on the socket far from their GPU, as GPUs are numbered socket by socket."""
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_SIGNAL_SECONDS = 600
"""Seconds before the time limit at which the scripts request SIGUSR2; `nemo-ext submit` requests `slurm.margin`."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""First port and number of ports for MASTER_PORT, below Linux's ephemeral range, which begins at 32768."""
_DRIVERS = {11: 450, 12: 525, 13: 580}
"""Mapping from CUDA major version to the minimum NVIDIA driver without cuda-compat
(docs.nvidia.com/deploy/cuda-compatibility)."""
_LATE = 30
"""Seconds; a job that ends less than this before its time limit counts as timed out."""


def reserve_port_from(first: int, count: int, number: int) -> socket.socket:
    """Bind a socket to one of `count` ports from `first` on: port `first + number % count`, or the next free one.

    `number` is the job's number, so that jobs on one node usually get different ports. Other jobs skip the port until
    the socket is closed. The job's own process can listen on it with SO_REUSEADDR, as torch.distributed does.
    """
    for offset in range(count):
        place = ("", first + (number + offset) % count)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(place)  # fails, without SO_REUSEADDR, if another socket is bound to the port
            probe.close()
            return reserve_port(place)
    raise ValueError(f"no port from {first} to {first + count - 1} is free on {platform.node()}; use another node")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """State of a job just before a start begins its work.

    Attributes:
        record: record folder, whose subfolder `slurm` records the starts.
        step: step of the newest checkpoint; None for jobs without steps.
        target: total number of steps; None for jobs without a fixed number of steps.
        notice: message for the user, or "".
        log: log file of the work; None for the job's output.
    """

    record: Path
    step: int | None
    target: int | None
    notice: str = ""
    log: Path | None = None


@dataclass
class Batch(ABC):
    """Base class for the start of a job.

    Attributes:
        settings: site and queue settings.
        words: arguments of the job.
        stopped: numbers of the signals received so far.
    """

    settings: Settings
    words: list[str]
    stopped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = os.environ.get("SLURM_JOB_ID", "")
        if not self.job:
            raise ValueError("SLURM_JOB_ID is not set: start this with sbatch, or `nemo-ext submit`")
        array = os.environ.get("SLURM_ARRAY_JOB_ID")
        # The last task of an array has the array's job id, which denotes the whole array in Slurm's commands.
        self.name = self.job if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        self.working = False
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.began, self.limit = time.time(), self.seconds_left()

    @abstractmethod
    def prepare(self) -> Prepared:
        """Compose and check the job's config, and return the job's state before the work."""

    @abstractmethod
    def work(self) -> int:
        """Run the work until it ends or is interrupted, and return its exit code."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make the work save its state and end."""

    @abstractmethod
    def saved(self) -> int | None:
        """Step of the newest checkpoint; None for jobs without steps."""

    @abstractmethod
    def verdict(self, code: int) -> str | None:
        """Reason why the work ended early, given its exit code; None if it is complete."""

    def goes_on(self) -> bool:
        """True if the work can be started again at once in this allocation."""
        return False

    @abstractmethod
    def conclude(self) -> None:
        """Complete a finished run, for example with a report."""

    def run(self) -> int:
        """Run until the work is finished or this Slurm job must stop; return the exit code."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, self._stop)
        if line := gpu_line(container=self.settings.cluster.container.used):
            say(line)
        while True:
            ready = self.prepare()
            record, of = ready.record, "" if ready.target is None else f" of {ready.target}"
            if ready.notice:
                say(ready.notice)
            if ready.step is not None and ready.target is not None and ready.step >= ready.target:
                return self._finish(record, f"step {ready.step}{of} is saved in {record}")
            self._refuse_second(record)
            stdout = Path("/proc/self/fd/1")
            output = stdout if stdout.is_file() else None
            began = attempts.begin(
                record,
                job=self.name,
                restart=self.restart,
                nodes=os.environ["SLURM_JOB_NODELIST"],
                step=ready.step,
                name=os.environ.get("SLURM_JOB_NAME", ""),
                output="" if output is None else str(output.resolve()),
            )
            _keep_record(record)
            at = "" if ready.step is None else f": step {ready.step}{of}"
            say(f"start {len(began)} of {record}{at}, nodes {began[-1].nodes}")
            log = ready.log or output
            written = log.stat().st_size if log is not None and log.exists() else 0
            beside.wait(record, say, self.stopped)
            self.working = True
            code = FAILED if self.stopped else self.work()  # stopped while composing
            self.working = False
            step, reason = self.saved(), self.verdict(code)
            if reason is None:
                attempts.end(record, step=step, reason="done")
                if ready.target is None:
                    return self._finish(record, f"{self.settings.job}, {record}")
                continue  # the next phase
            if self.stopped == [signal.SIGTERM] or self._is_cancelled():
                attempts.end(record, step=step, reason="cancelled")
                say(f"cancelled: {_saved_in(record, step)}the same command resumes")
                return 128 + signal.SIGTERM
            if not self.stopped and self.goes_on():
                attempts.end(record, step=step, reason=reason)
                say(f"{reason}: starting again here")
                continue
            lasting = ""
            mistake = code == USER_ERROR and not self.stopped  # losing a server to the same signal looks like one
            if log is not None and code and not reason.startswith(attempts.TIME_LIMIT):
                error = ends.first_error(log, written)
                error = no_room(record, error) or error
                reason = ": ".join(filter(None, (reason, error)))
                if ends.lasts(error) and not attempts.stepped(record, began[-1]):
                    lasting = "the error would recur in a new start"
            return self._again(
                ready, step, reason, lasting="it would recur in a new start" if mistake else lasting, code=code
            )

    def _refuse_second(self, record: Path) -> None:
        """Reject a start while another job of the same run is running, as both would write the same checkpoints."""
        before = attempts.read(record)
        if not before or before[-1].ended is not None or before[-1].job == self.name:
            return
        if before[-1].job in queued() and ends.is_own(record / attempts.FOLDER, before[-1].job):
            raise ValueError(f"{record}: job {before[-1].job} is running in this folder; wait for it, or cancel it")

    def _finish(self, record: Path, text: str) -> int:
        attempts.finish(record, step=self.saved(), words=self.words)
        self.conclude()
        say(f"finished: {text}")
        return 0

    def srun(self, words: Sequence[str], *options: str) -> list[str]:
        """Build the srun command that runs Python with the arguments `words`, in the container if there is one."""
        cluster = self.settings.cluster
        python = "python" if cluster.container.used else sys.executable
        inside = cluster.inside([python, *words], cluster.variables())
        return ["srun", *options, *cluster.srun_options(), *inside]

    def environment(self) -> dict[str, str]:
        """Environment for srun, which all processes inherit."""
        variables = self.settings.cluster.variables()
        if "SLURM_CPUS_PER_TASK" in os.environ:
            variables["SRUN_CPUS_PER_TASK"] = os.environ["SLURM_CPUS_PER_TASK"]  # srun no longer takes it from sbatch
        return {**os.environ, **variables}

    def meeting(self) -> dict[str, str]:
        """Environment variables with MASTER_ADDR and MASTER_PORT for torch.distributed, unless the site sets them."""
        names = self.hostnames()
        # A single node does not need a resolvable name.
        address = names[0] if len(names) > 1 else "127.0.0.1"
        port = str(self._reserved.getsockname()[1])
        return {"MASTER_ADDR": address, "MASTER_PORT": port, **self.settings.cluster.variables()}

    @cached_property
    def _reserved(self) -> socket.socket:
        """Socket bound to this job's port on the first node, which is this one, until the batch process ends."""
        return reserve_port_from(_FIRST_PORT, _PORTS, int(self.job))

    def hostnames(self) -> list[str]:
        """Names of the job's nodes, with this one first."""
        done = call(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]])
        done.check_returncode()
        return done.stdout.split()

    def _stop(self, number: int, frame: object) -> None:
        left = self.seconds_left() if number == signal.SIGUSR2 else None
        if left is not None and self.margin() < left <= max(_SIGNAL_SECONDS, self.settings.slurm.margin) + 60:
            signal.alarm(int(left - self.margin()))  # the script's signal is too early for a short job
            return
        self.stopped.append(signal.SIGUSR2 if number == signal.SIGALRM else number)
        if len(self.stopped) == 1:
            say(f"{signal.Signals(number).name}: stopping after this step, then saving")
            if self.working:
                self.interrupt()

    def signal_steps(self, name: str) -> None:
        """Send a signal to the job's steps; srun and this process do not get it, as srun would kill the steps."""
        done = call(["scancel", f"--signal={name}", self.name])
        if done.returncode and "Invalid job id" not in done.stderr:  # after cancellation the steps no longer exist
            say(f"scancel could not send {name} to the job's steps: {done.stderr.strip()}")

    def seconds_left(self) -> float | None:
        """Seconds left before this start's time limit; None without a limit."""
        return self._state()[1]

    def _is_cancelled(self) -> bool:
        """True if Slurm is ending the job well before its limit, as after scancel, so that it must not be requeued."""
        state, left = self._state()
        return state == "COMPLETING" and left is not None and left > _LATE

    def _state(self) -> tuple[str, float | None]:
        """State of the job in Slurm, and seconds left before this start's time limit (None without a limit)."""
        line = call(["squeue", "--noheader", f"--jobs={self.name}", "--format=%T|%L"]).stdout
        state, _, left = line.strip().partition("|")
        try:
            return state, duration(left).total_seconds()
        except ValueError:
            return state, None

    def margin(self) -> float:
        """Seconds reserved for the last checkpoint before the time limit; at most a quarter of the limit."""
        margin = self.settings.slurm.margin
        return margin if self.limit is None else min(margin, self.limit / 4)

    def _again(self, ready: Prepared, step: int | None, reason: str, *, lasting: str, code: int) -> int:
        """Requeue the job, or report why not, and return the exit code.

        Args:
            ready: state before the work.
            step: step of the newest checkpoint.
            reason: why the work ended.
            lasting: why a new start would fail as well; "" if it may succeed.
            code: exit code of the work.
        """
        record = ready.record
        ended = attempts.end(record, step=step, reason=reason)
        keeping = self.settings.slurm
        # Starts of earlier jobs do not count, as the user may have fixed their problem.
        starts = [attempt for attempt in ended if attempt.job == self.name]
        stop = lasting or attempts.verdict(starts, max_restarts=keeping.max_restarts, max_idle=keeping.max_idle)
        if stop is None and not keeping.requeue:
            stop = "slurm.requeue=false"
        if stop is not None:
            attempts.end(record, step=step, reason=reason, given_up=stop)
            at = "" if step is None else f" at step {step}"
            log = "" if ready.log is None else f"; log: {ready.log}"
            say(f"stopped{at}: {reason}; not queued again: {stop}{log}")
            return USER_ERROR if lasting and code == USER_ERROR else FAILED
        say(f"{_saved_in(record, step)}{reason}; queued again")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # requeueing sends it to this process
        done = call(["scontrol", "requeue", self.name])
        if done.returncode:
            attempts.end(record, step=step, reason=reason, given_up=f"scontrol requeue: {done.stderr.strip()}")
            say(f"the job could not be requeued ({done.stderr.strip()}); the same sbatch command resumes")
            return FAILED
        time.sleep(600)  # Slurm ends this process
        return FAILED


def gpu_line(*, container: bool) -> str:
    """Line that names this node's GPUs and driver, and warns if torch's CUDA requires a newer one; "" without GPUs.

    With `container`, ranks use the container's torch, whose CUDA is unknown here, so there is no warning.
    """
    if os.environ.get("SLURM_GPUS_ON_NODE", "0") == "0":
        return ""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        driver, comma, _ = gpus[0].partition(",")
        if not comma:
            raise ValueError(f"nvidia-smi: {driver}")
        kinds = Counter(line.partition(",")[2].strip() for line in gpus)
        line = f"{', '.join(f'{count} x {kind}' for kind, count in kinds.items())}, driver {driver}"
        cuda = None if container else _cuda_of_torch()
        if cuda and int(driver.partition(".")[0]) < (oldest := _DRIVERS.get(int(cuda.partition(".")[0]), 0)):
            line += f", but torch is built for CUDA {cuda}, which requires driver {oldest} or later"
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        line = f"unknown: {' '.join(str(error).split())}"
    return f"GPUs of {platform.node()}: {line}"


def _cuda_of_torch() -> str | None:
    """CUDA version that the installed torch is built for, read without importing torch; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    found = re.search(r"^cuda\b.*= '([\d.]+)'", Path(spec.origin).with_name("version.py").read_text(), re.M)
    return found and found[1]


def _saved_in(record: Path, step: int | None) -> str:
    return f"step {step} is saved in {record}; " if step else ""


def _keep_record(record: Path) -> None:
    """Save the script, command and environment of this start, without secrets."""
    folder = record / attempts.FOLDER
    script = os.environ.get("NEMO_EXT_SCRIPT", "")
    if script and Path(script).is_file():
        shutil.copyfile(script, folder / "script.sbatch")
    shown = {
        name: "(omitted)" if any(word in name.upper() for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
    }
    write_text(folder / "environment.txt", "".join(f"{name}={value}\n" for name, value in shown.items()))
    write_text(folder / "command.txt", " ".join(sys.argv) + "\n")


def say(text: str) -> None:
    """Print a line with a timestamp to the job's output."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)
