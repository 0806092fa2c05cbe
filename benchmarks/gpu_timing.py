"""Timing of compared sides on one machine, for gpu.py."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Step = Callable[[], object]
UNCOUNTED = 3
"""Number of warm-up rounds."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median and quartiles of all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def from_values(cls, values: list[float]) -> "Timing":
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)


@dataclass
class Table:
    """One comparison; ratios are relative to the first row.

    Attributes:
        title: title of the table.
        rows: side, time and remark; without a time the remark is the reason.
        remarks: texts below the table.
    """

    title: str
    rows: list[tuple[str, Timing | None, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Machine:
    """Device on which steps run and are timed.

    Attributes:
        device: `cuda`, timed by events, or `cpu`, by the clock.
        rounds: number of counted rounds.
    """

    device: str
    rounds: int

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        """Tensor of normally distributed numbers."""
        return torch.randn(shape, device=self.device).to(dtype).requires_grad_(grad)

    def measure(self, steps: Mapping[str, Step]) -> dict[str, Timing]:
        """Time all steps; every round runs each once."""
        rounds = range(UNCOUNTED + self.rounds)
        each = self._by_clock if self.device == "cpu" else self._by_events
        # Read all results after the last round, as times must not include the GPU waiting for the host.
        found = [{name: each(step) for name, step in steps.items()} for _ in rounds]
        return {name: Timing.from_values([times[name]() for times in found[UNCOUNTED:]]) for name in steps}

    def _by_clock(self, step: Step) -> Callable[[], float]:
        began = time.perf_counter()
        step()
        milliseconds = 1e3 * (time.perf_counter() - began)
        return lambda: milliseconds

    def _by_events(self, step: Step) -> Callable[[], float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()

        def milliseconds() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end))

        return milliseconds


def compare(table: Table, steps: Mapping[str, Step], machine: Machine) -> None:
    """Measure all steps and add them to the table; a failed step is added with its error."""
    runs, failed = {}, {}
    for name, step in steps.items():
        try:
            step()
            runs[name] = step
        except Exception as error:  # any error of an optional library
            reason = (str(error).strip().splitlines() or [""])[0]
            failed[name] = f"cannot run: {type(error).__name__}: {reason[:160]}"
    timings = machine.measure(runs) if runs else {}
    table.rows += [(name, timings.get(name), failed.get(name, "")) for name in steps]


def training_step(forward: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> Step:
    """One forward and backward pass."""
    grad = torch.randn_like(forward(x))

    def step() -> None:
        for tensor in (x, *parameters):
            tensor.grad = None
        forward(x).backward(grad)

    return step


def made_at_first(make: Callable[[], Step]) -> Step:
    """A step that is built in its first call, so that `compare` catches errors."""
    made: list[Step] = []

    def step() -> object:
        if not made:
            made.append(make())
        return made[0]()

    return step
