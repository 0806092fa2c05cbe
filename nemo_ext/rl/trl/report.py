"""Report of a run: rewards, lengths and outcomes over the steps, and memory."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table, new_figure, save_figure
from nemo_ext.job.run_directory import METRICS, REPORT
from nemo_ext.memory import report as memory
from nemo_ext.rl.algorithms import Algorithm

PLOT = "reward.png"
_PANELS = {
    "reward": ("reward", "eval_reward", "rewards/margins", "eval_rewards/margins"),
    "tokens of a response": ("completions/mean_length", "eval_completions/mean_length"),
    "loss": ("loss", "eval_loss"),
}
_LABEL = re.compile("/correct$|^adaptive/(weight|signal)/")


def write_report(run_dir: Path, algorithm: Algorithm) -> Path:
    """Write report.md and its plots; returns the report's path."""
    logs = [json.loads(line) for line in (run_dir / METRICS).read_text().splitlines()]
    _plot(run_dir / PLOT, logs)
    names = sorted({name for log in logs for name in log} - {"step"})
    shown = [name for name in names if "clip_ratio/" not in name and not name.startswith("profiling/")]
    table = markdown_table(("", "first", "last", "mean of the last tenth"), [_row(name, logs) for name in shown])
    text = (
        f"# {run_dir.name}: {algorithm.algorithm}\n\n{algorithm.source}. {logs[-1]['step']} steps.\n\n"
        f"![rewards]({PLOT})\n\n{table}\n"
    )
    if memory_section := memory.section(run_dir):
        text += f"\n{memory_section}"
    write_text(run_dir / REPORT, text)
    return run_dir / REPORT


def _row(name: str, logs: Sequence[Mapping[str, Any]]) -> list[str]:
    values = [log[name] for log in logs if name in log]
    last = values[-max(1, len(values) // 10) :]
    return [name, *(f"{value:.4g}" for value in (values[0], values[-1], sum(last) / len(last)))]


def _plot(path: Path, logs: Sequence[Mapping[str, Any]]) -> None:
    domains = sorted({name for log in logs for name in log if name.endswith("/correct")})
    panels = {**_PANELS, "solved, by environment": tuple(domains)}
    for kind in ("weight", "signal"):
        panels[f"{kind} of datasets"] = tuple(
            sorted({name for log in logs for name in log if name.startswith(f"adaptive/{kind}/")})
        )
    panels = {title: names for title, names in panels.items() if any(name in log for log in logs for name in names)}
    figure = new_figure(figsize=(5 * len(panels), 3.6))
    axes = figure.subplots(1, len(panels), squeeze=False)
    for axis, (title, names) in zip(axes[0], panels.items(), strict=True):
        for name in names:
            points = [(log["step"], log[name]) for log in logs if name in log]
            if points:
                marker = "." if len(points) < 20 else ""
                axis.plot(*zip(*points, strict=True), label=_LABEL.sub("", name), marker=marker)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    save_figure(figure, path, dpi=130)
