"""The starts of a run on Slurm, one line each in its run directory, and whether it should be started again."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nemo_ext.job.files import write_text

FOLDER = "slurm"
ATTEMPTS = "attempts.json"
FINISHED = "finished.json"
TIME_LIMIT = "time limit"
"""What such a reason begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start.

    Attributes:
        job: Slurm's id.
        restart: how often Slurm had started this job before.
        nodes: their names as Slurm writes them.
        began: seconds since 1970.
        first_step: of the checkpoint that it went on from; 0 for none.
        ended: None while it runs, or where it was killed with its node.
        last_step: of the newest checkpoint at its end.
        reason: of its end; "" while it runs.
        counted: whether the job's progress shows in steps; if not, a start that ran to its time limit got on.
        given_up: why the job was not queued again after it; "" if it was.
    """

    job: str
    restart: int
    nodes: str
    began: float
    first_step: int
    ended: float | None = None
    last_step: int | None = None
    reason: str = ""
    counted: bool = True
    given_up: str = ""

    @property
    def progressed(self) -> bool:
        """Whether a newer checkpoint came of it."""
        if not self.counted:
            return self.reason.startswith(TIME_LIMIT)
        return (self.last_step or 0) > self.first_step


def read(run_dir: Path) -> list[Attempt]:
    """All starts, the oldest first."""
    path = run_dir / FOLDER / ATTEMPTS
    return [Attempt(**line) for line in json.loads(path.read_text())] if path.is_file() else []


def write(run_dir: Path, attempts: Sequence[Attempt]) -> None:
    """Replace the record."""
    write_text(run_dir / FOLDER / ATTEMPTS, json.dumps([asdict(each) for each in attempts], indent=1) + "\n")


def begin(run_dir: Path, *, job: str, restart: int, nodes: str, step: int | None) -> list[Attempt]:
    """Note a start; one before it that has no end was killed with its node or by Slurm.

    A run that was finished and has more steps now is not finished any more. `step` is None where none are counted.
    """
    (run_dir / FOLDER / FINISHED).unlink(missing_ok=True)
    before = [
        each
        if each.ended is not None
        else replace(each, ended=time.time(), last_step=step, reason="killed with its node, or by Slurm")
        for each in read(run_dir)
    ]
    start = Attempt(
        job=job, restart=restart, nodes=nodes, began=time.time(), first_step=step or 0, counted=step is not None
    )
    attempts = [*before, start]
    write(run_dir, attempts)
    return attempts


def end(run_dir: Path, *, step: int | None, reason: str, given_up: str = "") -> list[Attempt]:
    """Note the end of the newest start."""
    *before, last = read(run_dir)
    attempts = [*before, replace(last, ended=time.time(), last_step=step, reason=reason, given_up=given_up)]
    write(run_dir, attempts)
    return attempts


def verdict(attempts: Sequence[Attempt], *, max_restarts: int, max_idle: int) -> str | None:
    """Why a run should not be started once more; None if it should.

    Args:
        attempts: of one job, all of them ended.
        max_restarts: after the first start.
        max_idle: starts, one after the other, that no checkpoint came of.
    """
    idle = 0
    for each in reversed(attempts):
        if each.progressed:
            break
        idle += 1
    if idle >= max_idle:
        reasons = "; ".join(dict.fromkeys(each.reason for each in attempts[-idle:]))
        return f"{idle} starts without a new checkpoint ({reasons}): max_idle={max_idle}"
    if len(attempts) > max_restarts:
        return f"started {len(attempts)} times: max_restarts={max_restarts}"
    return None


def finish(run_dir: Path, *, step: int | None, words: Sequence[str]) -> None:
    """Mark the run as finished, by a job with these words."""
    write_text(run_dir / FOLDER / FINISHED, json.dumps({"step": step, "at": time.time(), "words": list(words)}) + "\n")


def finished(run_dir: Path) -> list[str] | None:
    """The words of the job that finished the run; None if it is not."""
    path = run_dir / FOLDER / FINISHED
    return list(json.loads(path.read_text()).get("words", ())) if path.is_file() else None
