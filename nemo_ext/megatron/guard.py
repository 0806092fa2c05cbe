"""Guard of a training run (config section `guard`): ends the ranks at a bad step, and skips its batches afterwards.

If a loss or gradient norm is not finite, or a loss is far above the preceding ones, the ranks end and the step is
recorded. The run's next start resumes from the last checkpoint before that step and skips its batches, with Megatron's
`iterations_to_skip`. A rank that takes no step for too long writes its stack traces and ends too. Does not import torch
at module level.
"""

import faulthandler
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from nemo_ext.checkpoint.sound import back_to, newest_before
from nemo_ext.job.files import write_text
from nemo_ext.job.report import Report
from nemo_ext.job.run_directory import CHECKPOINTS, METRICS, read_metrics
from nemo_ext.job.settings import STRICT, Count, Whole, checked

EVENTS = "guard.json"
STACKS = "stacks"
TRIPPED = 3
"""Exit code of a rank that ends at a bad step or because it stalled."""
_GRACE = 30.0
"""Extra seconds after which faulthandler ends a process that the watching thread failed to end."""
_BLOCK = re.compile(r"^(?:Current t|T)hread .*$", re.MULTILINE)
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Guard:
    """The `guard` section of a training config.

    Attributes:
        nan: whether a loss or gradient norm that is not finite ends the start.
        spike: number of standard deviations above the mean loss of the last 128 steps (at least 64) beyond which a
            loss ends the start; None for no bound.
        before, after: number of further steps before and after the bad one whose batches are skipped too.
        most: maximum number of returns to the same checkpoint, after which the run stops.
        minutes: minutes without a step after which a rank writes its stack traces and ends; None for no limit.
    """

    nan: bool = False
    spike: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    before: Whole = 0
    after: Whole = 0
    most: Count = 3
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Guard":
        """Read the settings from a composed config; without the section, return the defaults, which guard nothing.

        Raises:
            ValueError: a key is unknown or a value is invalid.
        """
        return checked(cls, config.get("guard") or {}, "guard", strict=True)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Bad step that ended a start.

    Attributes:
        step: number of the step.
        what: description of the problem.
        skipped: first and last step whose batches later starts skip.
        at: time in Unix seconds.
        checkpoint: step of the checkpoint that the next start resumed from, 0 without a checkpoint; None until then.
    """

    step: int
    what: str
    skipped: tuple[int, int]
    at: float
    checkpoint: int | None = None


def events(run_dir: Path) -> list[Event]:
    """Read the record of a run's bad steps, oldest first."""
    path = run_dir / EVENTS
    return TypeAdapter(list[Event]).validate_json(path.read_bytes()) if path.is_file() else []


def _write(run_dir: Path, recorded: list[Event]) -> None:
    write_text(run_dir / EVENTS, json.dumps(TypeAdapter(list[Event]).dump_python(recorded), indent=1) + "\n")


def pending(run_dir: Path) -> Event | None:
    """Return the bad step that ended the run's last start, if no later start has handled it yet; otherwise None."""
    return next((event for event in events(run_dir) if event.checkpoint is None), None)


def turn_back(run_dir: Path, guard: Guard) -> str | None:
    """If the last start ended at a bad step, make the run resume from the last checkpoint before it.

    Returns:
        Message for the user; None if the last start did not end at a bad step.

    Raises:
        ValueError: see `check_events`.
    """
    recorded = events(run_dir)
    check_events(run_dir, guard)
    lines = []
    for number, event in enumerate(recorded):
        if event.checkpoint is not None:
            continue
        step = back_to(run_dir / CHECKPOINTS, event.skipped[0])
        recorded[number] = Event(**{**vars(event), "checkpoint": step})
        first, last = event.skipped
        batches = f"the batch of step {first}" if first == last else f"the batches of steps {first} to {last}"
        lines.append(f"guard: {event.what} at step {event.step}; resuming from step {step} and skipping {batches}")
    if lines:
        _write(run_dir, recorded)
    return "\n".join(lines) or None


