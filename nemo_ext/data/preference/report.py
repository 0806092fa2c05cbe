"""Report on preference data: counts by source, kind, task and language, lengths, and skipped records by reason."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_ext.data.preference.build import Counts
from nemo_ext.data.text.documents import ReadReport
from nemo_ext.job.report import Report, tidy

PLOT = "lengths.png"
_LINEAR = 100


@dataclass
class Written:
    """Counts of the lines in the output files.

    Attributes:
        rows: number of lines, keyed by (source, kind, task, language, split).
        models: number of pairs, keyed by (chosen model, rejected model).
        multi_turn, tools, thinking: number of pairs with several turns, with tools, and with reasoning.
        lengths: for each source, sums of its pairs' prompt, chosen and rejected lengths, and the number of pairs.
    """

    rows: Counter[tuple[str, str, str, str, str]] = field(default_factory=Counter)
    models: Counter[tuple[str, str]] = field(default_factory=Counter)
    multi_turn: int = 0
    tools: int = 0
    thinking: int = 0
    lengths: dict[str, list[int]] = field(default_factory=dict)

    def see(self, staged: Mapping[str, Any], split: str) -> None:
        """Count one output line, which belongs to `split`."""
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
        """Return the number of pairs (with `genrm`, reward model samples) in one split; None counts all splits."""
        return sum(
            count
            for (_, kind, _, _, where), count in self.rows.items()
            if (kind == "genrm") == genrm and split in (None, where)
        )


def page(title: str, facts: Mapping[str, str], counts: Mapping[str, Counts], written: Written, *, unit: str) -> Report:
    """Build the report on preference data; the `unit` of lengths is tokens or characters."""
    report = Report(title).facts(facts)
    pairs = {key: count for key, count in written.rows.items() if key[1] != "genrm"}
    samples = {key: count for key, count in written.rows.items() if key[1] == "genrm"}
    for name, rows in (("Pairs", pairs), ("Reward model samples", samples)):
        if not rows:
            continue
        report.section(name)
        for index, heading in enumerate(("source", "kind", "task", "language")):
            totals: Counter[str] = Counter()
            for key, count in rows.items():
                totals[key[index] or "(none)"] += count
            shares = [(label, count, f"{100 * count / totals.total():.1f} %") for label, count in totals.most_common()]
            report.table("", (heading, name.lower(), "share"), shares)
    if pairs:
        models = [(*(name or "(none)" for name in both), count) for both, count in written.models.most_common(20)]
        report.table("", ("chosen model", "rejected model", "pairs"), models).section("Lengths", f"Means in {unit}.")
        lengths = sorted(written.lengths.items())
        means = [(source, *(f"{value / sums[3]:,.0f}" for value in sums[:3])) for source, sums in lengths]
        report.table("", ("source", "prompt", "chosen", "rejected"), means)
        _plot(report, counts, unit)
    report.section("Skipped")
    for stage, units in (("records", "records"), ("groups", "prompts and answers"), ("pairs", "pairs and samples")):
        reports: dict[str, ReadReport] = {source: getattr(count, stage) for source, count in counts.items()}
        skipped = [
            (source, reason, count, "; ".join(read.examples.get(reason, [])[:3]))
            for source, read in reports.items()
            for reason, count in sorted(read.skipped.items())
        ]
        report.add(f"Of the {units} ({', '.join(f'{source} {read.records:,}' for source, read in reports.items())}):")
        report.table("", ("source", "reason", units, "examples"), skipped).add("" if skipped else "none")
    return report


def _plot(report: Report, counts: Mapping[str, Counts], unit: str) -> None:
    """Draw the differences between the answers' lengths before and after the filters, if there are any."""
    drawn = {name: source for name, source in counts.items() if source.before}
    if not drawn:
        return
    height = 1.2 + 2.2 * len(drawn)
    axes = report.picture("chosen minus rejected length", PLOT, 8, height, len(drawn), sharex=True)
    edges = _edges(max(abs(value) for source in drawn.values() for value in source.before))
    for axis, (name, source) in zip(axes, drawn.items(), strict=True):
        stages = (source.before, "#9db7d5", "before the filters"), (source.after, "#1f4e8c", "after")
        for counter, colour, label in stages:
            heights, _ = np.histogram(list(counter), bins=edges, weights=list(counter.values()))
            axis.stairs(heights, edges, fill=True, color=colour, label=f"{label}: {counter.total():,} pairs")
        axis.axvline(0, color="#444444", linewidth=0.8)
        legend = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 2, "borderaxespad": 0.2}
        tidy(axis, title=name, ylabel="pairs", legend=legend)
        axis.set_xscale("symlog", linthresh=_LINEAR)
    ticks = [0, _LINEAR, *(10**power for power in range(3, 8) if 10**power <= edges[-1])]
    axes[-1].set_xticks(sorted({sign * tick for tick in ticks for sign in (-1, 1)}))
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    axes[-1].minorticks_off()
    axes[-1].set_xlabel(f"{unit} of the chosen answer minus {unit} of the rejected one")


def _edges(largest: int) -> np.ndarray[Any, Any]:
    """Return edges of equally wide bins on the symlog axis: ten up to 100, ten for each further power of ten."""
    decades = 0
    while _LINEAR * 10**decades < largest + 1:
        decades += 1
    beyond = _LINEAR * 10 ** (np.arange(1, 10 * decades + 1) / 10)
    right = np.concatenate([np.arange(0, _LINEAR + 1, 10), beyond])
    return np.concatenate([-right[:0:-1], right])
