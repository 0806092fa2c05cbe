"""What rounds gave: rewards with intervals, lengths, pairs and losses, as lines, a table and a picture. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy
from nemo_ext.job.run_directory import METRICS, REPORT, read_metrics
from nemo_ext.job.statistics import bootstrap
from nemo_ext.rl.algorithms import Preference

PLOT = "rounds.png"
_PANELS = {"reward": "mean reward", "tokens": "mean tokens of an answer"}
_ROWS = {
    "reward": "mean reward",
    "best": "best of a prompt",
    "worst": "worst of a prompt",
    "tokens": "tokens of an answer",
    "cut": "answers cut off",
    "validation/reward": "validation: mean reward",
    "validation/tokens": "validation: tokens of an answer",
    "validation/cut": "validation: answers cut off",
    "prompts": "prompts",
    "answers": "answers",
    "pairs": "pairs",
    "loss": "loss, last step",
    "accuracy": "pairs that the trained policy has right",
}


def summary(lines: Sequence[Mapping[str, Any]], *, seed: int) -> dict[str, float]:
    """Means over the prompts of lines of generations.jsonl, the first with its 95 % bootstrap interval over prompts.

    Answers that were cut off count.
    """
    groups = [[*line["generations"], *line["cut"]] for line in lines]
    rewards = [np.array([one["score"] for one in group]) for group in groups]
    tokens = [one["tokens"] for group in groups for one in group if one["tokens"] is not None]
    means = np.array([group.mean() for group in rewards])
    low, high = bootstrap(means, seed=seed) if len(means) > 1 else (means[0], means[0])
    answers = sum(map(len, groups))
    return {
        "prompts": len(groups),
        "answers": answers,
        "reward": float(means.mean()),
        "reward_low": float(low),
        "reward_high": float(high),
        "best": float(np.mean([group.max() for group in rewards])),
        "worst": float(np.mean([group.min() for group in rewards])),
        "tokens": float(np.mean(tokens)) if tokens else 0.0,
        "cut": sum(len(line["cut"]) for line in lines) / answers,
    }


def shown(values: Mapping[str, float]) -> str:
    """A summary in a few words."""
    return (
        f"reward {values['reward']:.3f} ({values['reward_low']:.3f} to {values['reward_high']:.3f}), best "
        f"{values['best']:.3f}, worst {values['worst']:.3f}, {values['tokens']:.0f} tokens, {values['cut']:.1%} cut off"
    )


def line_of(trained: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Last values of a training's metrics."""
    names = {"loss": "loss", "accuracy": "rewards/accuracies"}
    return {
        ours: values[-1]
        for ours, theirs in names.items()
        if (values := [line[theirs] for line in trained if theirs in line])
    }


def write_report(run_dir: Path, algorithm: Preference) -> Path:
    """Write report.md and its picture; returns the report's path."""
    lines = read_metrics(run_dir / METRICS)
    _plot(run_dir / PLOT, lines)
    rows = [
        [name, *(_cell(line, key) for line in lines)] for key, name in _ROWS.items() if any(key in one for one in lines)
    ]
    text = (
        f"# {run_dir.name}: {algorithm.algorithm} in rounds\n\n{algorithm.source}. A column is a policy, and what it "
        f"was trained on next; rewards have 95 % intervals over prompts.\n\n![rewards]({PLOT})\n\n"
        f"{markdown_table(('', *(f'after {line["rounds"]} rounds' for line in lines)), rows)}\n"
    )
    write_text(run_dir / REPORT, text)
    return run_dir / REPORT


def _cell(line: Mapping[str, Any], key: str) -> str:
    if key not in line:
        return ""
    value = f"{line[key]:,}" if isinstance(line[key], int) else f"{line[key]:.4g}"
    if f"{key}_low" not in line:
        return value
    return f"{value} ({line[f'{key}_low']:.4g} to {line[f'{key}_high']:.4g})"


def _plot(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    figure = new_figure(figsize=(10, 3.6))
    for axes, (key, title) in zip(figure.subplots(1, 2), _PANELS.items(), strict=True):
        for name, label in ((key, "prompts of the next round"), (f"validation/{key}", "validation")):
            there = [line for line in lines if name in line]
            if not there:
                continue
            rounds, values = [line["rounds"] for line in there], np.array([line[name] for line in there])
            bars = None
            if f"{name}_low" in there[0]:
                ends = np.array([[line[f"{name}_low"], line[f"{name}_high"]] for line in there]).T
                bars = np.clip(np.stack([values - ends[0], ends[1] - values]), 0, None)
            axes.errorbar(rounds, values, yerr=bars, marker="o", capsize=3, label=label)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("rounds")
        axes.set_xticks(range(len(lines)))
        axes.legend(frameon=False, fontsize=8)
        tidy(axes)
    save_figure(figure, path)