def check_events(run_dir: Path, guard: Guard) -> None:
    """Check that the run has not already returned `guard.most` times to the checkpoint from which it would resume.

    Raises:
        ValueError: a bad step ended the last start, and earlier ones have used up the returns to its checkpoint.
    """
    if (event := pending(run_dir)) is None:
        return
    step = newest_before(run_dir / CHECKPOINTS, event.skipped[0])
    earlier = [each for each in events(run_dir) if each.checkpoint == step]
    if len(earlier) >= guard.most:
        steps = ", ".join(str(each.step) for each in [*earlier, event])
        raise ValueError(
            f"guard: {event.what} at step {event.step}; the run has already returned to step {step} {len(earlier)} "
            f"times (for steps {steps}): check the data and the learning rate, then raise guard.most to resume"
        )


def guard_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron's flags that skip a run's bad steps and turn off Megatron's own NaN checks.

    Raises:
        ValueError: see `Guard.from_config`; or every step up to `exit_interval` is skipped.
    """
    guard, megatron, flags = Guard.from_config(config), config["megatron"], dict[str, Any]()
    steps = _whole(megatron.get("iterations_to_skip"))
    for event in events(Path(str(config["run_dir"]))):
        steps |= set(range(event.skipped[0], event.skipped[1] + 1))
    if steps:
        flags["iterations_to_skip"] = sorted(steps)
    if guard.nan:
        # Megatron would raise, or run the step again and look for a broken GPU, before the step is logged.
        checks = {"no_check_for_nan_in_loss_and_grad": True, "rerun_mode": "disabled"}
        flags |= {name: value for name, value in checks.items() if megatron.get(name) is None}
    last, interval = megatron.get("train_iters"), megatron.get("save_interval")
    if interval and last in steps and last % int(interval) == 0:
        # Megatron saves at the end unless it has just saved, and counts a skipped step at the interval as saved.
        flags |= {"save_interval": int(interval) + 1, "save_retain_interval": None}
    stop = megatron.get("exit_interval")
    if steps and stop is not None and int(stop) in steps and int(stop) < int(megatron["train_iters"]):
        # Megatron's loop checks the interval only after a step that it takes.
        taken = max((step for step in range(1, int(stop)) if step not in steps), default=None)
        if taken is None:
            raise ValueError(
                f"megatron.exit_interval={stop} ends the run before its first step, as every step up to {stop} is "
                "skipped (megatron.iterations_to_skip, or by the guard); raise exit_interval, or remove it"
            )
        flags["exit_interval"] = taken
    return flags


def _whole(steps: Any) -> set[int]:
    """Read `megatron.iterations_to_skip`, a number, a list or None, as a set of steps."""
    try:
        return {int(step) for step in (steps if isinstance(steps, list | tuple) else [] if steps is None else [steps])}
    except (TypeError, ValueError):
        raise ValueError(f"megatron.iterations_to_skip={steps!r}: expected steps, as in [17,18]") from None


def read_and_drop(data_iterator: Any) -> None:
    """Read and discard a skipped step's batches on every rank; replaces Megatron's `dummy_train_step`.

    Megatron's own function reads only on the first tensor-parallel rank, and does not support virtual pipeline stages.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):  # once
        for iterator in filter(None, iterators):
            for _ in range(get_num_microbatches()):
                next(iterator)


