"""The figures of a stage that tell how it went, from the files of its run. No torch."""

from dataclasses import dataclass
from pathlib import Path

from nemo_ext.job.figures import Figures
from nemo_ext.job.job import invoke
from nemo_ext.job.registry import job as find
from nemo_ext.job.run_directory import METRICS, read_metrics
from nemo_ext.slurm import attempts


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How well a training used its GPUs.

    Attributes:
        mfu, mfu_6n: model FLOPs utilisation by exact FLOPs and by 6N, means over its steps; None if unknown.
        joules: energy of each GPU over its steps; None if it was not measured (`megatron.log_energy`).
    """

    mfu: float | None = None
    mfu_6n: float | None = None
    joules: float | None = None


def efficiency_of(run_dir: Path) -> Efficiency:
    """The efficiency of a training from all lines of its metrics; of other jobs nothing is known."""
    steps = [line for line in read_metrics(run_dir / METRICS) if "loss" in line and "step" in line]
    found = {}
    for key in ("mfu", "mfu_6n", "joules_per_gpu"):
        values = [float(line[key]) for line in steps if line.get(key) is not None]
        found[key] = sum(values) / len(values) if values else None
    joules = found["joules_per_gpu"]
    return Efficiency(
        mfu=found["mfu"],
        mfu_6n=found["mfu_6n"],
        # Of every step, where only some are logged (`megatron.log_interval`).
        joules=None if joules is None else joules * max(int(line["step"]) for line in steps),
    )


def figures_of(job: str, run_dir: Path) -> Figures:
    """The figures of a stage's run directory, as far as they are there."""
    figures = find(job).figures
    return Figures() if figures is None else invoke(figures, run_dir)


def seconds_of(record: Path) -> float:
    """Time of all starts that have ended."""
    return sum(each.ended - each.began for each in attempts.read(record) if each.ended is not None)
