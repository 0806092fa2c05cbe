"""Start of any job but training: runs `nemo-ext JOB` on the first node; each start resumes the previous one."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from nemo_ext.job.config import FAILED, INTERRUPTED, USER_ERROR, compose
from nemo_ext.job.files import write_text
from nemo_ext.job.ranks import ASKED, ENDED, ON_NODES
from nemo_ext.job.report import Report
from nemo_ext.job.run_directory import REPORT, write_config, write_versions
from nemo_ext.memory import sampler
from nemo_ext.memory.report import add_section
from nemo_ext.rl.job import SAVE_BY
from nemo_ext.serving.settings import LOOPBACK
from nemo_ext.slurm import attempts, beside
from nemo_ext.slurm.jobs import nodes_and_gpus, record_of, saved_step, submitted
from nemo_ext.slurm.ray_cluster import ClusterError, RayCluster
from nemo_ext.slurm.start import RANKS, Batch, Prepared, say

_SECONDS_TO_START = 120.0
"""Seconds after which all ranks of a training stage should be running, so that a signal reaches every rank."""


@dataclass
class Task(Batch):
    """Job other than training, interrupted (like Ctrl-C) on Slurm's signal or `margin` before the time limit."""

    cluster: RayCluster | None = None
    on_ray: bool = False
    at_loopback: bool = False
    ranks: tuple[int, int] = (1, 1)
    training: bool = False

    def prepare(self) -> Prepared:
        """Compose the config, to save it and to find the record folder; the job itself composes it again."""
        name = self.settings.job
        job, config = submitted(name), compose(name, self.words)
        self.at_loopback = job.server and config["serving"]["host"] in LOOPBACK
        if job.ranks == "asked":
            self.ranks = nodes_and_gpus(name, config, self.settings)
            if (nodes := self.ranks[0]) != int(os.environ["SLURM_JOB_NUM_NODES"]):
                raise ValueError(
                    f"launcher.nodes={nodes} differs from the allocation's {os.environ['SLURM_JOB_NUM_NODES']}: pass "
                    f"--nodes={nodes} to sbatch, as `nemo-ext submit` does"
                )
        self.on_ray = job.ray(config)
        self.record = record_of(name, config, self.settings)
        self.seconds = sampler.interval(config)
        folder = self.record / attempts.FOLDER
        write_config(folder, config)
        write_versions(folder, sys.argv)
        if self.limit is not None:
            signal.alarm(max(1, int(self.limit - self.margin())))
        return Prepared(record=self.record, step=self.saved(), target=None)

    def work(self) -> int:
        """Run the command, with its output in the job's output, and return its exit code."""
        command = ["-m", "nemo_ext.cli", self.settings.job, *self.words]
        if self.on_ray:
            return self._on_ray(command)
        job = submitted(self.settings.job)
        if job.server:
            if self.at_loopback:
                command.append(f"serving.host={reachable_name()}")
            if not any(word.startswith("port=") for word in self.words):
                command.append("port=0")  # the default port may be taken on a shared node
        if self.ranks[0] > 1:
            return self._on_nodes(command)
        words, others = self.srun(command, "--nodes=1", "--ntasks=1"), int(os.environ["SLURM_JOB_NUM_NODES"]) - 1
        asking = beside.asking(self.record) if job.server else []
        if job.serving != "replicas" or not (others or asking):
            return subprocess.run(words, env=self.environment(), check=False).returncode
        follow = ["-m", "nemo_ext.serving.follow", self.settings.job, *self.words]
        also = self.srun(follow, f"--nodes={others}", f"--ntasks={others}", "--relative=1") if others else None
        return self._serve(words, also, asking)

    def _on_nodes(self, command: list[str]) -> int:
        """Run a command on the first node, and the ranks it requests on all nodes; return the command's exit code."""
        folder = (self.record / attempts.FOLDER).absolute()  # with symbolic links, as the container may mount it
        (folder / ASKED).unlink(missing_ok=True)
        environment = {**self.environment(), ON_NODES: str(folder)}
        words = self.srun(command, "--overlap", "--nodes=1", "--ntasks=1")
        with subprocess.Popen(words, env=environment) as job:
            try:
                while job.poll() is None:
                    time.sleep(0.1)
                    if not (folder / ASKED).is_file():
                        continue
                    request = json.loads((folder / ASKED).read_text())
                    (folder / ASKED).unlink()
                    code = INTERRUPTED if self.stopped else self._ranks(job, environment, **request)
                    write_text(folder / ENDED, str(code))
            finally:
                job.terminate()  # after an error such as a full disk, it would wait forever
        return job.returncode

    def _ranks(
        self, job: subprocess.Popen[bytes], environment: dict[str, str], words: list[str], log: str | None
    ) -> int:
        """Run ranks on all nodes until they or the job that requested them ends, and return srun's exit code.

        Their output is appended to the file `log`; None for the job's output.
        """
        nodes, per_node = self.ranks
        options = [f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):
            options.append(f"--cpus-per-task={max(1, int(cores) // per_node)}")
        command = self.srun(words, "--overlap", *options, *RANKS)
        self.training, began, stopped_at = log is not None, time.monotonic(), math.inf
        with ExitStack() as stack:
            output = None if log is None else stack.enter_context(open(log, "ab"))
            variables = {**environment, **self.meeting()}
            ranks = stack.enter_context(subprocess.Popen(command, env=variables, stdout=output, stderr=output))
            while ranks.poll() is None:
                now = time.monotonic()
                stopped_at = min(stopped_at, now) if self.stopped else stopped_at
                early = self.training and stopped_at - began < _SECONDS_TO_START
                missed = early and now - stopped_at > self.margin() / 2
                if missed or job.poll() is not None:
                    ranks.terminate()  # srun ends its step
                    break
                time.sleep(0.1)
        self.training = False
        if self.stopped and not log:
            return INTERRUPTED
        return ranks.returncode if ranks.returncode >= 0 else FAILED

    def _serve(self, words: list[str], also: list[str] | None, asking: list[Path]) -> int:
        """Run a server until it ends, or until all stages that use it have ended, and return its exit code.

        Args:
            also: command that runs replicas on other nodes, or None; if one command ends, the other one is stopped.
            asking: record folders of the stages that use it; empty for a server that runs until it is stopped.
        """
        with ExitStack() as stack:
            first = stack.enter_context(subprocess.Popen(words, env=self.environment()))
            second = None if also is None else stack.enter_context(subprocess.Popen(also, env=self.environment()))
            unasked, looked = 0, time.monotonic()
            while first.poll() is None and (second is None or second.poll() is None or self.stopped):
                time.sleep(1)
                if not asking or unasked == beside.LOOKS or time.monotonic() - looked < beside.SECONDS:
                    continue
                looked = time.monotonic()
                unasked = 0 if beside.is_asked(asking) else unasked + 1
                if unasked == beside.LOOKS:
                    say("no stage uses this server any more: stopping it")
                    self.interrupt()
            for process in filter(None, (first, second)):
                if process.poll() is None:
                    process.terminate()
        return 0 if unasked == beside.LOOKS else first.returncode

    def _on_ray(self, command: list[str]) -> int:
        """Run the command with Ray on all nodes, and return its exit code."""
        names = self.hostnames()
        node = self.settings.cluster.node
        sizes = {
            "set.cluster.num_nodes": len(names),
            "set.cluster.gpus_per_node": os.environ.get("SLURM_GPUS_ON_NODE"),
            "gpu_memory_gib": None if node is None else node.gpu_memory_gib,
        }
        for key, value in sizes.items():
            name = f"nemo_rl.{key}="
            if value is not None and not any(word.startswith(name) for word in command):
                command.append(f"{name}{value}")
        environment, container = self.environment(), self.settings.cluster.container
        if self.limit is not None:
            # NeMo-RL saves and ends before this time.
            environment[SAVE_BY] = str(int(self.began + self.limit - super().margin()))
        try:
            with RayCluster(
                self.srun,
                names,
                job=self.job,
                logs=self.record / attempts.FOLDER,
                environment=environment,
                container=container.runtime if container.used else "none",
                memory=None if self.seconds is None else (self.record / sampler.FOLDER, self.seconds),
                say=say,
            ).running() as self.cluster:
                return self.cluster.run(command)
        except ClusterError as error:
            say(str(error))
            return FAILED

    def interrupt(self) -> None:
        """Interrupt the job as if by Ctrl-C; with Ray, which any signal would end, terminate only the driver.

        By this time, the driver has saved a checkpoint on its own. If the job is Puzzle and its ranks are training on
        all nodes, they are sent SIGTERM, on which they save.
        """
        if self.cluster is not None:
            self.cluster.interrupt()
        else:
            self.signal_steps("TERM" if self.training else "INT")

    def margin(self) -> float:
        """Seconds before the time limit at which the job is interrupted.

        For NeMo-RL, this is a quarter of the usual margin: it starts saving by itself when the full margin begins.
        """
        return super().margin() / 4 if self.on_ray else super().margin()

    def saved(self) -> int | None:
        """Step of the newest checkpoint; None for jobs without steps."""
        return saved_step(self.settings.job, self.record)

    def verdict(self, code: int) -> str | None:
        """Reason why the job stopped, None for exit code 0; code 130 means an interrupt or the job's own time limit."""
        if code == 0:
            return None
        if self.stopped or code == INTERRUPTED:
            return f"{attempts.TIME_LIMIT} ({'SIGUSR2' if self.stopped else 'its own'})"
        return "a mistake in the command or its files" if code == USER_ERROR else f"it failed (exit code {code})"

    def conclude(self) -> None:
        """Write a report on the nodes' memory for NeMo-RL; other jobs write their own report."""
        if self.on_ray and add_section(report := Report(self.record.name), self.record):
            report.write(self.record / REPORT)


def reachable_name() -> str:
    """This machine's name in Slurm or its host name, whichever resolves first; otherwise, the loopback address."""
    for name in (os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            socket.getaddrinfo(name or None, 0)
            if name:
                return name
    return "127.0.0.1"
