"""Runs a pipeline's stages one after the other on this machine (`nemo-ext pipeline`); resumable.

Starts and finished stages are recorded as for a job on Slurm (`nemo_ext.slurm.attempts`), so `nemo-ext submit` can
resume a pipeline that was begun here, and vice versa.
"""

import contextlib
import fcntl
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hydra.errors import HydraException
from rich.console import Console
from rich.live import Live
from rich.table import Table

from nemo_ext.endpoint.address import FILE
from nemo_ext.install import check_packages
from nemo_ext.job.config import FAILED, INTERRUPTED, compose
from nemo_ext.job.files import write_text
from nemo_ext.job.findings import Finding, errors
from nemo_ext.job.interrupts import signals_to
from nemo_ext.job.leases import Leases
from nemo_ext.job.parent import end_with_parent
from nemo_ext.job.progress import notice
from nemo_ext.job.registry import job as find
from nemo_ext.job.run_directory import target_of
from nemo_ext.pipeline.figures import figures_of, seconds_of
from nemo_ext.pipeline.report import write_report
from nemo_ext.pipeline.stages import Pipeline, Stage, coming, finished, read
from nemo_ext.serving.group import LOG as SERVER_LOG
from nemo_ext.serving.group import Replica
from nemo_ext.slurm import attempts
from nemo_ext.slurm.jobs import SHARDS, makes, saved_step
from nemo_ext.slurm.preflight import findings, other_tokenizers
from nemo_ext.slurm.settings import settings_of, split
from nemo_ext.slurm.status import PIPELINE, job_of, queued, queued_job
from nemo_ext.slurm.submit import by_megatron

LOCK = ".pipeline.lock"
"""File in a pipeline's folder that the command and its running job hold locked."""
LEASE = ".pipeline.lease"
"""File in a pipeline's folder that the command touches, in place of a lock, on a file system without locks."""
PATIENCE = 120.0
"""Seconds that a killed command's job has to save and end."""
_LEASE_SECONDS = PATIENCE / 2
"""Time after which the lease of a command that was killed on another machine is free."""
_LAST_LINES = 15
_SKIPPED = "skipped"


