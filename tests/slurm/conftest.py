"""A real Slurm on this machine for the session: two names of it as nodes, without systemd or cgroups."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_ext.job.ranks import reserve_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
REPOSITORY = Path(__file__).parents[2]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
JOBS_A_CLUSTER, CLUSTERS = 1000, 20
"""Job ids of one cluster: the port at which ranks meet is 10000 + id % 20000."""
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
EnforcePartLimits=ALL
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
GresTypes=gpu
JobRequeue=1
KillWait=5
FirstJobId={first}
MinJobAge=3600
SlurmdParameters=config_overrides
{nodes}
PartitionName=boost_usr_prod Nodes=n1,n2 Default=YES MaxTime=24:00:00 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=32 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=32 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:4 State=UNKNOWN"
)


@dataclass(frozen=True)
class Slurm:
    """The cluster.

    Attributes:
        folder: its files.
        environment: environment variables of its commands.
    """

    folder: Path
    environment: dict[str, str]

    def call(self, *words: str, check: bool = True) -> str:
        """A command's output."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """State of a job: PENDING, RUNNING, COMPLETED ..."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def processes(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        """Processes of this cluster's jobs, with their environments; the machine may have other clusters."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                environment = process.environ()
                if environment.get("SLURM_CONF") == self.environment["SLURM_CONF"] and "SLURM_JOB_ID" in environment:
                    yield process, environment

    def lose(self, node: str) -> None:
        """Let a node fail: its processes are killed, and Slurm is informed."""
        jobs = self.call("squeue", "-h", "-w", node, "-o", "%A").split()
        _end(self.folder / f"{node}.pid", signal.SIGKILL)
        # First slurmstepd, which would report the end of its processes; job ids are this cluster's own.
        for process in psutil.process_iter(["cmdline"]):
            if any(f"slurmstepd: [{job}." in " ".join(process.info["cmdline"] or ()) for job in jobs):
                with suppress(psutil.Error):
                    process.kill()
        for process, environment in self.processes():
            if environment.get("SLURMD_NODENAME") == node:
                with suppress(psutil.Error):
                    process.kill()
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def repair(self, node: str) -> None:
        """Restart a node after `lose` (ReturnToService=2)."""
        self.call("slurmd", "-N", node)

    def wait(self, until: Callable[[], object], *, seconds: float = 240.0, what: Callable[[], str] = str) -> None:
        """Wait until a condition is true; fail with a message after a time limit."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, f"not within {seconds:g} s: {what()}\n{self.call('squeue', check=False)}"
            time.sleep(0.2)

    @staticmethod
    def outputs(folder: Path) -> str:
        """Output of jobs and their ranks below a folder."""
        files = sorted((*folder.rglob("*.out"), *folder.rglob("*.log")))
        return "".join(f"\n== {path}\n{path.read_text(errors='replace')[-4000:]}" for path in files)

    def end_of(self, job: str, outputs: Path, *, seconds: float = 240.0) -> str:
        """Final state of a job; fails with the outputs in a folder if the job does not end."""
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in ENDED:
            assert time.monotonic() < end, f"{state} after {seconds:g} s: {self.outputs(outputs)}"
            time.sleep(0.2)
        return state


@contextmanager
def job_ids() -> Iterator[int]:
    """First job id of a range that no other test cluster on this machine uses.

    Sessions reuse the same ids, and Ray's files are named by job: files of a killed session are removed.
    """
    for number in range(CLUSTERS):
        with Path("/tmp", f"nemo_ext-slurm-{number}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            first = 1001 + number * JOBS_A_CLUSTER
            for job in range(first, first + JOBS_A_CLUSTER):
                shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)
            yield first
            return
    raise RuntimeError(f"{CLUSTERS} clusters of tests are on this machine")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """The cluster of this worker."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian's slurmctld slurmd slurm-client munge)")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons are started as root here")
    with job_ids() as first, reserve_port() as control, reserve_port() as n1, reserve_port() as n2:
        yield from cluster(first, *(each.getsockname()[1] for each in (control, n1, n2)))


