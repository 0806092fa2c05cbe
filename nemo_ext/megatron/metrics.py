"""Writer of metrics.jsonl: one JSON object per logged step, from the scalars that Megatron passes to TensorBoard.

Megatron's loop has no callbacks, but everything it measures goes through one writer object on the last rank. Ours
passes each scalar on to TensorBoard and collects a step's scalars in one line.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.core.timers import Timers

from nemo_ext.job.run_directory import truncate_metrics
from nemo_ext.megatron.forward_step import LOSS
from nemo_ext.memory.sampler import Phases


class ScalarWriter(Protocol):
    """The part of TensorBoard's SummaryWriter that Megatron's trainer uses."""

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Write the value of the scalar `tag` at a step."""

    def flush(self) -> None:
        """Write pending values to disk."""


NAMES = {LOSS: "loss", "learning-rate": "lr", "grad-norm": "grad_norm"}
"""Mapping from Megatron's tags to names in metrics.jsonl; other tags keep their names, with underscores."""

SECONDS_TO_FLUSH = 10.0

VALIDATION = " validation"
"""Suffix of evaluation tags, whose names get the prefix `val_` instead."""

LAST_OF_A_STEP = "iteration_time"
"""Last tag that Megatron writes in a step, except throughput, which may follow and goes only to TensorBoard."""

ENERGY = "iter-energy/gpu"
"""Tag of `megatron.log_energy`, written after a step: joules per GPU as measured by NVML, averaged over all ranks."""


STEPS = "interval-time"
"""Megatron's timer that runs during steps, but not between them."""

PHASES = {
    STEPS: "training",
    "evaluate": "validation",
    "save-checkpoint": "checkpoint",
    "save-checkpoint-non-persistent": "checkpoint",
    "load-checkpoint": "loading",
}
"""Mapping from the names of Megatron's timers to the run's phases."""


class CpuClock:
    """Pausable clock of the processor seconds that this process and its threads spend in steps."""

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self._now = now
        self._done = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start or resume counting, when steps begin."""
        self._since = self._now()

    def stop(self) -> None:
        """Pause counting, for example during a checkpoint."""
        self._done, self._since = self.seconds(), None

    def seconds(self) -> float:
        """Return the CPU time spent in steps so far, in seconds."""
        return self._done if self._since is None else self._done + self._now() - self._since


class PhaseTimers(Timers):
    """Megatron's timers, which also record a run's phases, as Megatron's loop marks them nowhere else."""

    phases: Phases
    cpu: CpuClock

    @classmethod
    def take_over(cls, timers: Timers, phases: Phases) -> None:
        """Convert Megatron's timers in place, as its functions already hold references to them; `phases` is the log."""
        timers.__class__ = cls
        timers.phases = phases
        timers.cpu = CpuClock()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """Return a timer, which records a phase if its name is in `PHASES`."""
        timer = super().__call__(name, log_level)
        return _PhaseTimer(timer, name, self.phases, self.cpu) if name in PHASES else timer


class _PhaseTimer:
    """Wrapper of a timer that begins a phase when it starts and returns to the previous phase when it stops."""

    def __init__(self, timer: Any, name: str, phases: Phases, cpu: CpuClock) -> None:
        self._timer, self._name, self._phases, self._cpu = timer, name, phases, cpu

    def start(self, *arguments: Any, **named: Any) -> None:
        if self._name == STEPS:
            self._phases.begin(PHASES[STEPS])
            self._cpu.start()
        else:
            self._phases.enter(PHASES[self._name])
        self._timer.start(*arguments, **named)

    def stop(self, *arguments: Any, **named: Any) -> None:
        self._timer.stop(*arguments, **named)
        if self._name == STEPS:
            self._cpu.stop()
        else:
            self._phases.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


