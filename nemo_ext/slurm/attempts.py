"""The record of a run's starts on Slurm, kept in its run directory, and whether it should be started again."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import noted
from nemo_ext.job.run_directory import METRICS, last_lines

FOLDER = "slurm"
ATTEMPTS = "attempts.json"
FINISHED = "finished.json"
TIME_LIMIT = "time limit"
"""Prefix of the reason of a start that reached its time limit."""


PASSED_OVER = "guard: "
"""Prefix of the reason of a start that ended at a step which the next one leaves out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start.

    Attributes:
        job: Slurm job id.
        restart: number of earlier starts of this job.
        nodes: node names in Slurm's notation.
        began: start time in Unix seconds.
        first_step: step of the checkpoint that it resumed from; 0 for none.
        ended: end time in Unix seconds; None while it runs, or until the next start if it was killed.
        last_step: step of the newest checkpoint at its end.
        reason: reason of its end; "" while it runs.
        counted: True if progress is measured in steps; if not, a start that reached its time limit made progress.
        lost: steps that it made after its last checkpoint, as far as they were logged.
        name: name of the job; "" if not recorded, as in older runs.
        output: path of the job's output; "" if it is no file or not recorded, as in older runs.
        given_up: reason why the job was not requeued after it; "" if it was; None if not recorded, as in older runs.
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
    lost: int = 0
    name: str = ""
    output: str = ""
    given_up: str | None = None

    @property
    def progressed(self) -> bool:
        """True if the start wrote a newer checkpoint or, without steps, reached its time limit."""
        if not self.counted:
            return self.reason.startswith(TIME_LIMIT)
        return (self.last_step or 0) > self.first_step


def read(run_dir: Path) -> list[Attempt]:
    """All starts of a run, oldest first."""
    return [Attempt(**line) for line in noted(run_dir / FOLDER / ATTEMPTS) or ()]


def write(run_dir: Path, attempts: Sequence[Attempt]) -> None:
    """Replace the record of starts."""
    write_text(run_dir / FOLDER / ATTEMPTS, json.dumps([asdict(each) for each in attempts], indent=1) + "\n")


def begin(
    run_dir: Path, *, job: str, restart: int, nodes: str, step: int | None, name: str = "", output: str = ""
) -> list[Attempt]:
    """Record a start; earlier starts without an end are marked as killed with their node or by Slurm.

    The mark of a finished run is removed, as it now has more steps to do. `step` is None for jobs without steps.
    """
    (run_dir / FOLDER / FINISHED).unlink(missing_ok=True)
    before = [
        each
        if each.ended is not None
        else replace(each, ended=time.time(), last_step=step, reason="killed with its node, or by Slurm")
        for each in read(run_dir)
    ]
    if before and step is not None:
        made = max((line["step"] for line in last_lines(run_dir / METRICS) if "step" in line), default=0)
        before[-1] = replace(before[-1], lost=max(0, made - step))
    start = Attempt(
        job=job,
        restart=restart,
        nodes=nodes,
        began=time.time(),
        first_step=step or 0,
        counted=step is not None,
        name=name,
        output=output,
    )
    attempts = [*before, start]
    write(run_dir, attempts)
    return attempts


def end(run_dir: Path, *, step: int | None, reason: str, given_up: str = "") -> list[Attempt]:
    """Record the end of the newest start."""
    *before, last = read(run_dir)
    attempts = [*before, replace(last, ended=time.time(), last_step=step, reason=reason, given_up=given_up)]
    write(run_dir, attempts)
    return attempts


def stepped(run_dir: Path, start: Attempt) -> bool:
    """True if a start logged a step."""
    metrics = run_dir / METRICS
    if not metrics.is_file() or metrics.stat().st_mtime < start.began:
        return False
    return any(line.get("step", 0) > start.first_step for line in last_lines(metrics))


def verdict(attempts: Sequence[Attempt], *, max_restarts: int, max_idle: int) -> str | None:
    """Reason not to start a run again after the starts of one job, or None; `max_idle` without a checkpoint end it."""
    attempts = [each for each in attempts if not each.reason.startswith(PASSED_OVER)]  # guard.most limits them
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
    """Mark the run as finished by a job with these arguments."""
    write_text(run_dir / FOLDER / FINISHED, json.dumps({"step": step, "at": time.time(), "words": list(words)}) + "\n")


def finished(run_dir: Path) -> list[str] | None:
    """Arguments of the job that finished the run, or None if it is not finished."""
    mark = noted(run_dir / FOLDER / FINISHED)
    return list(mark.get("words", ())) if mark is not None else None


def other_words(end: Sequence[str], own: Sequence[str]) -> list[str]:
    """Arguments that differ between a job that finished a run and one that would do it again.

    On Slurm the allocation has the place of launcher's words, and several nodes have an operation.
    """
    return sorted(word for word in set(end) ^ set(own) if not word.startswith(("launcher.", "operation=")))


def finished_at(run_dir: Path) -> float | None:
    """Unix time at which the run was marked as finished, or None if it is not finished."""
    mark = noted(run_dir / FOLDER / FINISHED)
    return float(mark["at"]) if mark is not None else None
