"""A start of any other job: `nemo-ext JOB` on the first node, which goes on by itself when it is started again."""

import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from nemo_ext.config import INTERRUPTED, USER_ERROR, compose
from nemo_ext.run_directory import write_config, write_versions
from nemo_ext.slurm import attempts
from nemo_ext.slurm.batch import Batch, Prepared
from nemo_ext.slurm.jobs import record_of, saved_step


@dataclass
class Task(Batch):
    """Interrupted as by Ctrl-C, at Slurm's signal or as long before the limit, should that not come."""

    interruption: ClassVar[str] = "INT"

    def prepare(self) -> Prepared:
        """Composed here only to be kept and to know where: the job composes for itself."""
        job = self.settings.job
        config: dict[str, Any] = compose(job, self.words)
        self.record = record_of(job, config, self.settings)
        folder = self.record / attempts.FOLDER
        write_config(folder, config)
        write_versions(folder, sys.argv)
        if self.limit is not None:
            signal.alarm(max(1, int(self.limit - self.margin())))
        return Prepared(record=self.record, step=self.saved(), target=None)

    def work(self) -> int:
        """The command, to its end; its output is the job's."""
        command = self.srun(["-m", "nemo_ext.cli", self.settings.job, *self.words], "--nodes=1", "--ntasks=1")
        return subprocess.run(command, env=self.environment(), check=False).returncode

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
        """Nothing: jobs write their own reports."""
