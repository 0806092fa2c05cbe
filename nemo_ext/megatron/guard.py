"""Ends a start of training that has gone wrong, so that the next one leaves out what did it: the config's `guard`.

A loss or gradient norm that is not finite, or a loss far above those before it, ends the ranks and is recorded. The
next start goes back to the last checkpoint before it and over its batches, with Megatron's own `iterations_to_skip`. A
rank that makes no step for too long writes its stacks and ends too. No torch at module level.
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
"""Exit code of the rank that saw it."""
_GRACE = 30.0
"""Seconds after which a process whose thread cannot end it is ended by the interpreter's own watch."""
_BLOCK = re.compile(r"^(?:Current t|T)hread .*$", re.MULTILINE)
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Guard:
    """The `guard` section of a training config.

    Attributes:
        nan: whether a loss or gradient norm that is not finite ends the start.
        spike: deviations above the mean loss of the 128 steps before (64 are needed) from which a loss ends it; None
            for no such bound.
        before, after: further steps around the bad one whose batches are left out as well.
        most: times that one checkpoint may be gone back to; after that the run stops.
        minutes: without a step, after which a rank writes its stacks and ends; None for no limit.
    """

    nan: bool = False
    spike: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    before: Whole = 0
    after: Whole = 0
    most: Count = 3
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Guard":
        """Settings of a composed config; the defaults, which guard nothing, if it has none.

        Raises:
            ValueError: an unknown key or an invalid value.
        """
        return checked(cls, config.get("guard") or {}, "guard", strict=True)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What ended a start.

    Attributes:
        step: that went wrong.
        what: was wrong with it.
        skipped: first and last step whose batches are left out from then on.
        at: Unix seconds.
        checkpoint: step of the checkpoint that was gone back to, 0 for none; None until a start has done so.
    """

    step: int
    what: str
    skipped: tuple[int, int]
    at: float
    checkpoint: int | None = None


def events(run_dir: Path) -> list[Event]:
    """Events of a run, oldest first."""
    path = run_dir / EVENTS
    return TypeAdapter(list[Event]).validate_json(path.read_bytes()) if path.is_file() else []


def _write(run_dir: Path, found: list[Event]) -> None:
    write_text(run_dir / EVENTS, json.dumps(TypeAdapter(list[Event]).dump_python(found), indent=1) + "\n")


def pending(run_dir: Path) -> Event | None:
    """The event that ended the last start, if no start has gone back since."""
    return next((event for event in events(run_dir) if event.checkpoint is None), None)


def turn_back(run_dir: Path, guard: Guard) -> str | None:
    """Goes back to the last checkpoint before what ended the last start; returns what was done, None if nothing was.

    Raises:
        ValueError: see `check_events`.
    """
    found = events(run_dir)
    check_events(run_dir, guard)
    told = []
    for number, event in enumerate(found):
        if event.checkpoint is not None:
            continue
        step = back_to(run_dir / CHECKPOINTS, event.skipped[0])
        found[number] = Event(**{**vars(event), "checkpoint": step})
        first, last = event.skipped
        batches = f"the batch of step {first}" if first == last else f"the batches of steps {first} to {last}"
        told.append(f"guard: {event.what} at step {event.step}: back to step {step}, then over {batches}")
    if told:
        _write(run_dir, found)
    return "\n".join(told) or None


def check_events(run_dir: Path, guard: Guard) -> None:
    """Refuses to go back once more to a checkpoint that was gone back to often.

    Raises:
        ValueError: the last start ended by an event, and its checkpoint was gone back to `guard.most` times already.
    """
    if (event := pending(run_dir)) is None:
        return
    step = newest_before(run_dir / CHECKPOINTS, event.skipped[0])
    earlier = [each for each in events(run_dir) if each.checkpoint == step]
    if len(earlier) >= guard.most:
        steps = ", ".join(str(each.step) for each in [*earlier, event])
        raise ValueError(
            f"guard: {event.what} at step {event.step}; step {step} was gone back to {len(earlier)} times already "
            f"(for steps {steps}): look at the data and the learning rate, then set guard.most higher to go on"
        )


def guard_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's flags for the steps that a run leaves out, and against Megatron's own end at what is not finite.

    Raises:
        ValueError: see `Guard.from_config`; or every step until `exit_interval` is left out.
    """
    guard, megatron, flags = Guard.from_config(config), config["megatron"], dict[str, Any]()
    steps = _whole(megatron.get("iterations_to_skip"))
    for event in events(Path(str(config["run_dir"]))):
        steps |= set(range(event.skipped[0], event.skipped[1] + 1))
    if steps:
        flags["iterations_to_skip"] = sorted(steps)
    if guard.nan:
        # Megatron would raise, or run the step again and look for a broken GPU, before the step is logged.
        own = {"no_check_for_nan_in_loss_and_grad": True, "rerun_mode": "disabled"}
        flags |= {name: value for name, value in own.items() if megatron.get(name) is None}
    last, interval = megatron.get("train_iters"), megatron.get("save_interval")
    if interval and last in steps and last % int(interval) == 0:
        # Megatron saves at the end if it has not just done so, and takes a step that it leaves out for one that has.
        flags |= {"save_interval": int(interval) + 1, "save_retain_interval": None}
    stop = megatron.get("exit_interval")
    if steps and stop is not None and int(stop) in steps and int(stop) < int(megatron["train_iters"]):
        # Megatron's loop asks whether to end only after a step that it makes.
        made = max((step for step in range(1, int(stop)) if step not in steps), default=None)
        if made is None:
            raise ValueError(
                f"megatron.exit_interval={stop}: all steps until then are left out; set it higher, or null"
            )
        flags["exit_interval"] = made
    return flags


