"""`nemo-ext pipeline`: the stages of a pipeline one after the other in processes of this machine, resumable.

A stage's record of starts, and the mark that it is finished, are those that a job on Slurm has
(`nemo_ext.slurm.attempts`), so that `nemo-ext submit` of the same pipeline goes on where this ends, and the other way.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
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
"""File in a pipeline's folder that its command and the job that it started hold open."""
PATIENCE = 120.0
"""Seconds in which the job of a killed command may save and end."""
_LAST_LINES = 15
_LEFT_OUT = "left out"


@dataclass(kw_only=True)
class Work:
    """A stage here.

    Attributes:
        stage: the stage.
        config: composed config of its job.
        record: its folder, with the record of starts.
        log: file of its output.
        state: waiting, running, finished, finished before, failed or interrupted; of a server waiting, running, stopped
            or, if no stage asks it, left out.
    """

    stage: Stage
    config: Mapping[str, Any]
    record: Path
    log: Path
    state: str = "waiting"
    began: float | None = field(default=None, repr=False)

    @property
    def seconds(self) -> float:
        """Time of all its starts."""
        return seconds_of(self.record) + (0.0 if self.began is None else time.time() - self.began)

    def command(self) -> list[str]:
        """The job's words after `nemo-ext`."""
        return [self.stage.job, *self.stage.own]


class _Stopped(NamedTuple):
    """Why the command ends before the last stage: its exit code, and lines for the user."""

    code: int
    lines: list[str]


def run(words: Sequence[str], *, dry_run: bool) -> int:
    """Check all stages, then run those that are not finished; returns the exit code.

    Raises:
        ValueError: for mistakes that the user can correct.
    """
    if site := [word for word in split(words)[0] if not word.startswith("--config-dir")]:
        raise ValueError(f"{site[0]}: is for `nemo-ext submit`, which queues this pipeline on Slurm: take it away")
    pipeline = read(words)
    works = planned(pipeline)
    console = Console(highlight=False, soft_wrap=True)
    if not checked(pipeline, works, console, dry_run=dry_run):
        console.print("nothing was started: mend the errors first")
        return 2
    if dry_run:
        console.print("nothing was started: --dry-run")
        return 0
    with _alone(pipeline.run_dir) as lock, _signals() as received:
        _refuse_queued(works)
        for work in works:  # a command that was waited for may have finished some
            work.state = state_of(work, works)
        write_text(pipeline.run_dir / PIPELINE, pipeline.text)
        stopped: _Stopped | None = None
        try:
            with _Shown(works) as shown:
                for work in works:
                    if received or stopped is not None:
                        break
                    if work.state == "waiting" and not work.stage.server:
                        beside = [each for each in works if each.stage.name in work.stage.beside]
                        stopped = _run(work, beside, lock, shown, received)
        finally:
            if any(work.state.startswith("finished") for work in works):
                try:
                    notice(f"report: {write_report(pipeline, {work.stage.name: work.state for work in works})}")
                except (ValueError, OSError) as error:  # a stage's own error counts more
                    notice(f"the report could not be written: {error}")
        if received and stopped is None and any(w.state == "waiting" and not w.stage.server for w in works):
            stopped = _Stopped(INTERRUPTED, ["interrupted: the same command goes on"])
        if stopped is not None:
            for line in stopped.lines:
                notice(line)
            return stopped.code
    for work in works:
        if work.state == _LEFT_OUT:
            notice(f"{work.stage.name}: {shlex.join(['nemo-ext', *work.command()])}")
    return 0


def report(words: Sequence[str]) -> int:
    """Write the report of what has been run here or on Slurm; returns the exit code.

    Raises:
        ValueError: for mistakes that the user can correct, or nothing has been run.
    """
    pipeline = read(words)
    records = [each for stage in pipeline.stages for each in _records(pipeline.run_dir / stage.name)]
    if not any(attempts.read(record) for record in records):
        raise ValueError(f"{pipeline.run_dir}: no stage of this pipeline has begun there")
    states = {stage.name: _state_without_checks(pipeline.run_dir / stage.name) for stage in pipeline.stages}
    notice(f"report: {write_report(pipeline, states)}")
    return 0


def _state_without_checks(record: Path) -> str:
    if _finished_at(record) is not None:
        return "finished"
    return "begun" if any(attempts.read(each) for each in _records(record)) else "waiting"