@dataclass(eq=False)
class MetricsWriter:
    """Writer of metrics.jsonl that passes scalars on to TensorBoard.

    The line of a step has `step`, `tokens` (trained on so far), `loss`, `lr`, `grad_norm`, `tokens_per_second`,
    `seconds_per_step`, `mfu` from exact FLOPs, and `mfu_6n` from papers' 6N count, which excludes attention scores;
    both are null if the device's peak is unknown. Without a GPU it also has `cpu_seconds_per_step`; with
    `megatron.log_energy`, `joules_per_gpu` of the previous step; and whatever else Megatron logs. Each value of an
    evaluation has a line of its own with `step`, `tokens` and `val_loss` (or `val_kl_to_teacher`). Benchmark results
    have a line with `evaluate` and `evaluate_bits`, which map benchmarks to accuracies and to bits per byte.

    Attributes:
        path: path of the file; lines after `first_step`, left by an earlier start that was killed, are removed first.
        first_step: step that training starts or resumes from.
        tokens_per_step: tokens per step over all ranks.
        tokens_at: function that returns the number of tokens trained on up to a step.
        flops_per_token: training FLOPs per token (`architecture.cost.train_flops_per_token`).
        flops_per_token_6n: the same by the 6N count (`architecture.cost.six_n`).
        peak_flops: peak FLOP/s of all devices together, or None if unknown.
        cpu_seconds: function that returns the processor seconds that this rank spent in steps; None with a GPU.
        tensorboard: writer that also gets the scalars, or None.
        on_line: function called with each line.
    """

    path: Path
    _: KW_ONLY
    first_step: int
    tokens_per_step: int
    tokens_at: Callable[[int], int]
    flops_per_token: float
    flops_per_token_6n: float
    peak_flops: float | None
    cpu_seconds: Callable[[], float] | None = None
    tensorboard: ScalarWriter | None = None
    on_line: Callable[[dict[str, Any]], None] = lambda line: None

    def __post_init__(self) -> None:
        self._step: dict[str, Any] = {}
        self._joules: float | None = None
        self._last = (self.first_step, time.perf_counter(), self._cpu_now())  # the last step and when it ended
        truncate_metrics(self.path, self.first_step)

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        """Record a step's scalar, named by its TensorBoard tag; "... vs samples" duplicates go only to TensorBoard."""
        if self.tensorboard is not None:
            self.tensorboard.add_scalar(tag, value, step)
        if tag.endswith(" vs samples"):
            return
        if tag == ENERGY:
            self._joules = _finite(float(value))
            return
        measured = tag.removesuffix(VALIDATION)
        name = NAMES.get(measured, measured.replace(" ", "_").replace("-", "_"))
        number = float(value)
        if measured != tag:
            self.flush()
            self._write({"step": step, "tokens": self.tokens_at(step), f"val_{name}": _finite(number)})
            return
        if self._step and self._step["step"] != step:
            self.flush()
        if not self._step:
            self._step = {"step": step, "tokens": self.tokens_at(step)}
            self._time, self._cpu = time.perf_counter(), self._cpu_now()
        self._step[name] = _finite(number)
        if name == LAST_OF_A_STEP and "loss" in self._step:
            self.flush()  # now rather than with the next step: a checkpoint may follow, and a kill after it

    def add_evaluation(self, step: int, measured: Mapping[str, Mapping[str, float]]) -> None:
        """Write a line of benchmark results after a step.

        `measured` has the keys `evaluate` (accuracies) and `evaluate_bits` (bits per byte), each keyed by benchmark.
        """
        self.flush()
        line: dict[str, Any] = {"step": step, "tokens": self.tokens_at(step)}
        for key, values in measured.items():
            line[key] = {name: _finite(value) for name, value in values.items()}
            if self.tensorboard is not None:
                for name, value in values.items():
                    self.tensorboard.add_scalar(f"evaluate/{name}", value, step)
        self._write(line)

    def flush(self) -> None:
        """Write the collected step if it is complete (has a loss), and discard it otherwise."""
        line, self._step = self._step, {}
        if "loss" not in line:
            return
        last_step, last_time, last_cpu = self._last
        self._last = (line["step"], self._time, self._cpu)
        steps = max(1, line["step"] - last_step)
        # Megatron's own timer excludes evaluations and checkpoints; it does not report the very first step.
        seconds = line.pop("iteration_time", None) or (self._time - last_time) / steps
        rate = self.tokens_per_step / seconds
        line["seconds_per_step"] = seconds
        if self.cpu_seconds is not None:
            line["cpu_seconds_per_step"] = (self._cpu - last_cpu) / steps
        line["tokens_per_second"] = rate
        for name, flops in (("mfu", self.flops_per_token), ("mfu_6n", self.flops_per_token_6n)):
            line[name] = None if self.peak_flops is None else rate * flops / self.peak_flops
        if self._joules is not None:
            line["joules_per_gpu"], self._joules = self._joules, None
        self._write(line)

    def _cpu_now(self) -> float:
        return 0.0 if self.cpu_seconds is None else self.cpu_seconds()

    def close(self) -> None:
        """Write pending data to metrics.jsonl, and flush TensorBoard."""
        self.flush()
        if self.tensorboard is not None:
            # TensorBoard waits for its writer thread, forever if that has died, as on a full disk.
            flushing = threading.Thread(target=self.tensorboard.flush, daemon=True)
            flushing.start()
            flushing.join(SECONDS_TO_FLUSH)

    def __getattr__(self, name: str) -> Any:
        # Megatron also calls add_text and the like, which only TensorBoard has.
        if self.tensorboard is None:
            raise AttributeError(name)
        return getattr(self.tensorboard, name)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        self.on_line(line)


def _finite(number: float) -> float | None:
    """Return the number, or None (JSON null) if it is not finite."""
    return number if math.isfinite(number) else None