def _whole(given: Any) -> set[int]:
    """Steps of `megatron.iterations_to_skip`, one or a list."""
    try:
        return {int(step) for step in (given if isinstance(given, list | tuple) else [] if given is None else [given])}
    except (TypeError, ValueError):
        raise ValueError(f"megatron.iterations_to_skip={given!r}: give steps, as in [17,18]") from None


def read_and_drop(data_iterator: Any) -> None:
    """What Megatron calls for a step that is left out, for data of which every rank reads its own batches.

    Its own `dummy_train_step` reads on the first tensor-parallel rank alone, and not with virtual pipeline stages.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):  # once
        for iterator in filter(None, iterators):
            for _ in range(get_num_microbatches()):
                next(iterator)


class Watch:
    """Looks at every logged step, on the rank that logs.

    Args:
        guard: settings.
        run_dir: run directory; losses of its earlier steps count for the bound.
        first_step: step that this start begins after.
        begins: steps after which a phase begins, whose losses are others.
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
        """Ends the process at a step that has gone wrong.

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
            return f"a loss of {loss:.4g}, above {bound:.4g}"
        if loss is not None:
            self._losses.add(loss)
        return None


_alive: "Alive | None" = None


def here() -> None:
    """Says that this rank is alive, if somebody wants to know."""
    if _alive is not None:
        _alive()


class Alive:
    """Ends this process and its children, after writing the stacks of its threads, unless it is called again in time.

    Args:
        minutes: allowed between two calls; from the first on.
        folder: folder of stacks; this rank's file in it is made anew.
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
        """Begins to wait anew."""
        self._called = time.monotonic()
        # Should the thread below not run, as where a library holds Python's lock.
        faulthandler.dump_traceback_later(self._seconds + _GRACE, exit=True, file=self._file)

    def end(self) -> None:
        """Waits no longer."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._seconds / 4)):
            if time.monotonic() - self._called > self._seconds:
                faulthandler.dump_traceback(self._file)
                for child in psutil.Process().children(recursive=True):
                    child.kill()  # what writes checkpoints would keep a job's step from ending
                os._exit(TRIPPED)


def stood(run_dir: Path, minutes: float | None) -> str | None:
    """Where ranks stood that made no step for too long, in one line; None if none wrote its stacks."""
    if minutes is None:
        return None
    places = []
    for path in sorted((run_dir / STACKS).glob("rank_*.txt"), key=lambda each: int(each.stem.partition("_")[2])):
        # The main thread is the last.
        frame = _FRAME.search(_BLOCK.split(path.read_text(errors="replace"))[-1])
        if frame is not None:
            places.append(f"rank {path.stem.partition('_')[2]} in {frame[3]} ({Path(frame[1]).name}:{frame[2]})")
    if not places:
        return None
    return f"no step for {minutes:g} minutes: {', '.join(places)}; stacks: {run_dir / STACKS}"


def forget_stacks(run_dir: Path) -> None:
    """Removes the stacks of the start before."""
    shutil.rmtree(run_dir / STACKS, ignore_errors=True)


def add_section(report: Report, run_dir: Path) -> None:
    """Adds a section on a run's events to its report; nothing without any."""
    rows = [
        (
            event.step,
            event.what,
            f"{event.skipped[0]:,} to {event.skipped[1]:,}",
            "not yet" if event.checkpoint is None else event.checkpoint,
        )
        for event in events(run_dir)
    ]
    report.table("Steps that went wrong", ("step", "what", "batches left out", "back to"), rows)
