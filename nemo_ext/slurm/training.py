"""Start of a training run, with one rank per GPU; all ranks read the same composed config."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_ext.job.config import FAILED, USER_ERROR
from nemo_ext.job.run_directory import LOG, last_checkpoint, read_config
from nemo_ext.megatron.guard import forget_stacks, pending, stood
from nemo_ext.slurm import attempts
from nemo_ext.slurm.start import RANKS, Batch, Prepared, say


@dataclass
class Training(Batch):
    """Start of a training run; if Slurm's signal is missing, Megatron's `exit_duration_in_mins` stops it in time."""

    made: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self) -> Prepared:
        """Compose the config with `nemo_ext.slurm.prepare`, in a separate process."""
        place = Path.cwd() / f".nemo_ext-{self.job}.json"
        left = self.seconds_left()
        words = [*self.words, *self._layout()]
        if left is not None and not any(word.startswith("megatron.exit_duration_in_mins=") for word in words):
            words.append(f"megatron.exit_duration_in_mins={max(1, int(left - self.margin()) // 60)}")
        try:
            if code := self._step("compose", str(place), *words):
                sys.exit(USER_ERROR if code == USER_ERROR else FAILED)
            self.made = json.loads(place.read_bytes())
        finally:
            place.unlink(missing_ok=True)
        return Prepared(
            record=Path(self.made["run_dir"]),
            step=self.made["step"],
            target=self.made["target"],
            notice=self.made["notice"],
            log=Path(self.made["run_dir"]) / LOG,
        )

    def work(self) -> int:
        """Run all ranks, with their output in the run's log, and return srun's exit code."""
        forget_stacks(Path(self.made["run_dir"]))
        command = self.srun(["-m", "nemo_ext.slurm.rank", self.made["config"]], *RANKS, "--label")
        with (Path(self.made["run_dir"]) / LOG).open("ab") as log:
            return subprocess.run(command, env=self.environment(), stdout=log, stderr=log, check=False).returncode

    def interrupt(self) -> None:
        """Send SIGTERM to the ranks, which makes Megatron save a checkpoint and exit."""
        self.signal_steps("TERM")

    def saved(self) -> int:
        """Step of Megatron's newest checkpoint; 0 if there is none."""
        return last_checkpoint(Path(self.made["run_dir"])) or 0

    def verdict(self, code: int) -> str | None:
        """Reason why the ranks ended; None if the target step is saved and no signal stopped them. `code` is srun's."""
        if self.stopped:
            return "time limit (SIGUSR2)"
        if self.saved() >= self.made["target"]:
            return None
        if code == 0:
            return "time limit (exit_duration_in_mins)"
        if (event := pending(Path(self.made["run_dir"]))) is not None:
            return f"{attempts.PASSED_OVER}{event.what} at step {event.step}"
        minutes = (read_config(Path(self.made["config"])).get("guard") or {}).get("minutes")
        return stood(Path(self.made["run_dir"]), minutes) or f"a rank failed (exit code {code})"

    def goes_on(self) -> bool:
        """Whether the job restarts: True after a step that failed the guard's checks, as a restart skips its batch."""
        return pending(Path(self.made["run_dir"])) is not None

    def conclude(self) -> None:
        """Write the report; the run counts as finished even if that fails."""
        if self._step("report", self.made["run_dir"]):
            say("the report could not be written: see the error above")

    def environment(self) -> dict[str, str]:
        """Environment for srun, with MASTER_ADDR and MASTER_PORT for torch.distributed."""
        return {**super().environment(), **self.meeting()}

    def _layout(self) -> list[str]:
        """Launcher overrides that set the numbers of nodes and ranks to the allocation's, instead of the recipe's."""
        variables = {"launcher.nodes": "SLURM_JOB_NUM_NODES", "launcher.nproc_per_node": "SLURM_NTASKS_PER_NODE"}
        if missing := [name for name in variables.values() if name not in os.environ]:
            raise ValueError(
                f"environment variables are not set: {', '.join(missing)}; pass --nodes and --ntasks-per-node to sbatch"
            )
        return [f"{key}={os.environ[name]}" for key, name in variables.items()]

    def _step(self, *words: str) -> int:
        """Run a command of `nemo_ext.slurm.prepare` in a separate process, and return its exit code."""
        return subprocess.run(
            self.srun(["-m", "nemo_ext.slurm.prepare", *words], "--nodes=1", "--ntasks=1"),
            env=self.environment(),
            check=False,
        ).returncode
