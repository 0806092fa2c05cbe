"""Writer of metrics.jsonl: one object per logged step, built from the scalars that Megatron passes to TensorBoard.

Megatron's loop has no callbacks, but everything it measures goes through one writer object on the last rank. Ours
passes each scalar to TensorBoard and collects the scalars of a step in one line.
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
        """Writes one value."""

    def flush(self) -> None:
        """Writes pending values to disk."""


NAMES = {LOSS: "loss", "learning-rate": "lr", "grad-norm": "grad_norm"}
"""Names in metrics.jsonl by Megatron's tag; other tags keep their names, with underscores."""

SECONDS_TO_FLUSH = 10.0

VALIDATION = " validation"
"""Suffix of the tags of an evaluation; their names get the prefix `val_`."""

LAST_OF_A_STEP = "iteration_time"
"""Tag that Megatron writes last in a step; throughput, which may follow, goes only to TensorBoard."""

ENERGY = "iter-energy/gpu"
"""Tag of `megatron.log_energy`, which follows a step: joules per GPU by NVML, the mean of all ranks."""


STEPS = "interval-time"
"""Megatron's timer that runs during steps, but not between them."""

PHASES = {
    STEPS: "training",
    "evaluate": "validation",
    "save-checkpoint": "checkpoint",
    "save-checkpoint-non-persistent": "checkpoint",
    "load-checkpoint": "loading",
}
"""Phases of a run by the name of Megatron's timer."""


class CpuClock:
    """Clock of the processor seconds that this process and its threads spend in steps; it can be paused."""

    def __init__(self, now: Callable[[], float] = time.process_time) -> None:
        self._now = now
        self._done = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Starts or resumes counting, when steps begin."""
        self._since = self._now()

    def stop(self) -> None:
        """Pauses counting, such as for a checkpoint."""
        self._done, self._since = self.seconds(), None

    def seconds(self) -> float:
        """Processor seconds spent in steps so far."""
        return self._done if self._since is None else self._done + self._now() - self._since


class PhaseTimers(Timers):
    """Megatron's timers, which also record the phases of a run: its loop marks them nowhere else."""

    phases: Phases
    cpu: CpuClock

    @classmethod
    def take_over(cls, timers: Timers, phases: Phases) -> None:
        """Converts Megatron's timers in place, because its functions already hold them."""
        timers.__class__ = cls
        timers.phases = phases
        timers.cpu = CpuClock()

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """See upstream."""
        timer = super().__call__(name, log_level)
        return _PhaseTimer(timer, name, self.phases, self.cpu) if name in PHASES else timer


class _PhaseTimer:
    """Timer that begins a phase when it starts and returns to the previous phase when it stops."""

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

    A line has `step`, `tokens` (trained so far), `loss`, `lr`, `grad_norm`, `tokens_per_second`, `seconds_per_step`,
    `mfu` by exact FLOPs and `mfu_6n` by 6N, the papers' count without attention scores (both null if the peak of the
    device is unknown), without a GPU `cpu_seconds_per_step`, with `megatron.log_energy` `joules_per_gpu` of the
    previous step, and whatever else Megatron logs. Each value of an evaluation has a separate line with `step`,
    `tokens` and `val_loss` (or `val_kl_to_teacher`), or with `evaluate`, the accuracy by benchmark, and
    `evaluate_bits`, bits per byte.

    Attributes:
        path: path of the file; lines after `first_step`, from an earlier start that was killed, are removed first.
        first_step: step that training starts or resumes from.
        tokens_per_step: tokens per step over all ranks.
        tokens_at: returns the number of tokens trained on after a step.
        flops_per_token: training FLOPs per token (`architecture.cost.train_flops_per_token`).
        flops_per_token_6n: the same by 6N (`architecture.cost.six_n`).
        peak_flops: FLOP/s of all devices together, or None.
        cpu_seconds: returns the processor seconds that this rank spent in steps; None with a GPU.
        tensorboard: writer that also gets the scalars, or None.
        on_line: called with each line.
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
        """Records one scalar of a step; Megatron's "... vs samples" copies go only to TensorBoard."""
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
        """Records the results of benchmarks after a step: values by name, under `evaluate` and `evaluate_bits`."""
        self.flush()
        line: dict[str, Any] = {"step": step, "tokens": self.tokens_at(step)}
        for key, values in measured.items():
            line[key] = {name: _finite(value) for name, value in values.items()}
            if self.tensorboard is not None:
                for name, value in values.items():
                    self.tensorboard.add_scalar(f"evaluate/{name}", value, step)
        self._write(line)

    def flush(self) -> None:
        """Writes the collected step if it is complete (has a loss)."""
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
        """Writes pending data to metrics.jsonl and flushes TensorBoard."""
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
    """The number, or None (JSON null) if it is not finite."""
    return number if math.isfinite(number) else None
