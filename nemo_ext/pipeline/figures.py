"""Key figures of a stage, read from its run's files. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from nemo_ext.job.figures import Figures
from nemo_ext.job.job import invoke
from nemo_ext.job.registry import job as find
from nemo_ext.job.run_directory import METRICS, read_metrics
from nemo_ext.slurm import attempts


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """GPU efficiency of a training run.

    Attributes:
        mfu, mfu_6n: model FLOPs utilisation by exact FLOPs and by 6N, averaged over the steps; None if unknown.
        joules: energy per GPU over all steps, in joules; None if it was not measured (`megatron.log_energy`).
    """

    mfu: float | None = None
    mfu_6n: float | None = None
    joules: float | None = None


def efficiency_of(run_dir: Path) -> Efficiency:
    """Read a training run's efficiency from its metrics; all fields are None for other jobs."""
    steps = [line for line in read_metrics(run_dir / METRICS) if "loss" in line and "step" in line]
    means = {}
    for key in ("mfu", "mfu_6n", "joules_per_gpu"):
        values = [float(line[key]) for line in steps if line.get(key) is not None]
        means[key] = sum(values) / len(values) if values else None
    joules = means["joules_per_gpu"]
    return Efficiency(
        mfu=means["mfu"],
        mfu_6n=means["mfu_6n"],
        # Scaled to all steps, as only some may be logged (`megatron.log_interval`).
        joules=None if joules is None else joules * max(int(line["step"]) for line in steps),
    )


def figures_of(job: str, run_dir: Path) -> Figures:
    """Read a stage's key figures from its run directory; missing ones are None or empty."""
    figures = find(job).figures
    return Figures() if figures is None else invoke(figures, run_dir)


def seconds_of(record: Path) -> float:
    """Return the total seconds of all ended starts that are recorded in the folder `record`."""
    return sum(each.ended - each.began for each in attempts.read(record) if each.ended is not None)
