"""Status, logs and cancellation of runs, from Slurm's queue and the run directories. Works without slurmdbd."""

import getpass
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from nemo_ext.endpoint.address import FILE, read_address
from nemo_ext.job.files import no_room
from nemo_ext.job.registry import jobs
from nemo_ext.job.run_directory import CONFIG, LOG, METRICS, last_checkpoint, last_lines, newest, read_config, target_of
from nemo_ext.serving.members import FOLDER
from nemo_ext.slurm import attempts, ends
from nemo_ext.slurm.cluster import call
from nemo_ext.slurm.ends import JOB

PARENTS = "after.txt"
"""File in a run's folder `slurm` that lists the run directories of the runs it waits for."""
PIPELINE = "pipeline.yaml"
"""File in a pipeline's folder that lists its stages."""
_SILENT = 60.0
"""Seconds without a touch of its file after which a replica counts as down; nodes' clocks may differ."""
PATIENCE = 600.0
"""Seconds for which squeue may fail while a command waits for a job."""
_RETRY = 10.0
"""Seconds before a failed squeue is repeated."""
_LOOK = 1.0
"""Seconds between checks for a newer log to follow."""
_APART = 60.0
"""Seconds between a start and a submission beyond which the later of them is the newer job, whatever their ids."""
_TO_DO = {
    "JobHeldUser": "`scontrol release {job}` releases it",
    "JobHeldAdmin": "held by an administrator",
    "launch failed requeued held": "its node could not start it; `scontrol release {job}` tries again",
    "DependencyNeverSatisfied": "a job that it depends on failed: cancel this job, fix that one, and submit again",
}
"""Mapping from Slurm's reason to advice, for jobs that wait for an action by the user or an administrator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a run.

    Attributes:
        run_dir: run directory.
        job: Slurm job id; "" if none was submitted.
        state: Slurm's state, such as pending or running, with its reason; or finished; stopped, with the reason; not
            started, with the state of the run that it waits for; or not submitted.
        step: newest logged step, or newest saved step; for training in rounds, the number of completed rounds.
        target: total number of steps or rounds; None if unknown, as before the first start.
        loss: loss of the newest step; None if unknown.
        seconds_left: remaining time in seconds, estimated from the duration of the newest step; None if unknown.
        restarts: number of starts after the first.
        goodput: share of the time spent on useful steps (see the function `goodput`); None if unknown.
    """

    run_dir: Path
    job: str
    state: str
    step: int
    target: int | None
    loss: float | None
    seconds_left: float | None
    restarts: int
    goodput: float | None


def status_of(run_dir: Path, queue: dict[str, str]) -> Status:
    """Compute the status of a run; `queue` maps the ids of queued jobs to their states (see `queued`)."""
    folder = run_dir / attempts.FOLDER
    starts = attempts.read(run_dir)
    job = job_of(run_dir)
    is_queued = bool(queued_job(run_dir, queue))
    step, _ = newest(run_dir / METRICS)
    target = target_of(run_dir)
    at = last_checkpoint(run_dir) or 0
    if step:  # for `nemo-ext online`, the number of completed rounds
        at = int(step["step"]) if "step" in step else int(step["rounds"]) + 1
    left = None
    if step and target and step.get("seconds_per_step"):
        left = max(0, int(target) - at) * float(step["seconds_per_step"])
    if (folder / attempts.FINISHED).is_file() and not is_queued:
        state, left = "finished", None
    elif is_queued:
        state = queue[job] + _serves(run_dir) + _failures([start for start in starts if start.job == job])
    elif job and job not in {start.job for start in starts} and (parent := _unfinished_parent(run_dir)) is not None:
        # If the parent's job is still queued, this job itself was removed from the queue.
        why = ends.why(folder, job) if queued_job(parent, queue) else ""
        state = f"not started: {why}; {parent.name} is " if why else f"not started: {parent.name} is "
        state += status_of(parent, queue).state
    else:
        state = f"stopped: {_end(run_dir, job, starts)}" if starts or job else "not submitted"
    return Status(
        run_dir=run_dir,
        job=job,
        state=state,
        step=at,
        target=target,
        loss=None if step is None else step["loss"],
        seconds_left=left,
        restarts=max(0, len(starts) - 1),
        goodput=goodput(run_dir, starts),
    )


def goodput(run_dir: Path, starts: Sequence[attempts.Attempt]) -> float | None:
    """Share of the time since the first start that was spent on useful steps; None if no step was logged.

    It is estimated from the median duration of the last steps. The rest is time spent in the queue, on starting,
    evaluation and checkpoints, and on repeated or skipped steps.
    """
    lines = [line for line in last_lines(run_dir / METRICS) if line.get("seconds_per_step") and "step" in line]
    if not lines or not starts:
        return None
    useful = max(0, lines[-1]["step"] - starts[0].first_step) * median(line["seconds_per_step"] for line in lines)
    ended = max(time.time() if start.ended is None else start.ended for start in starts)
    return float(min(1.0, useful / max(1e-9, ended - starts[0].began)))