@dataclass(kw_only=True)
class Work:
    """State of a pipeline stage that runs on this machine.

    Attributes:
        config: composed config of its job.
        record: folder of the stage, with the record of its starts.
        log: file for its output.
        state: waiting, running, finished, finished before, failed or interrupted; for a server, waiting, running,
            stopped, failed or, if no stage uses it, skipped.
    """

    stage: Stage
    config: Mapping[str, Any]
    record: Path
    log: Path
    state: str = "waiting"
    began: float | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Total seconds of all starts, including the running one."""
        return seconds_of(self.record) + (0.0 if self.began is None else time.time() - self.began)

    def command(self) -> list[str]:
        """Return the arguments to pass to `nemo-ext` to run the job."""
        return [self.stage.job, *self.stage.own]


class _Stopped(NamedTuple):
    """Reason to end the command early: its exit code, and lines to print for the user."""

    code: int
    lines: list[str]


def run(words: Sequence[str], *, dry_run: bool) -> int:
    """Check all stages, then run the unfinished ones, and return the exit code.

    Raises:
        ValueError: an argument, the pipeline's file or a stage is invalid.
    """
    if site := [word for word in split(words)[0] if not word.startswith("--config-dir")]:
        raise ValueError(
            f"{site[0]} is an argument of `nemo-ext submit`, which queues the pipeline on Slurm; remove it"
        )
    pipeline = read(words)
    works = planned(pipeline)
    console = Console(highlight=False, soft_wrap=True)
    if not checked(pipeline, works, console, dry_run=dry_run):
        console.print("nothing was started: fix the errors first")
        return 2
    if dry_run:
        console.print("nothing was started: --dry-run")
        return 0
    with _alone(pipeline.run_dir) as lock, _signals() as received:
        _refuse_queued(works)
        for work in works:  # another command may have finished some meanwhile
            work.state = state_of(work, works)
        write_text(pipeline.run_dir / PIPELINE, pipeline.text)
        stopped: _Stopped | None = None
        try:
            with _Shown(works) as shown:
                for work in works:
                    if received or stopped is not None:
                        break
                    if work.state == "waiting" and not work.stage.server:
                        servers = [each for each in works if each.stage.name in work.stage.beside]
                        stopped = _run(work, servers, lock, shown, received)
        finally:
            if any(work.state.startswith("finished") for work in works):
                try:
                    notice(f"report: {write_report(pipeline, {work.stage.name: work.state for work in works})}")
                except (ValueError, OSError) as error:  # it must not hide an error of a stage
                    notice(f"the report could not be written: {error}")
        if received and stopped is None and any(w.state == "waiting" and not w.stage.server for w in works):
            stopped = _Stopped(INTERRUPTED, ["interrupted: the same command resumes"])
        if stopped is not None:
            for line in stopped.lines:
                notice(line)
            return stopped.code
    for work in works:
        if work.state == _SKIPPED:
            notice(f"{work.stage.name}: not started; to start it: {shlex.join(['nemo-ext', *work.command()])}")
    return 0


def report(words: Sequence[str]) -> int:
    """Write the report on the stages run here or on Slurm, and return the exit code.

    Raises:
        ValueError: no stage has begun, or an argument or the pipeline's file is invalid.
    """
    pipeline = read(words)
    records = [each for stage in pipeline.stages for each in _records(pipeline.run_dir / stage.name)]
    if not any(attempts.read(record) for record in records):
        raise ValueError(
            f"run_dir={pipeline.run_dir}: no stage of this pipeline has started there; run the pipeline first"
        )
    states = {}
    for stage in pipeline.stages:
        record = pipeline.run_dir / stage.name
        begun = "begun" if any(attempts.read(each) for each in _records(record)) else "waiting"
        states[stage.name] = begun if _finished_at(record) is None else "finished"
    notice(f"report: {write_report(pipeline, states)}")
    return 0


def planned(pipeline: Pipeline) -> list[Work]:
    """Compose the configs of all selected stages and determine their states.

    Raises:
        ValueError: a config cannot be composed, or a stage cannot be resumed (`state_of`).
    """
    works = []
    for stage in pipeline.stages:
        try:
            config = compose(stage.job, stage.own)
        except (ValueError, HydraException) as error:
            raise ValueError(f"stages.{stage.name}: {error}") from error
        record = pipeline.run_dir / stage.name
        log = record / SERVER_LOG if stage.server else pipeline.run_dir / f"{stage.name}.log"
        works.append(Work(stage=stage, config=config, record=record, log=log))
    for work in works:
        work.state = state_of(work, works)
    return works


def state_of(work: Work, works: Sequence[Work]) -> str:
    """Determine the state before the run: `finished before`, `waiting`, or `skipped` for a server that no stage uses.

    Raises:
        ValueError: it finished with other arguments, or began before a stage that it depends on was finished.
    """
    if work.stage.server:
        used = any(work.stage.name in each.stage.beside for each in works)
        return "waiting" if used else _SKIPPED
    done = finished(work.record, _records(work.record), work.stage.own)
    starts = attempts.read(work.record)
    by_name = {each.stage.name: each for each in works}
    for parent in work.stage.after:
        parent_finished = _finished_at(by_name[parent].record)
        if starts and (parent_finished is None or parent_finished > starts[0].began):
            places = dict.fromkeys([*makes(work.stage.job, work.config), work.record])
            raise ValueError(
                f"stages.{work.stage.name} began before {parent} was "
                f"{'finished' if parent_finished is None else 'run again'}; "
                f"remove {' and '.join(map(str, places))} to run it on the new output"
            )
    return "finished before" if done else "waiting"


def _records(record: Path) -> list[Path]:
    """List the folders that record a stage's starts: one, or one per task of an array on Slurm."""
    shards = sorted((record / SHARDS).glob("*"))
    return shards if shards and not attempts.read(record) else [record]