def planned(pipeline: Pipeline) -> list[Work]:
    """The stages with their configs.

    Raises:
        ValueError: a config cannot be composed, or a stage would never end.
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
    """`finished before` or `waiting`; `left out` for a server that no stage asks.

    Raises:
        ValueError: it was finished with other words, or begun before what it is made from was made.
    """
    if work.stage.server:
        asked = any(work.stage.name in each.stage.beside for each in works)
        return "waiting" if asked else _LEFT_OUT
    done = finished(work.record, _records(work.record), work.stage.own)
    starts = attempts.read(work.record)
    named = {each.stage.name: each for each in works}
    for parent in work.stage.after:
        made = _finished_at(named[parent].record)
        if starts and (made is None or made > starts[0].began):
            places = dict.fromkeys([*makes(work.stage.job, work.config), work.record])
            raise ValueError(
                f"{work.stage.name}: was begun before {parent} was {'finished' if made is None else 'made again'}: "
                f"remove {' and '.join(map(str, places))} to have it made from that"
            )
    return "finished before" if done else "waiting"


def _records(record: Path) -> list[Path]:
    """The folders of a stage's starts: its own, or those of an array's tasks on Slurm."""
    shards = sorted((record / SHARDS).glob("*"))
    return shards if shards and not attempts.read(record) else [record]


def _finished_at(record: Path) -> float | None:
    """Unix time at which all of a stage was finished; None if it is not."""
    ends = [attempts.finished_at(each) for each in _records(record)]
    return None if None in ends else max(end for end in ends if end is not None)


def checked(pipeline: Pipeline, works: Sequence[Work], console: Console, *, dry_run: bool) -> bool:
    """Check the configs of all stages to run, and print errors, in a dry run also commands; True without errors."""
    named, wrong = {work.stage.name: work for work in works}, list[str]()
    for work in works:
        if work.state != "waiting":
            if dry_run:
                console.print(f"{work.stage.name}: {work.state}", markup=False)
            continue
        earlier = [(each.job, named[each.name].config) for each in pipeline.before(work.stage)]
        written = coming(earlier)
        try:
            check_packages(find(work.stage.job), work.config)
        except ValueError as error:
            wrong.append(f"error: {work.stage.name}: {error}")
        found = findings(work.config, settings_of([f"job={work.stage.job}"]), coming=written, here=True)
        if find(work.stage.job).training:
            found += other_tokenizers(work.config, [config for job, config in earlier if job == "tokenize"])
        if dry_run and find(work.stage.job).ranks == "slurm" and not errors(found):
            found += by_megatron(work.config, written)
        wrong += [f"error: {work.stage.name}: {one.text}" for one in found if one.kind == "error"]
        _tell(work, found, console, dry_run=dry_run)
    for line in wrong:  # below all commands, where they are read
        console.print(line, style="red", markup=False)
    return not wrong


def _refuse_queued(works: Sequence[Work]) -> None:
    """Refuse a stage that a job on Slurm waits for or runs: both would write the same files.

    Raises:
        ValueError: naming the job, or squeue fails.
    """
    waiting = [work for work in works if work.state == "waiting" and job_of(work.record)]
    queue = queued() if waiting and shutil.which("squeue") else {}
    for work in waiting:
        if job := queued_job(work.record, queue):
            raise ValueError(
                f"{work.stage.name}: job {job} of it is {queue[job]}: wait for it, or `nemo-ext cancel` it"
            )


def runs_here(run_dir: Path) -> bool:
    """True if `nemo-ext pipeline`, or the job of one that was killed, runs in a folder."""
    if not (run_dir / LOCK).exists():
        return False
    with (run_dir / LOCK).open("rb") as lock:
        return not _locked(lock.fileno())


def _tell(work: Work, found: Sequence[Finding], console: Console, *, dry_run: bool) -> None:
    if dry_run:
        console.print(f"{work.stage.name}:", style="bold", markup=False)
    for one in found:
        if one.kind == "warning" or (dry_run and one.kind == "note"):
            style = "yellow" if one.kind == "warning" else ""
            console.print(
                f"{one.kind}: {'' if dry_run else f'{work.stage.name}: '}{one.text}", style=style, markup=False
            )
    if dry_run:
        console.print(shlex.join(["nemo-ext", *work.command()]), markup=False)


@contextmanager
def _alone(run_dir: Path) -> Iterator[int]:
    """Makes the folder and keeps other commands out of it; waits for the job of one that was killed.

    Yields the lock's file, which the jobs inherit: it is free only when the command and its job have ended.

    Raises:
        ValueError: another command runs in the folder, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"run_dir={run_dir}: {error.strerror}; choose a directory that can be written") from error
    try:
        began = None
        while not _locked(lock):
            if began is None:
                began = time.monotonic()
                notice(f"{run_dir}: waiting for another command there, or the job of a killed one, to end")
            if time.monotonic() - began > PATIENCE:
                raise ValueError(f"{run_dir}: another command is running in it; wait for it or choose run_dir=...")
            time.sleep(0.5)
        yield lock
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    """Takes the lock; False if another has it. A file system without locks lets everybody in."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        notice(f"{error.strerror}: nothing keeps a second command out of this folder")
    return True


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are collected in the list, also where the shell has us ignore SIGINT (`nemo-ext pipeline &`).

    Nothing is raised, so that none is lost and a stage's end is always noted.
    """
    received = list[int]()

    def note(number: int, frame: object) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Shown:
    """The stages: a table that is updated in place on a terminal, a line for each change elsewhere; on stdout."""

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
        """Draw the table anew."""
        if self._console.is_terminal:
            self._live.refresh()

    def changed(self, work: Work) -> None:
        """A stage's state has changed."""
        self.update()
        if not self._console.is_terminal:
            timed = work.state != "running" and not work.stage.server
            parts = [work.state, _span(work.seconds) if timed else "", _figure(work)]
            self._console.print(f"{work.stage.name}: {', '.join(filter(None, parts))}")


