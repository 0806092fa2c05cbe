"""The figures of a stage that tell how it went, from the files of its run. No torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.evaluation.report import figure
from nemo_ext.evaluation.store import RESULTS
from nemo_ext.job.records import read_records
from nemo_ext.job.run_directory import METRICS, newest, read_metrics
from nemo_ext.slurm import attempts
from nemo_ext.slurm.status import target_of

_REWARDS = {
    "reward": "reward",
    "eval_reward": "validation reward",
    "rewards/accuracies": "accuracy",
    "eval_rewards/accuracies": "validation accuracy",
}
"""Metrics of TRL's log, as a run prints them too."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How a stage went.

    Attributes:
        text: its key figures: loss, reward or accuracy of benchmarks; "" for jobs that have none.
        tokens: tokens that it trained on, with those of prompts; None if unknown.
        step: newest step that it logged; None for jobs without steps.
        target: number of its steps; None if unknown.
    """

    text: str = ""
    tokens: int | None = None
    step: int | None = None
    target: int | None = None


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
    if job == "train":
        return _training(run_dir)
    if job in ("rl", "online") and (run_dir / METRICS).is_file():
        return _reinforcement(run_dir)
    if job in ("evaluate", "rollouts") and (run_dir / RESULTS).is_file():
        results = json.loads((run_dir / RESULTS).read_text())
        return Figures(text=_mean(results))
    return Figures()


def seconds_of(record: Path) -> float:
    """Time of all starts that have ended."""
    return sum(each.ended - each.began for each in attempts.read(record) if each.ended is not None)


def _training(run_dir: Path) -> Figures:
    step, validation = newest(run_dir / METRICS)
    if step is None:
        return Figures()
    text = f"loss {step['loss']:.3f}" + (f", validation {validation['val_loss']:.3f}" if validation else "")
    return Figures(text=text, tokens=step.get("tokens"), step=int(step["step"]), target=target_of(run_dir))


def _reinforcement(run_dir: Path) -> Figures:
    """First value of each metric, and mean of its last tenth, as in the run's own report."""
    logs = read_records(run_dir / METRICS, dict[str, Any], what="a line of metrics")
    shown = []
    for key, name in _REWARDS.items():
        values = [float(log[key]) for log in logs if log.get(key) is not None]
        last = values[-max(1, len(values) // 10) :]
        if values:
            shown.append(f"{name} {values[0]:.3f} -> {sum(last) / len(last):.3f}")
    steps = [int(log["step"]) for log in logs if "step" in log]
    tokens = [int(log["num_tokens"]) for log in logs if log.get("num_tokens") is not None]
    return Figures(
        text=", ".join(shown),
        tokens=max(tokens, default=None),
        step=max(steps, default=None),
        target=target_of(run_dir),
    )


def _mean(results: Mapping[str, Any]) -> str:
    mean = results.get("mean")
    return "" if not mean else f"accuracy {figure(mean['accuracy'], mean.get('interval')).text}"