def _finished_at(record: Path) -> float | None:
    """Unix time at which a stage's last task finished; None if a task has not finished."""
    ends = [attempts.finished_at(each) for each in _records(record)]
    return None if None in ends else max(end for end in ends if end is not None)


def checked(pipeline: Pipeline, works: Sequence[Work], console: Console, *, dry_run: bool) -> bool:
    """Check all waiting stages' configs, print the findings, and return True if there are no errors.

    A dry run also prints the stages' commands.
    """
    by_name, error_lines = {work.stage.name: work for work in works}, list[str]()
    for work in works:
        if work.state != "waiting":
            if dry_run:
                console.print(f"{work.stage.name}: {work.state}", markup=False)
            continue
        earlier = [(each.job, by_name[each.name].config) for each in pipeline.before(work.stage)]
        written = coming(earlier)
        try:
            check_packages(find(work.stage.job), work.config)
        except ValueError as error:
            error_lines.append(f"error: {work.stage.name}: {error}")
        problems = findings(work.config, settings_of([f"job={work.stage.job}"]), coming=written, here=True)
        if find(work.stage.job).training:
            problems += other_tokenizers(work.config, [config for job, config in earlier if job == "tokenize"])
        if dry_run and find(work.stage.job).ranks == "slurm" and not errors(problems):
            problems += by_megatron(work.config, written)
        error_lines += [f"error: {work.stage.name}: {one.text}" for one in problems if one.kind == "error"]
        _print_findings(work, problems, console, dry_run=dry_run)
    for line in error_lines:  # below all commands, where they are noticed
        console.print(line, style="red", markup=False)
    return not error_lines


def _refuse_queued(works: Sequence[Work]) -> None:
    """Reject a stage that is queued or running on Slurm, as both jobs would write the same files."""
    waiting = [work for work in works if work.state == "waiting" and job_of(work.record)]
    queue = queued() if waiting and shutil.which("squeue") else {}
    for work in waiting:
        if job := queued_job(work.record, queue):
            raise ValueError(
                f"stages.{work.stage.name}: its Slurm job {job} is {queue[job]}; wait for it, or end it with "
                "`nemo-ext cancel`"
            )


def runs_here(run_dir: Path) -> bool:
    """Return whether `nemo-ext pipeline`, or a job left by a killed one, is running in the folder."""
    if not (run_dir / LOCK).exists():
        return False
    leases = Leases(run_dir, _LEASE_SECONDS)
    with (run_dir / LOCK).open("rb") as lock:
        if not _locked(lock.fileno(), leases):
            return True
    leases.drop(LEASE)
    return False


def _print_findings(work: Work, problems: Sequence[Finding], console: Console, *, dry_run: bool) -> None:
    if dry_run:
        console.print(f"{work.stage.name}:", style="bold", markup=False)
    for finding in problems:
        if finding.kind == "warning" or (dry_run and finding.kind == "note"):
            style = "yellow" if finding.kind == "warning" else ""
            console.print(
                f"{finding.kind}: {'' if dry_run else f'{work.stage.name}: '}{finding.text}", style=style, markup=False
            )
    if dry_run:
        console.print(shlex.join(["nemo-ext", *work.command()]), markup=False)


