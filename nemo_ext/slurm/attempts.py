"""Record of a run's starts on Slurm, kept in its run directory, and the decision on whether to start it again."""

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
"""Prefix of the end reason of a start that reached its time limit."""


PASSED_OVER = "guard: "
"""Prefix of the end reason of a start that ended at a step whose batch the next start skips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a job on Slurm.

    Attributes:
        job: Slurm job id.
        restart: number of earlier starts of this job.
        nodes: node list in Slurm's notation.
        began: start time in Unix seconds.
        first_step: step of the checkpoint that it resumed from; 0 if there was none.
        ended: end time in Unix seconds; None while it runs and, if it was killed, until the next start.
        last_step: step of the newest checkpoint at its end.
        reason: why it ended; "" while it runs.
        counted: whether progress is measured in steps; if not, reaching the time limit counts as progress.
        lost: number of steps logged after its last checkpoint.
        name: name of the job; "" if not recorded, as in older runs.
        output: path of the job's output; "" if it is not a file or not recorded, as in older runs.
        given_up: why the job was not requeued after this start; "" if it was; None if not recorded, as in older runs.
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
    """Read the record of a run's starts, oldest first."""
    return [Attempt(**line) for line in noted(run_dir / FOLDER / ATTEMPTS) or ()]


def write(run_dir: Path, attempts: Sequence[Attempt]) -> None:
    """Write all starts of a run to its record, in place of the earlier content."""
    write_text(run_dir / FOLDER / ATTEMPTS, json.dumps([asdict(attempt) for attempt in attempts], indent=1) + "\n")


def begin(
    run_dir: Path, *, job: str, restart: int, nodes: str, step: int | None, name: str = "", output: str = ""
) -> list[Attempt]:
    """Record a start, and mark earlier starts without an end as killed with their node or by Slurm; return all starts.

    If the run was marked as finished, the mark is removed, as the run now has more steps to do. `step` is the newest
    checkpoint's step, None for jobs without steps; the other arguments are fields of `Attempt`.
    """
    (run_dir / FOLDER / FINISHED).unlink(missing_ok=True)
    before = [
        attempt
        if attempt.ended is not None
        else replace(attempt, ended=time.time(), last_step=step, reason="killed with its node, or by Slurm")
        for attempt in read(run_dir)
    ]
    if before and step is not None:
        logged = max((line["step"] for line in last_lines(run_dir / METRICS) if "step" in line), default=0)
        before[-1] = replace(before[-1], lost=max(0, logged - step))
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
    """Record the end of the newest start (`step` is its `Attempt.last_step`), and return all starts."""
    attempts = read(run_dir)
    attempts[-1] = replace(attempts[-1], ended=time.time(), last_step=step, reason=reason, given_up=given_up)
    write(run_dir, attempts)
    return attempts


def stepped(run_dir: Path, start: Attempt) -> bool:
    """True if a start has logged a step."""
    metrics = run_dir / METRICS
    if not metrics.is_file() or metrics.stat().st_mtime < start.began:
        return False
    return any(line.get("step", 0) > start.first_step for line in last_lines(metrics))


def verdict(attempts: Sequence[Attempt], *, max_restarts: int, max_idle: int) -> str | None:
    """Reason not to start a job again after these starts, oldest first; None if it may be started again."""
    attempts = [attempt for attempt in attempts if not attempt.reason.startswith(PASSED_OVER)]  # see guard.most
    idle = 0
    for attempt in reversed(attempts):
        if attempt.progressed:
            break
        idle += 1
    if idle >= max_idle:
        reasons = "; ".join(dict.fromkeys(attempt.reason for attempt in attempts[-idle:]))
        return f"{idle} starts without a new checkpoint ({reasons}), and slurm.max_idle={max_idle}"
    if len(attempts) > max_restarts:
        return f"started {len(attempts)} times, and slurm.max_restarts={max_restarts}"
    return None


def finish(run_dir: Path, *, step: int | None, words: Sequence[str]) -> None:
    """Mark the run as finished at a step by a job with the arguments `words`."""
    write_text(run_dir / FOLDER / FINISHED, json.dumps({"step": step, "at": time.time(), "words": list(words)}) + "\n")


def finished(run_dir: Path) -> list[str] | None:
    """Arguments of the job that finished the run; None if it is not finished."""
    mark = noted(run_dir / FOLDER / FINISHED)
    return list(mark.get("words", ())) if mark is not None else None


def other_words(end: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the arguments in which the job that finished a run (`end`) and one that would repeat it (`own`) differ.

    Launcher and operation settings are ignored, as the allocation determines them.
    """
    return sorted(word for word in set(end) ^ set(own) if not word.startswith(("launcher.", "operation=")))


def finished_at(run_dir: Path) -> float | None:
    """Unix time at which the run was marked as finished; None if it is not finished."""
    mark = noted(run_dir / FOLDER / FINISHED)
    return float(mark["at"]) if mark is not None else None
