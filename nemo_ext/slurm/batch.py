"""What a script of `slurm/` becomes on the first node: composes once, starts the ranks, and keeps the run going.

    exec python -m nemo_ext.slurm.batch train recipe=... cluster=leonardo key=value

SIGUSR2, which Slurm sends before the time limit, has the ranks save; then the job is queued again. So has the limit
itself, told to Megatron as `exit_duration_in_mins`, should the signal not come. A start whose ranks fail is tried again
as long as new checkpoints come of it. What a node's failure killed Slurm queues again itself.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from nemo_ext.config import FAILED, USER_ERROR, mistakes_are_one_line
from nemo_ext.run_directory import LOG, last_checkpoint, write_text
from nemo_ext.slurm import attempts
from nemo_ext.slurm.cluster import duration
from nemo_ext.slurm.settings import Settings, settings_of, split

_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_SIGNAL_SECONDS = 600
"""Before the limit: when Slurm sends SIGUSR2, as the script asks for; `nemo-ext submit` asks for `slurm.margin`."""
_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below what Linux hands out by itself, 32768."""


@dataclass
class Batch:
    """One start of a job.

    Attributes:
        settings: of site and queue.
        words: of the job.
        stopped: the signal that ended it, if one did.
    """

    settings: Settings
    words: list[str]
    stopped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = os.environ.get("SLURM_JOB_ID", "")
        if not self.job:
            raise ValueError("SLURM_JOB_ID is not set: start this with sbatch, or `nemo-ext submit`")
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.limit = self._seconds_left()

    def run(self) -> int:
        """Train until the run is finished or this start has to end; the exit code."""
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, self._stop)
        while True:
            made = self._prepared()
            run_dir, step, target = Path(str(made["run_dir"])), int(str(made["step"])), int(str(made["target"]))
            if made["notice"]:
                _say(str(made["notice"]))
            if step >= target:
                attempts.finish(run_dir, step)
                self._step("report", str(run_dir))
                _say(f"finished: step {step} of {target} is saved in {run_dir}")
                return 0
            began = attempts.begin(
                run_dir, job=self.job, restart=self.restart, nodes=os.environ.get("SLURM_JOB_NODELIST", ""), step=step
            )
            _keep_record(run_dir)
            _say(f"start {len(began)} of {run_dir}: step {step} of {target}, nodes {began[-1].nodes}")
            code = self._ranks(run_dir, str(made["config"]))
            step = last_checkpoint(run_dir) or 0
            if step >= target and not self.stopped:
                attempts.end(run_dir, step=step, reason="done")
                continue  # with phases there is a next segment
            if self.stopped == [signal.SIGTERM]:
                attempts.end(run_dir, step=step, reason="cancelled")
                _say(f"cancelled: step {step} is saved in {run_dir}; the same command goes on")
                return 128 + signal.SIGTERM
            return self._again(run_dir, step, self._reason(code))

    def _prepared(self) -> Mapping[str, object]:
        """What `nemo_ext.slurm.prepare` composed: once for each start, by one process."""
        place = Path.cwd() / f".nemo_ext-{self.job}.json"
        left = self._seconds_left()
        words = [*self.words, *self._layout()]
        if left is not None and not any(word.startswith("megatron.exit_duration_in_mins=") for word in words):
            words.append(f"megatron.exit_duration_in_mins={max(1, int(left - self._margin()) // 60)}")
        try:
            self._step("compose", str(place), *words)
            made: dict[str, object] = json.loads(place.read_bytes())
        finally:
            place.unlink(missing_ok=True)
        return made

    def _layout(self) -> list[str]:
        """Nodes and ranks are the allocation's, whatever the recipe says."""
        given = {"launcher.nodes": "SLURM_JOB_NUM_NODES", "launcher.nproc_per_node": "SLURM_NTASKS_PER_NODE"}
        if missing := [name for name in given.values() if name not in os.environ]:
            raise ValueError(f"{', '.join(missing)} not set: give sbatch --nodes and --ntasks-per-node")
        return [f"{key}={os.environ[name]}" for key, name in given.items()]

    def _step(self, *words: str) -> None:
        """A command of `nemo_ext.slurm.prepare` on the first node, in the container if there is one."""
        done = subprocess.run(
            self._srun(["-m", "nemo_ext.slurm.prepare", *words], "--nodes=1", "--ntasks=1"),
            env=self._environment(),
            check=False,
        )
        if done.returncode:
            sys.exit(USER_ERROR if done.returncode == USER_ERROR else FAILED)

    def _ranks(self, run_dir: Path, config: str) -> int:
        """All ranks, to their end; their output is the run's log."""
        command = self._srun(["-m", "nemo_ext.slurm.rank", config], "--kill-on-bad-exit=1", "--label")
        with (run_dir / LOG).open("ab") as log:
            return subprocess.run(command, env=self._environment(), stdout=log, stderr=log, check=False).returncode

    def _srun(self, words: Sequence[str], *options: str) -> list[str]:
        cluster = self.settings.cluster
        python = "python" if cluster.container.used else sys.executable
        inside = cluster.inside([python, *words], cluster.variables())
        return ["srun", *options, *cluster.srun_options(), *inside]

    def _environment(self) -> dict[str, str]:
        """Of srun, which all ranks get."""
        names = subprocess.run(
            ["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True
        ).stdout.split()
        given = {
            "MASTER_ADDR": names[0],
            "MASTER_PORT": str(_FIRST_PORT + int(self.job) % _PORTS),
            **self.settings.cluster.variables(),
        }
        if "SLURM_CPUS_PER_TASK" in os.environ:
            given["SRUN_CPUS_PER_TASK"] = os.environ["SLURM_CPUS_PER_TASK"]  # srun no longer takes it from sbatch
        return {**os.environ, **given}

    def _stop(self, number: int, frame: object) -> None:
        left = self._seconds_left() if number == signal.SIGUSR2 else None
        if left is not None and self._margin() < left <= max(_SIGNAL_SECONDS, self.settings.slurm.margin) + 60:
            signal.alarm(int(left - self._margin()))  # of a short job, for which the script's time is too early
            return
        self.stopped.append(signal.SIGUSR2 if number == signal.SIGALRM else number)
        if len(self.stopped) == 1:
            _say(f"{signal.Signals(number).name}: the ranks finish their step and save")
            # Not to srun: it would kill them. Without --batch the signal goes to the steps alone.
            subprocess.run(["scancel", "--signal=TERM", self.job], check=False)

    def _seconds_left(self) -> float | None:
        """Of this start; None without a limit."""
        asked = ["squeue", "--noheader", f"--jobs={self.job}", "--format=%L"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        try:
            return duration(said).total_seconds()
        except ValueError:
            return None

    def _margin(self) -> float:
        """Seconds before the limit for the last checkpoint; a quarter of a short one."""
        margin = self.settings.slurm.margin
        return margin if self.limit is None else min(margin, self.limit / 4)

    def _reason(self, code: int) -> str:
        if signal.SIGUSR2 in self.stopped:
            return "time limit (SIGUSR2)"
        return "time limit (exit_duration_in_mins)" if code == 0 else f"a rank failed (exit code {code})"

    def _again(self, run_dir: Path, step: int, reason: str) -> int:
        """Queue the job once more, or say why not."""
        ended = attempts.end(run_dir, step=step, reason=reason)
        keeping = self.settings.slurm
        # What an earlier job met may be mended by now.
        own = [each for each in ended if each.job == self.job]
        stop = attempts.verdict(own, max_restarts=keeping.max_restarts, max_idle=keeping.max_idle)
        if stop is None and not keeping.requeue:
            stop = "slurm.requeue=false"
        if stop is not None:
            _say(f"stopped at step {step}: {reason}; not queued again: {stop}; log: {run_dir / LOG}")
            return FAILED
        _say(f"step {step} is saved: {reason}; queued again")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what requeueing sends to this process
        done = subprocess.run(["scontrol", "requeue", self.job], capture_output=True, text=True, check=False)
        if done.returncode:
            _say(f"scontrol requeue: {done.stderr.strip()}; the same sbatch command goes on")
            return FAILED
        time.sleep(600)  # Slurm ends this process
        return FAILED


def _keep_record(run_dir: Path) -> None:
    """The script, the command and the environment of this start, in the run directory."""
    folder = run_dir / attempts.FOLDER
    script = os.environ.get("NEMO_EXT_SCRIPT", "")
    if script and Path(script).is_file():
        shutil.copyfile(script, folder / "script.sbatch")
    shown = {
        name: "(left out)" if any(word in name.upper() for word in _SECRET) else value
        for name, value in sorted(os.environ.items())
    }
    write_text(folder / "environment.txt", "".join(f"{name}={value}\n" for name, value in shown.items()))
    write_text(folder / "command.txt", " ".join(sys.argv) + "\n")


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


def main() -> NoReturn:
    """The command; a user's mistake is one line and exit code 2, and the job is not queued again."""
    job, *words = sys.argv[1:]
    with mistakes_are_one_line():
        ours, theirs = split(words)
        settings = settings_of([*ours, f"job={job}"])
        sys.exit(Batch(settings, theirs).run())


if __name__ == "__main__":
    main()
