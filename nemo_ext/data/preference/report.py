"""Report of the pairs: counts by source, kind, task and language, reasons for leaving out, and lengths."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_ext.data.preference.build import Counts
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy

PLOT = "lengths.png"
_LINEAR = 100
_COLOURS = ("#9db7d5", "#1f4e8c")


@dataclass
class Written:
    """Counts of the output files.

    Attributes:
        rows: (source, kind, task, language, split) -> number of lines.
        models: (chosen model, rejected model) -> number of pairs.
        multi_turn, tools, thinking: number of pairs with several turns, with tools, with reasoning.
        lengths: source -> sums of prompt, chosen and rejected lengths of its pairs, and their number.
    """

    rows: Counter[tuple[str, str, str, str, str]] = field(default_factory=Counter)
    models: Counter[tuple[str, str]] = field(default_factory=Counter)
    multi_turn: int = 0
    tools: int = 0
    thinking: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)

    def see(self, staged: Mapping[str, Any], split: str) -> None:
        """Count one line."""
        self.rows[staged["source"], staged["kind"], staged["task"], staged["language"], split] += 1
        if "genrm" not in staged:
            self.models[staged["chosen_model"], staged["rejected_model"]] += 1
            self.multi_turn += staged["multi_turn"]
            self.tools += bool(staged["tools"])
            self.thinking += staged["thinking"]
            sums = self.lengths.setdefault(staged["source"], [0, 0, 0, 0])
            for index, value in enumerate((*staged["lengths"], 1)):
                sums[index] += value

    def total(self, *, genrm: bool, split: str | None = None) -> int:
        """Number of pairs, or of reward model samples."""
        return sum(
            count
            for (_, kind, _, _, where), count in self.rows.items()
            if (kind == "genrm") == genrm and split in (None, where)
        )


def markdown(
    title: str, facts: Mapping[str, str], counts: Mapping[str, Counts], written: Written, *, unit: str, plotted: bool
) -> str:
    """Format the report as a Markdown page."""
    said = [f"# {title}\n", markdown_table(("", ""), facts.items()) + "\n"]
    pairs = {key: count for key, count in written.rows.items() if key[1] != "genrm"}
    samples = {key: count for key, count in written.rows.items() if key[1] == "genrm"}
    for name, rows in (("Pairs", pairs), ("Reward model samples", samples)):
        if not rows:
            continue
        said.append(f"## {name}\n")
        for index, heading in enumerate(("source", "kind", "task", "language")):
            by: Counter[str] = Counter()
            for key, count in rows.items():
                by[key[index] or "(none)"] += count
            total = by.total()
            table = [(label, f"{count:,}", f"{100 * count / total:.1f} %") for label, count in by.most_common()]
            said.append(markdown_table((heading, name.lower(), "share"), table) + "\n")
    if pairs:
        models = [
            (chosen or "(none)", rejected or "(none)", f"{count:,}")
            for (chosen, rejected), count in written.models.most_common(20)
        ]
        said.append(markdown_table(("chosen model", "rejected model", "pairs"), models) + "\n")
        said.append(f"## Lengths\n\nMeans in {unit}.\n")
        means = [
            (source, *(f"{value / sums[3]:,.0f}" for value in sums[:3]))
            for source, sums in sorted(written.lengths.items())
        ]
        said.append(markdown_table(("source", "prompt", "chosen", "rejected"), means) + "\n")
        if plotted:
            said.append(f"![chosen minus rejected length]({PLOT})\n")
    said.append("## Left out\n")
    for what, reason_of in (
        ("records", lambda one: one.records),
        ("prompts and answers", lambda one: one.groups),
        ("pairs and samples", lambda one: one.pairs),
    ):
        reports: dict[str, ReadReport] = {source: reason_of(one) for source, one in counts.items()}
        rows_left = [
            (source, reason, f"{count:,}", "; ".join(report.examples.get(reason, [])[:3]))
            for source, report in reports.items()
            for reason, count in sorted(report.skipped.items())
        ]
        seen = ", ".join(f"{source} {report.records:,}" for source, report in reports.items())
        said.append(f"Of {what} seen ({seen}):\n")
        said.append(markdown_table(("source", "reason", what, "examples"), rows_left) + "\n" if rows_left else "none\n")
    return "\n".join(said)


def plot(counts: Mapping[str, Counts], path: Path, *, unit: str) -> bool:
    """Plot the differences of the answers' lengths before and after the filters (PNG); False if there are none."""
    from matplotlib.ticker import FuncFormatter

    drawn = {name: one for name, one in counts.items() if one.before}
    if not drawn:
        return False
    figure = new_figure(figsize=(8, 1.2 + 2.2 * len(drawn)))
    axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    largest = max(abs(value) for one in drawn.values() for value in one.before)
    edges = _edges(largest)
    for axis, (name, one) in zip(axes, drawn.items(), strict=True):
        for counter, colour, label in zip(
            (one.before, one.after), _COLOURS, ("before the filters", "after"), strict=True
        ):
            values = np.fromiter(counter.keys(), dtype=np.float64, count=len(counter))
            weights = np.fromiter(counter.values(), dtype=np.float64, count=len(counter))
            heights, _ = np.histogram(values, bins=edges, weights=weights)
            axis.stairs(heights, edges, fill=True, color=colour, label=f"{label}: {counter.total():,} pairs")
        axis.axvline(0, color="#444444", linewidth=0.8)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_xscale("symlog", linthresh=_LINEAR)
        axis.set_ylabel("pairs")
        axis.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)
        tidy(axis)
    ticks = [0, _LINEAR, *(10**power for power in range(3, 8) if 10**power <= edges[-1])]
    axes[-1].set_xticks(sorted({sign * tick for tick in ticks for sign in (-1, 1)}))
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes[-1].minorticks_off()
    axes[-1].set_xlabel(f"{unit} of the chosen answer minus {unit} of the rejected one")
    save_figure(figure, path)
    return True


def _edges(largest: int) -> np.ndarray[Any, Any]:
    """Edges of bins that look equally wide on the axis: ten up to 100, ten for every power of ten beyond."""
    decades = 0
    while _LINEAR * 10**decades < largest + 1:
        decades += 1
    beyond = _LINEAR * 10 ** (np.arange(1, 10 * decades + 1) / 10)
    right = np.concatenate([np.arange(0, _LINEAR + 1, 10), beyond])
    return np.concatenate([-right[:0:-1], right])