@contextmanager
def _alone(run_dir: Path) -> Iterator[int]:
    """Create and lock a pipeline's folder, after waiting for any job that a killed command has left running.

    Yields the lock's file descriptor, which jobs inherit, so that the lock is only free when command and job have
    ended. On a file system without locks, a lease that ends with the command takes its place.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir}: {error.strerror}; choose a directory that you can write to") from error
    leases, ended = Leases(run_dir, _LEASE_SECONDS), threading.Event()
    try:
        began = None
        while not _locked(lock, leases):
            if began is None:
                began = time.monotonic()
                notice(f"waiting until another command in {run_dir}, or the job of a killed one, ends")
            if time.monotonic() - began > PATIENCE:
                raise ValueError(
                    f"{run_dir}: another command is running in this folder; wait for it or choose another run_dir"
                )
            time.sleep(0.5)
        if leases.holds(LEASE):
            threading.Thread(target=_keep, args=(leases, ended), daemon=True).start()
        yield lock
    finally:
        ended.set()
        leases.drop(LEASE)
        os.close(lock)


def _locked(lock: int, leases: Leases) -> bool:
    """Try to lock a pipeline's folder, with a lease on a file system without locks; return False if it is locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return leases.take(LEASE)
    return True


def _keep(leases: Leases, ended: threading.Event) -> None:
    """Touch the lease on a pipeline's folder regularly, to show that this command is alive, until `ended` is set."""
    while not ended.wait(_LEASE_SECONDS / 6):
        with contextlib.suppress(OSError):
            leases.touch()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in a list, even if the shell has SIGINT ignored (`nemo-ext pipeline &`).

    Nothing is raised, so that no signal is lost and a stage's end is always recorded.
    """
    received = list[int]()
    with signals_to(lambda number, frame: received.append(number)):
        yield received


class _Shown:
    """Progress of the stages on stdout: a table updated in place on a terminal, or else a line per change."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, get_renderable=lambda: table_of(works))

    def __enter__(self) -> "_Shown":
        if self._console.is_terminal:
            self._live.start(refresh=True)
        for work in self._works:
            if work.state != "waiting":
                self.changed(work)
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._live.refresh()
            self._live.stop()
        else:
            self._console.width = 200
            self._console.print(table_of(self._works))

    def update(self) -> None:
        """Redraw the table."""
        if self._console.is_terminal:
            self._live.refresh()

    def changed(self, work: Work) -> None:
        """Show that a stage's state has changed."""
        self.update()
        if not self._console.is_terminal:
            timed = work.state != "running" and not work.stage.server
            parts = [work.state, _span(work.seconds) if timed else "", _figure(work)]
            self._console.print(f"{work.stage.name}: {', '.join(filter(None, parts))}")


def table_of(works: Sequence[Work]) -> Table:
    """Tabulate the stages with states, times and key figures."""
    table = Table("stage", "job", "state", "time", "figures", box=None, pad_edge=False, header_style="bold")
    styles = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow", "waiting": "dim"}
    for work in works:
        style = styles.get(work.state.partition(" ")[0])
        seconds = work.seconds
        span = _span(seconds) if seconds else ""
        table.add_row(work.stage.name, work.stage.job, work.state, span, _figure(work), style=style)
    return table


def _figure(work: Work) -> str:
    """Format a stage's key figures, preceded by the current step if it is running."""
    try:
        figures = figures_of(work.stage.job, work.record)
    except (ValueError, OSError):  # the report names the file
        return ""
    running = work.state == "running" and figures.step is not None
    step = f"step {figures.step:,}" + (f" of {figures.target:,}" if figures.target else "") if running else ""
    return ", ".join(filter(None, (step, figures.text)))


def _span(seconds: float) -> str:
    whole = round(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02d}"
    )


def _run(work: Work, servers: Sequence[Work], lock: int, shown: _Shown, received: list[int]) -> _Stopped | None:
    """Run a stage while its servers run.

    Args:
        servers: the server stages that it uses.
        lock: file descriptor of the pipeline's lock, which the job inherits.
        received: signals received so far, to which later ones are appended.

    Returns:
        Reason to stop the pipeline; None to continue.
    """
    with ExitStack() as served:
        for server in servers:
            try:
                served.enter_context(_serving(server, shown, received))
            except ValueError as error:
                server.state = "failed"
                shown.changed(server)
                return _Stopped(FAILED, [f"error: {server.stage.name}, the server of {work.stage.name}: {error}"])
        if received:
            return _Stopped(INTERRUPTED, [f"interrupted before {work.stage.name}: the same command resumes"])
        return _run_alone(work, lock, shown, received)


