"""Report on a training run: settings, results, and plots of loss, learning rate and speed. Does not import torch."""

import json
import math
from itertools import count, pairwise, takewhile
from pathlib import Path
from statistics import median_high
from typing import Any

from nemo_ext.architecture.cost import active_params, total_params
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.job import run_directory
from nemo_ext.job.report import Report, tidy
from nemo_ext.megatron import guard
from nemo_ext.memory import report as memory

PLOT = "report.png"
MEASURED = {"evaluate": "accuracy", "evaluate_bits": "bits per byte"}
"""Mapping from keys in metrics.jsonl to the quantities that benchmarks measure."""


MTP_LOSS = "mtp_{}_loss"
"""Key in metrics.jsonl of the loss of a depth of multi-token prediction, counted from 1."""


def _depths(line: dict[str, Any]) -> list[int]:
    """Return the numbers (from 1) of the multi-token prediction depths with a loss in this line of metrics.jsonl."""
    return list(takewhile(lambda depth: MTP_LOSS.format(depth) in line, count(1)))


def write_report(run_dir: Path) -> Path:
    """Write `report.md` and its plots from a run directory's files, and return the report's path.

    Raises:
        ValueError: the run has not logged a step yet.
    """
    config = run_directory.read_config(run_dir / run_directory.CONFIG)
    lines = run_directory.read_metrics(run_dir / run_directory.METRICS)
    steps = [line | {"loss": _number(line["loss"])} for line in lines if "loss" in line]
    # Megatron evaluates the last step twice, in the loop and after it, on different samples; the later result counts.
    evaluations = list(
        {line["step"]: line | {"val_loss": _number(line["val_loss"])} for line in lines if "val_loss" in line}.values()
    )
    benchmarks = [line for line in lines if "evaluate" in line]
    if not steps:
        raise ValueError(f"{run_dir / run_directory.METRICS} has no step to report yet: start or resume the run first")
    report = Report(config["recipe"]).facts(_facts(config, steps, evaluations, run_dir))
    _plot(report, config, steps, evaluations, benchmarks, guard.events(run_dir))
    report.add(
        f"Every step: `{run_directory.METRICS}`. Config: `{run_directory.CONFIG}`. Log: `{run_directory.LOG}`. "
        f"TensorBoard: `tensorboard --logdir {run_directory.TENSORBOARD}`."
    )
    report.table("", ("benchmark", "", ""), _ends(benchmarks))
    guard.add_section(report, run_dir)
    memory.add_section(report, run_dir)
    return report.write(run_dir / run_directory.REPORT)