def _serves(run_dir: Path) -> str:
    """Text to add to a run's state: a model server's address, or that the server is not up; "" for other jobs."""
    config = run_dir / attempts.FOLDER / CONFIG
    if not config.is_file() or "served" not in (held := read_config(config)) or "port" not in held:
        return ""
    number = held["serving"]["replica"]
    file = run_dir / FILE if number is None else run_dir.parents[1] / FOLDER / f"{int(number):04}" / FILE
    try:
        return f", up at {read_address(file).url}" if is_fresh(file) else ", not up"
    except ValueError:
        return ", not up"


def is_fresh(file: Path) -> bool:
    """True if a model server has touched its file `endpoint.json` recently, and so is up."""
    try:
        return time.time() - file.stat().st_mtime < _SILENT
    except FileNotFoundError:
        return False


def _failures(starts: Sequence[attempts.Attempt]) -> str:
    """Text to add to a queued job's state: why its starts have failed since the last progress; "" if none has."""
    planned = (attempts.TIME_LIMIT, attempts.PASSED_OVER)
    failed = dict[str, list[int]]()
    for number, start in enumerate(starts, start=1):
        if start.progressed:
            failed.clear()
        elif start.reason and not start.reason.startswith(planned):
            failed.setdefault(start.reason, []).append(number)
    return "".join(
        f"; start{'s' if len(which) > 1 else ''} {', '.join(map(str, which))} failed: {reason}"
        for reason, which in failed.items()
    )


def _end(run_dir: Path, job: str, starts: Sequence[attempts.Attempt]) -> str:
    """Reason why a run, whose newest job is `job`, is no longer in the queue."""
    folder = run_dir / attempts.FOLDER
    last = starts[-1] if starts and starts[-1].job == job else None
    if last is None or last.ended is None:
        text = ends.why(folder, job) or no_room(run_dir) or ends.unknown(folder, job)
        if (room := no_room(run_dir)) and room not in text:
            text = f"{room}; {text}"
        if last is not None and last.counted:
            saved = max(job.saved_step(run_dir) for job in jobs() if job.saved_step)
            text += f"; step {saved} is saved" if saved > last.first_step else "; no new checkpoint was saved"
        return text
    if last.reason == "cancelled":
        by = ends.why(folder, job)
        return by if by.startswith(last.reason) else last.reason
    reason = last.reason
    if reason.startswith(attempts.TIME_LIMIT) and last.counted and not last.progressed:
        reason += "; no new checkpoint was saved"
    if last.given_up:
        if last.reason in last.given_up:
            return f"not queued again: {last.given_up}"
        return f"{reason}; not queued again: {last.given_up}"
    # If the job was requeued, it was removed from the queue before its next start.
    after = "" if last.given_up is None else ends.why(folder, job)
    return reason if not after or after in reason else f"{reason}; then {after}"


def _unfinished_parent(run_dir: Path) -> Path | None:
    listed = run_dir / attempts.FOLDER / PARENTS
    parents = [Path(line) for line in listed.read_text().splitlines()] if listed.is_file() else []
    return next((parent for parent in parents if attempts.finished(parent) is None), None)


def job_of(run_dir: Path) -> str:
    """Id of a run's newest job (such as `12_3` in an array); "" if it has none."""
    submitted = run_dir / attempts.FOLDER / JOB
    starts = attempts.read(run_dir)
    last = submitted.read_text().strip() if submitted.is_file() else ""

    if not last or not starts:
        return last or (starts[-1].job if starts else "")
    apart = starts[-1].began - submitted.stat().st_mtime
    if abs(apart) > _APART:
        return starts[-1].job if apart > 0 else last

    def number(job: str) -> int:
        first = job.partition("_")[0]
        return int(first) if first.isdecimal() else 0

    return max((last, starts[-1].job), key=number)


def queued_job(run_dir: Path, queue: Container[str]) -> str:
    """Id of a run's newest job if it is in the queue; "" if it is not, or if the id now belongs to another job."""
    job = job_of(run_dir)
    return job if job in queue and ends.is_own(run_dir / attempts.FOLDER, job) else ""


def queued(patience: float = 0.0) -> dict[str, str]:
    """Mapping from id to state, such as `pending (Priority)`, for the user's jobs in Slurm's queue.

    Args:
        patience: seconds for which a failing squeue is repeated, as when Slurm's controller restarts.

    Raises:
        ValueError: squeue is missing or fails.
    """
    end = time.monotonic() + patience
    while (done := call(["squeue", "--noheader", "--me", "--array", "--format=%i|%T|%r"])).returncode:
        if time.monotonic() < end:
            time.sleep(_RETRY)
            continue
        lines = done.stderr.strip().splitlines() or [f"squeue ended with exit code {done.returncode}"]
        raise ValueError(f"Slurm's queue cannot be read ({lines[-1]}); try again once `squeue` works")
    jobs = {}
    for line in done.stdout.splitlines():
        job, state, reason = line.split("|", 2)
        if (hint := _TO_DO.get(reason)) is not None:
            reason = f"{reason}: {hint.format(job=job)}"
        jobs[job] = state.lower() + (f" ({reason})" if reason not in ("None", "") else "")
    return jobs