class Watch:
    """Callable that checks every logged step, on the rank that logs.

    Args:
        guard: settings.
        run_dir: run directory; the losses of its earlier steps count towards the bound.
        first_step: step after which this start begins.
        begins: steps after which a phase begins; from then on, earlier losses no longer count.
    """

    def __init__(self, guard: Guard, run_dir: Path, first_step: int, begins: Sequence[int] = ()) -> None:
        from nemo_ext.megatron.stability import Outliers

        self._guard, self._run_dir, self._begins, self._step = guard, run_dir, begins, 0
        self._losses = Outliers(guard.spike or math.inf)
        for line in read_metrics(run_dir / METRICS):
            if line["step"] <= first_step and line.get("loss") is not None:
                self._add(line["step"], line["loss"])

    def _add(self, step: int, loss: float) -> None:
        self._enter(step)
        self._losses.add(loss)

    def _enter(self, step: int) -> None:
        if any(self._step <= begin < step for begin in self._begins):
            self._losses.norms.clear()
        self._step = step

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Check a line of metrics, and end the process if it belongs to a bad step.

        Raises:
            SystemExit: with code `TRIPPED`, after the event is recorded.
        """
        if "loss" not in line or (what := self._wrong(line)) is None:
            return
        step, guard = int(line["step"]), self._guard
        skipped = (max(1, step - guard.before), step + guard.after)
        _write(self._run_dir, [*events(self._run_dir), Event(step=step, what=what, skipped=skipped, at=time.time())])
        print(f"error: guard: {what} at step {step}", file=sys.stderr, flush=True)
        raise SystemExit(TRIPPED)

    def _wrong(self, line: Mapping[str, Any]) -> str | None:
        loss, bound = line["loss"], math.inf
        if self._guard.nan and loss is None:
            return "the loss is not finite"
        if self._guard.nan and "grad_norm" in line and line["grad_norm"] is None:
            return "the gradient norm is not finite"
        self._enter(int(line["step"]))
        if self._guard.spike is not None:
            bound = self._losses.bound()
        if loss is not None and loss > bound:
            return f"a loss of {loss:.4g} (limit {bound:.4g})"
        if loss is not None:
            self._losses.add(loss)
        return None


_alive: "Alive | None" = None


def here() -> None:
    """Report this rank's progress to its `Alive` watchdog, if it has one."""
    if _alive is not None:
        _alive()


class Alive:
    """Watchdog of a rank: unless called in time, it writes all threads' stack traces and ends the rank.

    Args:
        minutes: maximum number of minutes between two calls; the time starts with the first call.
        folder: folder for stack traces; this rank's file in it is overwritten.
        rank: number of this rank.
    """

    def __init__(self, minutes: float, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._seconds = 60 * minutes
        self._file = (folder / f"rank_{rank}.txt").open("w")
        self._called = math.inf
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="guard", daemon=True).start()
        global _alive
        _alive = self

    def __call__(self) -> None:
        """Restart the time limit."""
        self._called = time.monotonic()
        # In case the watching thread cannot run, because a library holds Python's lock.
        faulthandler.dump_traceback_later(self._seconds + _GRACE, exit=True, file=self._file)

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._called > self._seconds:
                faulthandler.dump_traceback(self._file)
                for child in psutil.Process().children(recursive=True):
                    child.kill()  # a checkpoint writer would keep the job step from ending
                os._exit(TRIPPED)


def stood(run_dir: Path, minutes: float | None) -> str | None:
    """Describe in one line where ranks stalled, from the stack traces that their watchdogs wrote.

    The result is None if there are no traces, or if `minutes`, the guard's time limit, is None.
    """
    if minutes is None:
        return None
    places = []
    for path in sorted((run_dir / STACKS).glob("rank_*.txt"), key=lambda each: int(each.stem.partition("_")[2])):
        # The main thread comes last.
        frame = _FRAME.search(_BLOCK.split(path.read_text(errors="replace"))[-1])
        if frame is not None:
            places.append(f"rank {path.stem.partition('_')[2]} in {frame[3]} ({Path(frame[1]).name}:{frame[2]})")
    if not places:
        return None
    return f"no step for {minutes:g} minutes: {', '.join(places)}; stacks: {run_dir / STACKS}"


def forget_stacks(run_dir: Path) -> None:
    """Remove the stack traces of the previous start."""
    shutil.rmtree(run_dir / STACKS, ignore_errors=True)


def add_section(report: Report, run_dir: Path) -> None:
    """Add a table of a run's bad steps, if there are any, to its report."""
    rows = [
        (
            event.step,
            event.what,
            f"{event.skipped[0]:,} to {event.skipped[1]:,}",
            "not yet" if event.checkpoint is None else event.checkpoint,
        )
        for event in events(run_dir)
    ]
    report.table("Bad steps", ("step", "problem", "batches skipped", "resumed from"), rows)
