"""Report on all rounds: rewards with confidence intervals, lengths, pairs and losses. Does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_ext.job.report import Report, error_bar, tidy
from nemo_ext.job.run_directory import METRICS, REPORT, read_metrics
from nemo_ext.job.statistics import bootstrap
from nemo_ext.rl.algorithms import Preference

PLOT = "rounds.png"
_PANELS = {"reward": "mean reward", "tokens": "mean response length in tokens"}
_ROWS = {
    "reward": "mean reward",
    "best": "best reward per prompt",
    "worst": "worst reward per prompt",
    "tokens": "response length in tokens",
    "cut": "responses cut off",
    "validation/reward": "validation: mean reward",
    "validation/tokens": "validation: response length in tokens",
    "validation/cut": "validation: responses cut off",
    "prompts": "prompts",
    "answers": "responses",
    "pairs": "pairs",
    "loss": "loss, last step",
    "accuracy": "accuracy of the trained policy on its pairs",
}


def summary(lines: Sequence[Mapping[str, Any]], *, seed: int) -> dict[str, float]:
    """Summarise a round's responses.

    Args:
        lines: lines of generations.jsonl, one per task.

    Returns:
        Numbers of `prompts` and `answers`; mean `reward` over prompts with its 95 % bootstrap interval (`reward_low`,
        `reward_high`); mean `best` and `worst` reward of a prompt; mean response length in `tokens`; and the share of
        truncated responses (`cut`), which are included in all other values.
    """
    groups = [[*line["generations"], *line["cut"]] for line in lines]
    rewards = [np.array([response["score"] for response in group]) for group in groups]
    tokens = [response["tokens"] for group in groups for response in group if response["tokens"] is not None]
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
    """Format the values of `summary` as one line for the log."""
    return (
        f"reward {values['reward']:.3f} ({values['reward_low']:.3f} to {values['reward_high']:.3f}), best "
        f"{values['best']:.3f}, worst {values['worst']:.3f}, {values['tokens']:.0f} tokens, {values['cut']:.1%} cut off"
    )


def line_of(trained: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the last `loss` and `accuracy` in a training run's logged metrics; a metric never logged is omitted."""
    names = {"loss": "loss", "accuracy": "rewards/accuracies"}
    return {
        ours: values[-1]
        for ours, theirs in names.items()
        if (values := [line[theirs] for line in trained if theirs in line])
    }


def write_report(run_dir: Path, algorithm: Preference) -> Path:
    """Write report.md and its plot to the run directory, and return the report's path.

    `algorithm` is described at the top of the report.
    """
    lines = read_metrics(run_dir / METRICS)
    about = f"{algorithm.source}. Each column is a policy and the pairs that it was trained on next; "
    report = Report(
        f"{run_dir.name}: {algorithm.algorithm} in rounds", about + "rewards have 95 % intervals over prompts."
    )
    _plot(report, lines)
    known = {key: name for key, name in _ROWS.items() if any(key in line for line in lines)}
    rows = [[name, *(_cell(line, key) for line in lines)] for key, name in known.items()]
    report.table("", ("", *(f"after {line['rounds']} rounds" for line in lines)), rows)
    return report.write(run_dir / REPORT)


def _cell(line: Mapping[str, Any], key: str) -> str:
    if key not in line:
        return ""
    value = f"{line[key]:,}" if isinstance(line[key], int) else f"{line[key]:.4g}"
    if f"{key}_low" not in line:
        return value
    return f"{value} ({line[f'{key}_low']:.4g} to {line[f'{key}_high']:.4g})"


def _plot(report: Report, lines: Sequence[Mapping[str, Any]]) -> None:
    axes = report.picture("rewards", PLOT, 10, 3.6, columns=2)
    for axis, (key, title) in zip(axes, _PANELS.items(), strict=True):
        for name, label in ((key, "prompts of the next round"), (f"validation/{key}", "validation")):
            measured = [line for line in lines if name in line]
            bars = None
            if measured and f"{name}_low" in measured[0]:
                ends = [error_bar(line[name], (line[f"{name}_low"], line[f"{name}_high"])) for line in measured]
                bars = np.concatenate(ends, axis=1)
            if measured:
                rounds, values = zip(*((line["rounds"], line[name]) for line in measured), strict=True)
                axis.errorbar(rounds, values, yerr=bars, marker="o", capsize=3, label=label)
        tidy(axis, title=title, xlabel="rounds", xticks=range(len(lines)), legend=True)