def runs_below(places: Sequence[Path]) -> list[Path]:
    """Run directories with Slurm jobs at or below the given paths, sorted; raises ValueError if there are none."""
    runs = {
        folder.parent
        for place in places
        for folder in (place / attempts.FOLDER, *place.rglob(attempts.FOLDER))
        if (folder / attempts.ATTEMPTS).is_file() or (folder / JOB).is_file()
    }
    if not runs:
        raise ValueError(
            f"no run at or below {', '.join(map(str, places))} was submitted to Slurm; name other run directories"
        )
    return sorted(runs, key=_in_order)


def _in_order(run_dir: Path) -> list[tuple[int, list[str | int]]]:
    """Sort key that orders run directories by name, with a pipeline's stages in their order and numbers by value."""
    key = list[tuple[int, list[str | int]]]()
    for place in (*reversed(run_dir.parents), run_dir):
        pipeline = place.parent / PIPELINE
        stages = list(read_config(pipeline)["stages"]) if pipeline.is_file() else []
        number = stages.index(place.name) if place.name in stages else len(stages)
        words = [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", place.name)]
        key.append((number, words))
    return key


def show(places: Sequence[Path], *, as_json: bool = False) -> None:
    """Print the status of runs as a table or a JSON list."""
    queue = queued()
    rows = [status_of(run_dir, queue) for run_dir in runs_below(places)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1, default=str))
        return
    table = Table("run", "job", "state", "step", "left", "loss", "restarts", "goodput", box=None, pad_edge=False)
    for row in rows:
        steps = f"{row.step:,} / {'?' if row.target is None else f'{row.target:,}'}" if row.step or row.target else "-"
        loss = "" if row.loss is None else f"{row.loss:.3f}"
        cells = (str(row.run_dir), row.job, row.state, steps, _span(row.seconds_left), loss)
        table.add_row(*cells, str(row.restarts), "" if row.goodput is None else f"{row.goodput:.0%}")
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 400  # a file or a pipe has room
    console.print(table)


def log_of(run_dir: Path) -> Path:
    """Path of the ranks' log, or of the newest job's output if there is no log yet.

    Raises:
        ValueError: there is neither.
    """
    if (run_dir / LOG).is_file():
        return run_dir / LOG
    outputs = sorted((run_dir / attempts.FOLDER).glob("*.out"), key=lambda path: path.stat().st_mtime)
    if not outputs:
        raise ValueError(f"{run_dir}: no {LOG} and no output of a job yet; wait for its first start")
    return outputs[-1]


def follow(run_dir: Path, lines: int) -> NoReturn:
    """Follow a run's log: wait for its job, show the job's output, and switch to the ranks' log once it exists.

    Raises:
        ValueError: there is no log, and the run has no job in the queue.
    """
    shown: Path | None = None
    tail: subprocess.Popen[bytes] | None = None
    message = ""
    try:
        while True:
            try:
                path = log_of(run_dir)
            except ValueError:
                queue = queued(PATIENCE)
                if not (job := queued_job(run_dir, queue)):
                    raise
                if message != (message := f"waiting for job {job}: {queue[job]}"):
                    print(message, file=sys.stderr, flush=True)
                time.sleep(_LOOK)
                continue
            # Tasks of one array write concurrently, so only a later job's output replaces the followed one.
            if shown is None or (path != shown and (path.name == LOG or _array(path) != _array(shown))):
                if tail is not None:
                    tail.terminate()
                    tail.wait()
                print(path, file=sys.stderr, flush=True)
                tail = subprocess.Popen(["tail", f"--lines={lines}", "-F", f"--pid={os.getpid()}", str(path)])
                shown = path
            time.sleep(_LOOK)
    finally:
        if tail is not None:
            tail.terminate()


def _array(output: Path) -> str:
    """Read the job id from the name of an output file; for a task of an array, the id of the array."""
    return output.stem.partition("_")[0]


def cancel(run_dir: Path) -> list[str]:
    """Cancel the jobs of a run, or of all runs below a folder, and return their ids.

    Ranks save a checkpoint first, if Slurm's KillWait is long enough.

    Raises:
        ValueError: no job is in the queue, or scancel fails.
    """
    runs, queue = runs_below([run_dir]), queued()
    jobs = [queued_job(run, queue) for run in runs]
    waiting = [job for job in jobs if job]
    if not waiting:
        last = job_of(runs[-1])
        others = ", an id that now belongs to another job" if last in queue else ""
        raise ValueError(f"{run_dir}: no job in the queue, so there is nothing to cancel; the last was {last}{others}")
    # Dependent jobs first, so that they do not start in between.
    done = call(["scancel", *reversed(waiting)])
    if done.returncode:
        raise ValueError(
            f"scancel {' '.join(waiting)} failed ({done.stderr.strip()}); correct the cause and cancel again"
        )
    for run, job in zip(runs, jobs, strict=True):
        if job in waiting:
            ends.note(run / attempts.FOLDER, job, by=getpass.getuser())
    return waiting


def _span(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes = int(seconds // 60)
    return f"{minutes // 60}:{minutes % 60:02d} h"
