"""Report on an RL run: rewards, lengths and outcomes per step, the monitor's verdicts, and memory use."""

import re
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from nemo_ext.job.progress import notice
from nemo_ext.job.report import Report, tidy
from nemo_ext.job.run_directory import METRICS, REPORT, read_metrics
from nemo_ext.memory import report as memory
from nemo_ext.rl import monitor
from nemo_ext.rl.algorithms import Algorithm
from nemo_ext.rl.reprofile import Curricula

PLOT = "reward.png"
_PANELS = {
    "reward": ("reward", "eval_reward", "rewards/margins", "eval_rewards/margins"),
    "response length in tokens": ("completions/mean_length", "eval_completions/mean_length"),
    "KL to the initial model, nats per token": ("kl", "eval_kl"),
    "loss": ("loss", "eval_loss"),
}
_LABEL = re.compile("/correct$|^adaptive/(weight|signal)/|^teacher_kl/")


def write_report(
    run_dir: Path, algorithm: Algorithm, curricula: Curricula | None = None, *, remark: str | None = None
) -> None:
    """Write report.md and its plots, including the curricula made during training; nothing if no step was logged.

    `remark` is a sentence about the trained model, which stands below the title.
    """
    lines = read_metrics(run_dir / METRICS)
    if not lines:
        notice(f"{run_dir / METRICS}: no step is logged, so no {REPORT} is written")
        return
    # NaN and infinities are null in the file.
    logs = [{name: x for name, x in log.items() if x is not None} for log in lines]
    changes = curricula.changes() if curricula else []
    report = Report(f"{run_dir.name}: {algorithm.algorithm}", f"{algorithm.source}. {logs[-1]['step']} steps.", remark)
    monitor.add_section(report, lines)
    _plot(report, logs, [change.step * algorithm.updates_per_step for change in changes])
    names = sorted({name for log in logs for name in log} - {"step"})
    shown = [name for name in names if "clip_ratio/" not in name and not name.startswith("profiling/")]
    report.table("", ("", "first", "last", "mean of the last tenth"), [_row(name, logs) for name in shown])
    if curricula is not None:
        rows = _curricula(curricula)
        solved = f"tasks with 0 ... {curricula.settings.samples} correct"
        heading = ("after step", "reason", "checkpoint", "mean pass rate", solved, "order")
        report.table("Curricula", heading, rows)
        report.section("Curricula", "" if rows else "Pass rates were not measured again.")
    memory.add_section(report, run_dir)
    notice(f"report: {report.write(run_dir / REPORT)}")


def _row(name: str, logs: Sequence[Mapping[str, Any]]) -> list[str]:
    values = [log[name] for log in logs if name in log]
    return [name, *(f"{value:.4g}" for value in (values[0], values[-1], monitor.recent_mean(values)))]


def _curricula(curricula: Curricula) -> list[list[str]]:
    rows = []
    for number, change in enumerate(curricula.changes(), start=1):
        result = curricula.result(number)
        if result is None:
            continue
        folder = f"{curricula.folder.name}/{number}"
        order = f"[new]({folder}/report.md)" if result.kept is None else f"unchanged: {result.kept}"
        solved = " ".join(map(str, result.solved))
        rows.append([str(change.step), change.why, change.checkpoint, f"{result.pass_rate:.3f}", solved, order])
    return rows


def _label(name: str) -> str:
    """Return the label of a metric's line in a plot, which marks validation metrics."""
    name = _LABEL.sub("", name)
    return f"{name.removeprefix('eval_')}, validation" if name.startswith("eval_") else name


def _plot(report: Report, logs: Sequence[Mapping[str, Any]], changes: Sequence[int]) -> None:
    domains = sorted({name for log in logs for name in log if name.endswith("/correct")}, key=_label)
    shown = {**_PANELS, "solved, by environment": tuple(domains)}
    shown["KL to the teachers, nats per token"] = tuple(
        sorted({name for log in logs for name in log if name.startswith("teacher_kl/")})
    )
    for kind in ("weight", "signal"):
        shown[f"{kind} of datasets"] = tuple(
            sorted({name for log in logs for name in log if name.startswith(f"adaptive/{kind}/")})
        )
    shown = {title: names for title, names in shown.items() if any(name in log for log in logs for name in names)}
    rows = ceil(len(shown) / 4)
    columns = ceil(len(shown) / rows)
    axes = report.picture("rewards", PLOT, 5 * columns, 3.6 * rows, rows, columns)
    for axis in axes[len(shown) :]:
        axis.remove()
    for axis, (title, names) in zip(axes, shown.items(), strict=False):
        for name in names:
            points = [(log["step"], log[name]) for log in logs if name in log]
            if any(value for _, value in points) or (points and name != "eval_loss"):  # GRPO's eval_loss is always 0
                marker = "." if len(points) < 20 else ""
                axis.plot(*zip(*points, strict=True), label=_label(name), marker=marker)
        for at in changes:
            axis.axvline(at, color="0.5", linestyle="--", linewidth=1, label="new curriculum" * (at == changes[0]))
        tidy(axis, title=title, xlabel="step", legend=True)
        axis.locator_params(axis="x", integer=True)