def _plot(
    report: Report,
    config: dict[str, Any],
    steps: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    benchmarks: list[dict[str, Any]],
    bad: list[guard.Event],
) -> None:
    """Plot loss, learning rate, speed and any benchmarks over tokens, and mark bad steps.

    `steps`, `evaluations` and `benchmarks` are lines of metrics.jsonl of these kinds; `bad` has the bad steps.

    Speed is in tokens per second and, if processor time was logged, also in tokens per processor second, which other
    work on the machine does not affect.
    """
    measured = {key: what for key, what in MEASURED.items() if any(line.get(key) for line in benchmarks)}
    heights = (3, *[2] * len(measured), 1.2, 1.2)
    layout: Any = {"sharex": True, "height_ratios": heights}
    caption = "loss, learning rate and speed"
    loss, *others, rate, speed = report.picture(caption, PLOT, 9, 7 + 2.4 * len(measured), len(heights), **layout)
    unit, name = _token_unit(steps[-1]["tokens"])
    for event in bad:
        before = max((line["tokens"] / unit for line in steps if line["step"] <= event.step), default=None)
        if before is not None:
            loss.axvline(before, color="#d98c00", linewidth=1.1, linestyle=":")
            looks: Any = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
            loss.annotate(f"step {event.step}: {event.what}", (before, 0.97), fontsize=8, color="#a86a00", **looks)
    tokens = [line["tokens"] / unit for line in steps]
    loss.plot(tokens, [line["loss"] for line in steps], color="#9db7d5", linewidth=0.9, label="training, logged steps")
    smooth = _running_mean([line["loss"] for line in steps], window=max(1, len(steps) // 30))
    loss.plot(tokens, smooth, color="#1f4e8c", linewidth=1.6, label="training, running mean")
    for depth in _depths(steps[-1]):
        values = [_number(line.get(MTP_LOSS.format(depth))) for line in steps]
        style: Any = {"color": "#7a8aa0", "linewidth": 1.0, "linestyle": (0, (4, 1 + depth)), "label": f"MTP {depth}"}
        loss.plot(tokens, _running_mean(values, window=max(1, len(steps) // 30)), **style)
    if evaluations:
        at = [line["tokens"] / unit for line in evaluations]
        values = [line["val_loss"] for line in evaluations]
        loss.plot(at, values, "o-", color="#d1495b", markersize=4.5, linewidth=1.2, label="validation")
        for index in {0, len(values) - 1}:
            looks = {"textcoords": "offset points", "fontsize": 9, "color": "#d1495b"}
            loss.annotate(f"{values[index]:.3f}", (at[index], values[index]), xytext=(4, 6), **looks)
    title = f"{config['recipe']} · {config['model']['name']}"
    tidy(loss, title=title, ylabel="loss (nats per token)", legend=True)
    rate.plot(tokens, [_number(line.get("lr")) for line in steps], color="#2f7d5c")
    tidy(rate, ylabel="learning rate")
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    by_clock = [line["tokens_per_second"] for line in steps]
    by_processor = [_tokens_per_cpu_second(line, _ranks(config)) for line in steps]
    if any(value is not None for value in by_processor):
        values = [_number(value) for value in by_processor]
        speed.plot(tokens, by_clock, color="#c3b1d1", linewidth=0.9, label="per second")
        speed.plot(tokens, values, color="#7a5195", linewidth=1.3, label="per processor second")
        tidy(speed, ylabel="tokens", legend={"ncols": 2})
    else:
        speed.plot(tokens, by_clock, color="#7a5195", linewidth=1.0)
        tidy(speed, ylabel="tokens / s")
    speed.set(ylim=(0, None), xlabel=f"trained tokens ({name})")
    for axis, (key, what) in zip(others, measured.items(), strict=True):
        for name in _names(benchmarks, key):
            points = [(line["tokens"] / unit, line[key][name]) for line in benchmarks if name in line.get(key, ())]
            values = [_number(value) for _, value in points]
            axis.plot([place for place, _ in points], values, "o-", markersize=3.5, linewidth=1.2, label=name)
        tidy(axis, ylabel=what, legend={"ncols": 2, "loc": "center left", "bbox_to_anchor": (1, 0.5)})


def _facts(
    config: dict[str, Any], steps: list[dict[str, Any]], evaluations: list[dict[str, Any]], run_dir: Path
) -> list[tuple[str, str]]:
    architecture = Architecture.from_config(config)
    last, target = steps[-1], config["megatron"]["train_iters"]
    lines = pairwise([{"step": 0}, *steps])
    seconds = sum(line["seconds_per_step"] * (line["step"] - before["step"]) for before, line in lines)
    rows = [
        ("recipe", config["recipe"]),
        ("model", f"{config['model']['name']}: `{config['model']['pattern']}`"),
        ("parameters", f"{total_params(architecture):,} ({active_params(architecture):,} active)"),
        ("steps", f"{last['step']:,} of {target:,}" + ("" if last["step"] >= target else " (not finished)")),
        ("tokens", f"{last['tokens']:,}"),
        ("training loss, last step", f"{last['loss']:.4f}"),
    ]
    rows += [
        (f"loss of MTP depth {depth}, last step", f"{_number(last[MTP_LOSS.format(depth)]):.4f}")
        for depth in _depths(last)
    ]
    if config.get("precision_plan"):
        plan = Plan.from_config(config["precision_plan"])
        rules = ", ".join(rule.text for rule in plan.rules)
        rows.insert(3, ("precision plan", f"{plan.default}, {plan.recipe}" + (f": {rules}" if rules else "")))
    if evaluations:
        first, final = evaluations[0], evaluations[-1]
        fall = 1 - final["val_loss"] / first["val_loss"]
        ends = [f"{each['val_loss']:.4f} at step {each['step']}" for each in (first, final)]
        rows.append(("validation loss", f"{' -> '.join(ends)} ({fall:.0%} lower)"))
    for name, form, values in (
        ("tokens per second", ",.0f", [line["tokens_per_second"] for line in steps]),
        ("tokens per processor second", ",.0f", [_tokens_per_cpu_second(line, _ranks(config)) for line in steps]),
        ("model FLOPs utilisation (exact)", ".1%", [line.get("mfu") for line in steps]),
        ("model FLOPs utilisation (6N)", ".1%", [line.get("mfu_6n") for line in steps]),
    ):
        if known := [value for value in values if value is not None]:
            rows.append((f"{name}, median", f"{median_high(known):{form}}"))
    rows.append(("time in steps", f"{seconds / 60:.1f} min"))
    versions_path = run_dir / run_directory.VERSIONS
    if versions_path.exists():
        packages = json.loads(versions_path.read_text())["packages"]
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in packages.items() if version)))
    return rows


def _ends(benchmarks: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return a table row for each benchmark: name, measured quantity, and its first and last values with steps."""
    rows = []
    for key, what in MEASURED.items():
        for name in _names(benchmarks, key):
            points = [(line["step"], _number(line[key][name])) for line in benchmarks if name in line.get(key, ())]
            ends = " -> ".join(f"{value:.3f} at step {step}" for step, value in (points[0], points[-1]))
            rows.append((name, what, ends))
    return rows


def _names(benchmarks: list[dict[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(name for line in benchmarks for name in line.get(key, ())))


def _ranks(config: dict[str, Any]) -> int:
    return int(config["launcher"]["nodes"]) * int(config["launcher"]["nproc_per_node"])


def _tokens_per_cpu_second(line: dict[str, Any], ranks: int) -> float | None:
    """Compute a step's tokens per processor second from its line of metrics.jsonl; None if it was not logged.

    All ranks are assumed to use as much processor time as the one that logs.
    """
    if not line.get("cpu_seconds_per_step"):
        return None
    return float(line["tokens_per_second"] * line["seconds_per_step"] / line["cpu_seconds_per_step"] / ranks)


def _token_unit(tokens: int) -> tuple[float, str]:
    for unit, name in ((1e12, "trillions"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if tokens >= unit:
            return unit, name
    return 1.0, "tokens"


def _running_mean(values: list[float], *, window: int) -> list[float]:
    last = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(each) / len(each) for each in last]


def _number(value: float | None) -> float:
    """Return a logged value, or NaN for None, which stands for a value that was not finite or not logged."""
    return math.nan if value is None else value