def table_of(works: Sequence[Work]) -> Table:
    """Stages, their states, times and key figures."""
    table = Table("stage", "job", "state", "time", "figures", box=None, pad_edge=False, header_style="bold")
    styles = {"running": "cyan", "finished": "green", "failed": "red", "interrupted": "yellow", "waiting": "dim"}
    for work in works:
        style = styles.get(work.state.partition(" ")[0])
        seconds = work.seconds
        span = _span(seconds) if seconds else ""
        table.add_row(work.stage.name, work.stage.job, work.state, span, _figure(work), style=style)
    return table


def _figure(work: Work) -> str:
    """Key figures, and of a running stage the step."""
    try:
        found = figures_of(work.stage.job, work.record)
    except (ValueError, OSError):  # the report names the file
        return ""
    running = work.state == "running" and found.step is not None
    step = f"step {found.step:,}" + (f" of {found.target:,}" if found.target else "") if running else ""
    return ", ".join(filter(None, (step, found.text)))


def _span(seconds: float) -> str:
    whole = round(seconds)
    return (
        f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if whole >= 3600
        else f"{whole // 60}:{whole % 60:02d}"
    )


def _run(work: Work, beside: Sequence[Work], lock: int, shown: _Shown, received: list[int]) -> _Stopped | None:
    """Run a stage to its end beside the servers that it asks; returns why the command ends with it, or None."""
    with ExitStack() as served:
        for server in beside:
            try:
                served.enter_context(_serving(server, shown, received))
            except ValueError as error:
                server.state = "failed"
                shown.changed(server)
                return _Stopped(FAILED, [f"error: {server.stage.name}, beside {work.stage.name}: {error}"])
        if received:
            return _Stopped(INTERRUPTED, [f"interrupted before {work.stage.name}: the same command goes on"])
        return _run_alone(work, lock, shown, received)


@contextmanager
def _serving(server: Work, shown: _Shown, received: list[int]) -> Iterator[None]:
    """A model that is served; entered when it answers, or a signal came.

    Raises:
        ValueError: the server has ended instead.
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
            notice(f"{server.stage.name}: the server ended with {code} while it was asked: {replica.said()}")
    finally:
        replica.stop()
    server.state = "stopped"
    shown.changed(server)


def _run_alone(work: Work, lock: int, shown: _Shown, received: list[int]) -> _Stopped | None:
    stage, step = work.stage, saved_step(work.stage.job, work.record)
    starts = attempts.read(work.record)
    if starts and starts[-1].ended is None:
        # What was killed leaves no end: its last sign of life is in the log.
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
            preexec_fn=_end_with_us,
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
        return _Stopped(INTERRUPTED, [f"interrupted in {stage.name}: the same command goes on (output: {work.log})"])
    if not why:
        return None
    with work.log.open("rb") as log:
        log.seek(position)
        lines = log.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
    told = f"error: {stage.name} {why}: whole log: {work.log}; the same command goes on from there"
    return _Stopped(FAILED, [*lines, told])


def _wait(process: subprocess.Popen[bytes], shown: _Shown, received: list[int]) -> None:
    """Wait for a job's end; each signal received is a Ctrl-C for the job, the third kills it."""
    sent = 0
    while process.poll() is None:
        while sent < len(received):
            sent += 1
            if sent == 1:
                notice("stopping: the job saves what it can and ends (again to hurry it, a third time to kill it)")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT if sent < 3 else signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        shown.update()


def _end_with_us() -> None:
    """Called in a job's process before exec: SIGTERM, at which jobs save, when the command is killed."""
    end_with_parent(signal.SIGTERM)