@contextmanager
def _serving(server: Work, shown: _Shown, received: list[int]) -> Iterator[None]:
    """Run a server until the block ends; the block begins once the server answers requests or a signal has arrived.

    Args:
        received: signals received so far, to which later ones are appended.

    Raises:
        ValueError: the server ended while starting.
    """
    replica = Replica(server.record)
    (server.record / FILE).unlink(missing_ok=True)
    server.state = "running"
    shown.changed(server)
    replica.start(server.config)
    try:
        while not received and not replica.is_up():
            time.sleep(0.2)
        yield
        if (code := replica.ended()) is not None:
            notice(
                f"{server.stage.name}: the server ended with exit code {code} while a stage used it: {replica.said()}"
            )
    finally:
        replica.stop()
    server.state = "stopped"
    shown.changed(server)


def _run_alone(work: Work, lock: int, shown: _Shown, received: list[int]) -> _Stopped | None:
    stage, step = work.stage, saved_step(work.stage.job, work.record)
    starts = attempts.read(work.record)
    if starts and starts[-1].ended is None:
        # A killed start has no end: take the last write to its log.
        ended = max(starts[-1].began, work.log.stat().st_mtime if work.log.exists() else 0.0)
        last = replace(starts[-1], ended=ended, last_step=step, reason="killed")
        attempts.write(work.record, [*starts[:-1], last])
    attempts.begin(work.record, job="", restart=len(starts), nodes=platform.node(), step=step)
    work.state, work.began = "running", time.time()
    shown.changed(work)
    command = [sys.executable, "-m", "nemo_ext.cli", *work.command()]
    with work.log.open("ab") as log:
        log.write(f"$ {shlex.join(['nemo-ext', *work.command()])}\n".encode())
        log.flush()
        position = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C reaches the job once, from us.
            start_new_session=True,
            # If the command is killed, the job gets SIGTERM, at which it saves.
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
            pass_fds=(lock,),
        )
        _wait(process, shown, received)
    interrupted = bool(received)
    code, why = process.returncode, ""
    trains = find(stage.job).ranks == "slurm"
    if trains and code == 0 and (saved_step(stage.job, work.record) or 0) < (target_of(work.record) or 0):
        why = "ended before its last step"
    elif code:
        why = "interrupted" if interrupted or code == INTERRUPTED else f"failed (exit code {code})"
    work.began = None
    attempts.end(work.record, step=saved_step(stage.job, work.record), reason=why or "finished")
    if not why:
        attempts.finish(work.record, step=saved_step(stage.job, work.record), words=stage.own)
    work.state = why.partition(" (")[0] or "finished"
    shown.changed(work)
    if interrupted or why == "interrupted":
        return _Stopped(INTERRUPTED, [f"interrupted in {stage.name}: the same command resumes (output: {work.log})"])
    if not why:
        return None
    with work.log.open("rb") as log:
        log.seek(position)
        lines = log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    message = f"error: {stage.name} {why}; full log: {work.log}; the same command resumes from there"
    return _Stopped(FAILED, [*lines, message])


def _wait(process: subprocess.Popen[bytes], shown: _Shown, received: list[int]) -> None:
    """Wait for a job to end, and pass on signals: the first two as Ctrl-C, while the third kills the job.

    `received` lists the signals received so far, and later ones are appended; `shown` is the progress display.
    """
    sent = 0
    while process.poll() is None:
        while sent < len(received):
            sent += 1
            if sent == 1:
                notice("stopping: the job saves, then ends (a second signal ends it without saving, a third kills it)")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT if sent < 3 else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        shown.update()
