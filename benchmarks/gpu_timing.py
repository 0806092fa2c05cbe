"""Timing sides against each other on one machine, for gpu.py."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Step = Callable[[], object]
UNCOUNTED = 3
"""Rounds before the first that counts."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median and the quartiles of all rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Timing":
        low, median, high = statistics.quantiles(values, n=4)
        return cls(median, low, high)


@dataclass
class Table:
    """One comparison; ratios are against its first row.

    Attributes:
        title: what is compared.
        rows: side, time and remark; without a time the remark says why.
        remarks: that stand below it.
    """

    title: str
    rows: list[tuple[str, Timing | None, str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Machine:
    """Where steps run and how they are timed.

    Attributes:
        device: `cuda`, timed by events, or `cpu`, by the clock.
        rounds: that count.
    """

    device: str
    rounds: int

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, device=self.device).to(dtype).requires_grad_(grad)

    def measure(self, steps: Mapping[str, Step]) -> dict[str, Timing]:
        """Times of all steps; every round runs each once."""
        rounds = range(UNCOUNTED + self.rounds)
        each = self._by_clock if self.device == "cpu" else self._by_events
        # All results are read after the last round: a GPU that waits for its host would be timed waiting.
        found = [{name: each(step) for name, step in steps.items()} for _ in rounds]
        return {name: Timing.of([times[name]() for times in found[UNCOUNTED:]]) for name in steps}

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
    """Measures the steps that run here into the table; a step that fails says how."""
    runs, failed = {}, {}
    for name, step in steps.items():
        try:
            step()
            runs[name] = step
        except Exception as error:  # whatever an optional library raises on this machine
            reason = (str(error).strip().splitlines() or [""])[0]
            failed[name] = f"cannot run: {type(error).__name__}: {reason[:160]}"
    timings = machine.measure(runs) if runs else {}
    table.rows += [(name, timings.get(name), failed.get(name, "")) for name in steps]


def training_step(forward: Callable[[Tensor], Tensor], x: Tensor, parameters: list[Tensor]) -> Step:
    """One forward and backward."""
    grad = torch.randn_like(forward(x))

    def step() -> None:
        for tensor in (x, *parameters):
            tensor.grad = None
        forward(x).backward(grad)

    return step


def made_at_first(make: Callable[[], Step]) -> Step:
    """A step that is made in its first call, where `compare` catches what is missing."""
    made: list[Step] = []

    def step() -> object:
        if not made:
            made.append(make())
        return made[0]()

    return step
