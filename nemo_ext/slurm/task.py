"""A start of any other job: `nemo-ext JOB` on the first node, which goes on by itself when it is started again."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from nemo_ext.job.config import FAILED, INTERRUPTED, USER_ERROR, compose
from nemo_ext.job.files import write_text
from nemo_ext.job.run_directory import REPORT, write_config, write_versions
from nemo_ext.memory import sampler
from nemo_ext.memory.report import section
from nemo_ext.rl.job import SAVE_BY
from nemo_ext.slurm import attempts
from nemo_ext.slurm.jobs import record_of, saved_step
from nemo_ext.slurm.ray_cluster import ClusterError, RayCluster, ray_cluster
from nemo_ext.slurm.start import Batch, Prepared, say


@dataclass
class Task(Batch):
    """Interrupted as by Ctrl-C, at Slurm's signal or as long before the limit, should that not come."""

    cluster: RayCluster | None = None
    on_ray: bool = False

    def prepare(self) -> Prepared:
        """Composed here only to be kept and to know where: the job composes for itself."""
        job = self.settings.job
        config: dict[str, Any] = compose(job, self.words)
        self.on_ray = job == "rl" and config["engine"] == "nemo_rl"
        self.record = record_of(job, config, self.settings)
        self.seconds = sampler.interval(config)
        folder = self.record / attempts.FOLDER
        write_config(folder, config)
        write_versions(folder, sys.argv)
        if self.limit is not None:
            signal.alarm(max(1, int(self.limit - self.margin())))
        return Prepared(record=self.record, step=self.saved(), target=None)

    def work(self) -> int:
        """The command, to its end; its output is the job's."""
        command = ["-m", "nemo_ext.cli", self.settings.job, *self.words]
        if self.on_ray:
            return self._on_ray(command)
        return subprocess.run(
            self.srun(command, "--nodes=1", "--ntasks=1"), env=self.environment(), check=False
        ).returncode

    def _on_ray(self, command: list[str]) -> int:
        """With Ray on all nodes for as long as it runs."""
        names = subprocess.run(
            ["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True
        ).stdout.split()
        sizes = {"num_nodes": len(names), "gpus_per_node": os.environ.get("SLURM_GPUS_ON_NODE")}
        for key, value in sizes.items():
            name = f"nemo_rl.set.cluster.{key}="
            if value is not None and not any(word.startswith(name) for word in command):
                command.append(f"{name}{value}")
        environment, container = self.environment(), self.settings.cluster.container
        if self.limit is not None:
            # NeMo-RL saves before this time and ends.
            environment[SAVE_BY] = str(int(self.began + self.limit - super().margin()))
        try:
            with ray_cluster(
                self.srun,
                names,
                job=self.job,
                logs=self.record / attempts.FOLDER,
                environment=environment,
                container=container.runtime if container.used else "none",
                memory=None if self.seconds is None else (self.record / sampler.FOLDER, self.seconds),
                say=say,
            ) as self.cluster:
                return self.cluster.run(command)
        except ClusterError as error:
            say(str(error))
            return FAILED

    def interrupt(self) -> None:
        """As by Ctrl-C; on Ray, which every signal ends, the driver alone: what it could save it has saved before."""
        if self.cluster is not None:
            self.cluster.interrupt()
        else:
            self.signal_steps("INT")

    def margin(self) -> float:
        """NeMo-RL, which saves at a time that it is told, has most of the margin for it."""
        return super().margin() / 4 if self.on_ray else super().margin()

    def saved(self) -> int | None:
        """For RL the newest checkpoint's, for others there is none."""
        return saved_step(self.settings.job, self.record)

    def verdict(self, code: int) -> str | None:
        """Done is what ends with 0; 130 are jobs that were interrupted, or ended before a time that they were told."""
        if code == 0:
            return None
        if self.stopped or code == INTERRUPTED:
            return f"{attempts.TIME_LIMIT} ({'SIGUSR2' if self.stopped else 'its own'})"
        return "a mistake in the command or its files" if code == USER_ERROR else f"it failed (exit code {code})"

    def conclude(self) -> None:
        """With NeMo-RL a report of the nodes' memory; other jobs write their own."""
        if self.on_ray and (memory := section(self.record)):
            write_text(self.record / REPORT, f"# {self.record.name}\n\n{memory}")