def cluster(first: int, control: int, *ports: int) -> Iterator[Slurm]:
    """Slurm's daemons in a separate folder: the first job id, and the ports of slurmctld and of each node."""
    # Not pytest's folder: the path of a socket has 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    names = dict(zip(("n1", "n2"), ports, strict=True))
    nodes = "\n".join(NODE.format(name=name, host=host, port=port) for name, port in names.items())
    facts = {"host": host, "folder": folder, "port": control, "nodes": nodes}
    # Ports and folders depend on the job, and must differ between two clusters on one machine.
    (folder / "slurm.conf").write_text(CONFIG.format(first=first, **facts))
    (folder / "gres.conf").write_text("".join(f"NodeName={n} Name=gpu Count=4 File=/dev/tty[0-3]\n" for n in names))
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": os.environ["PATH"] + ":/usr/sbin",
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("SLURM_JOB_ID", None)
    made = Slurm(folder, environment)
    files = (f"--{each}-file={folder}/munge.{each}" for each in ("key", "pid", "log", "seed"))
    made.call("munged", "--force", *files, f"--socket={folder}/munge.socket", "--num-threads=2")
    try:
        made.call("slurmctld", "-c")
        for name in names:
            made.call("slurmd", "-N", name)
        made.wait(lambda: made.call("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 2, what=lambda: "nodes")
        yield made
    finally:
        made.call("scancel", "--user=root", check=False)
        for name in (*(f"{each}.pid" for each in names), "slurmctld.pid", "munge.pid"):
            _end(folder / name)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def nemo_ext(slurm: Slurm, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs `nemo-ext` with the cluster; returns its output. Jobs of a failed test do not affect the next."""

    def call(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "nemo_ext.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, env=slurm.environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    yield call
    slurm.call("scancel", "--user=root", check=False)
    slurm.wait(lambda: not slurm.call("squeue", "-h"), what=lambda: "jobs that should end")
    for node in ("n1", "n2"):
        slurm.call("scontrol", "update", f"nodename={node}", "state=resume", check=False)


@pytest.fixture
def here(
    slurm: Slurm,
    nemo_ext: Callable[..., str],
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., str]:
    """`nemo_ext` in this process, which is faster: for submit, status and cancel."""

    def call(*words: str, code: int = 0) -> str:
        with monkeypatch.context() as patched:
            for name, value in slurm.environment.items():
                patched.setenv(name, value)
            ended, out, err = command(*words, cwd=tmp_path)
        assert ended == code, out + err
        return out + err

    return call


@pytest.fixture
def standin(slurm: Slurm, standins: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes ranks of this test's jobs start quickly; the returned function sets where they pause or that they fail."""

    def say(*, holds_at: str = "", fails: bool = False) -> None:
        asked = {"STAND_IN_HOLDS_AT": holds_at, "STAND_IN_FAILS": "1" if fails else ""}
        for name, value in {**standins.environment, **asked}.items():
            monkeypatch.setitem(slurm.environment, name, value)

    say()
    return say


@pytest.fixture
def vllm(slurm: Slurm, standins: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Serving arguments of this test's jobs: a fast-starting program replaces vLLM."""
    path = f"{standins.vllm(tmp_path)}{os.pathsep}{slurm.environment['PATH']}"
    monkeypatch.setitem(slurm.environment, "PATH", path)
    return ("cluster=testbed", "serving.engine=vllm", 'slurm.options=["--cpus-per-task=1"]')


def _end(file: Path, how: signal.Signals = signal.SIGTERM) -> None:
    with suppress(OSError, ValueError):
        process = int(file.read_text())
        os.kill(process, how)
        for _ in range(100):
            os.kill(process, 0)
            time.sleep(0.05)
