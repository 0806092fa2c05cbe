"""Reports of an evaluation: tables with formatted numbers, report.md with its plot, a summary for the terminal."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_ext.evaluation.store import BITS
from nemo_ext.job.report import COLOURS, Report, Table, tidy

REPORT, PICTURE = "report.md", "accuracy.png"
NONE = "–"
INTERVALS = (
    "In brackets: the 95% interval of a bootstrap over problems. It says how far the figure would move with other "
    "problems of the same kind; two intervals that overlap do not show that two models are equal."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what is shown.
        value: what the table is sorted by; None comes last.
    """

    text: str
    value: float | str | None


def text(value: object) -> Cell:
    """A cell of text."""
    return Cell(str(value) or NONE, str(value))


def number(value: float | None) -> Cell:
    """A count, or a mean of counts to three digits at least."""
    if value is None:
        return Cell(NONE, None)
    return Cell(f"{value:,.1f}" if value < 100 and value != int(value) else f"{value:,.0f}", value)


def share(value: float | None, digits: int = 1) -> Cell:
    """A share in percent."""
    return Cell(NONE if value is None else f"{value:.{digits}%}", value)


def measured(metric: str) -> bool:
    """Whether a metric is no share of right answers: bits per byte, perplexities."""
    return BITS in metric or "perplexity" in metric


def figure(value: float | None, interval: Sequence[float] | None = None, *, metric: str = "") -> Cell:
    """An accuracy in percent, or bits per byte, with its interval."""
    if value is None:
        return Cell(NONE, None)
    plain = measured(metric) or abs(value) > 1
    ends = "" if interval is None else ", ".join(f"{each:.4f}" if plain else f"{100 * each:.1f}" for each in interval)
    return Cell((f"{value:.4f}" if plain else f"{100 * value:.1f}%") + (f" [{ends}]" if ends else ""), value)


def name_of(name: str, entry: Mapping[str, Any]) -> str:
    """A benchmark's name, with an arrow where less is better."""
    return name if entry.get("higher_is_better", True) else f"{name} ↓"


def tables(results: Mapping[str, Any]) -> list[Table[Cell]]:
    """The tables of results.json, those without a row left out; the first one is that of the benchmarks."""
    found = [_benchmarks(results), *_parts(results)]
    return [table for place, table in enumerate(found) if table.rows or not place]


def facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was evaluated and how, as names and texts."""
    mean, limit = results.get("mean"), results.get("limit")
    rows = [
        ("endpoint", str(results.get("endpoint") or "")),
        ("digest", str(results.get("digest") or "")),
        ("suite", ", ".join(results.get("suite", ()))),
        ("problems", f"at most {limit:,} a benchmark" if limit else ""),
        ("seed", str(results.get("seed", ""))),
        ("nemo_ext", str(results.get("nemo_ext", ""))),
    ]
    if mean:
        of = f"weighted, over {mean['benchmarks']:,} benchmark" + "s" * (mean["benchmarks"] != 1)
        rows.insert(0, ("grand mean", f"{figure(mean['accuracy'], mean.get('interval')).text}, {of}"))
    return [row for row in rows if row[1]]


def summary(results: Mapping[str, Any]) -> str:
    """Lines for the terminal: a row a benchmark, the grand mean, what is missing."""
    table = _benchmarks(results)
    columns = [place for place, name in enumerate(table.heading) if name not in ("wanted", "reasoning tokens")]
    rows = [[line[place] for place in columns] for line in ([text(each) for each in table.heading], *table.rows)]
    widths = [max(len(row[place].text) for row in rows) for place in range(len(columns))]
    left = [isinstance(rows[-1][place].value, str) for place in range(len(columns))]
    lines = [
        "  ".join(
            cell.text.ljust(width) if to_left else cell.text.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]
    lines += [f"{name}: {value}" for name, value in facts(results) if name == "grand mean"]
    lines += [f"not evaluated: {name}: {why}" for name, why in results.get("missing", {}).items()]
    return "\n".join(lines)


def write(results: Mapping[str, Any], run_dir: Path) -> Path:
    """Write report.md and its plot into a run directory, of what results.json holds; returns the report's path."""
    report = Report(_escaped(str(results["model"]))).facts((name, _escaped(value)) for name, value in facts(results))
    (run_dir / PICTURE).unlink(missing_ok=True)
    for place, table in enumerate(tables(results)):
        report.add(table.markdown(lambda cell: _escaped(cell.text)))
        if not place:
            _plot(report, results)
    report.add("Every answer: `report.html`. All numbers: `results.json`. All of it is computed from `store/`.")
    return report.write(run_dir / REPORT)


def _figures(entry: Mapping[str, Any], metric: str) -> list[Cell]:
    counts = (number(entry.get("n")), number(entry.get("tokens")), share(entry.get("truncated")))
    return [figure(entry["accuracy"], entry["interval"], metric=metric), *counts]


def _benchmarks(results: Mapping[str, Any]) -> Table[Cell]:
    heading = ("benchmark", "result", "problems", "tokens", "truncated", "metric", "reasoning tokens", "samples",
               "wanted", "failed", "unscored")  # fmt: skip
    entries = results.get("benchmarks", {})
    rows = [
        [
            Cell(name_of(name, entry), name),
            *_figures(entry, entry["metric"]),
            text(entry["metric"]),
            *(number(entry.get(key)) for key in ("reasoning_tokens", "samples", "wanted", "failed", "unscored")),
        ]
        for name, entry in entries.items()
    ]
    note = f"{INTERVALS} Tokens: mean of an answer's, reasoning included."
    low = any(not entry.get("higher_is_better", True) for entry in entries.values())
    return Table("Benchmarks", heading, rows, note + " ↓: less is better." * low)


def _parts(results: Mapping[str, Any]) -> Iterator[Table[Cell]]:
    """Tables of what a benchmark's problems and metrics divide into, and of what is missing."""
    entries = results.get("benchmarks", {}).items()
    for title, key in (("Modes", "modes"), ("Prompts", "prompts")):
        rows = [
            [
                Cell(name_of(name, entry), name),
                text(part),
                *_figures(values, entry["metric"]),
                figure(values.get("with_reasoning"), values.get("with_reasoning_interval")),
            ]
            for name, entry in entries
            if len(entry.get(key) or {}) > 1
            for part, values in entry[key].items()
        ]
        heading = ("benchmark", key[:-1], "result", "problems", "tokens", "truncated", "with reasoning")
        yield Table(title, heading, rows, "With reasoning: share of the answers that have a trace, with its interval.")
    rows = [
        [text(name), figure(sensitivity["std"], sensitivity["interval"]), number(len(entry["prompts"]))]
        for name, entry in entries
        if (sensitivity := entry.get("sensitivity"))
    ]
    note = "Standard deviation of the accuracy over prompts, in points of percent."
    yield Table("Sensitivity to prompts", ("benchmark", "standard deviation", "prompts"), rows, note)
    rows = [
        [text(name), text(domain), figure(values["accuracy"], metric=entry["metric"]), number(values["n"])]
        for name, entry in entries
        for domain, values in (entry.get("domains") or {}).items()
    ]
    yield Table("Domains", ("benchmark", "domain", "result", "problems"), rows)
    reasons = [(name, *item) for name, entry in entries for item in (entry.get("reasons") or {}).items()]
    reasons += [(name, "not asked", entry["missing"]) for name, entry in entries if entry.get("missing")]
    rows = [[text(name), text(why), number(count)] for name, why, count in reasons]
    yield Table("Samples without a score", ("benchmark", "why", "samples"), rows)
    rows = [
        [text(name), text(metric), figure(value, metric=metric)]
        for name, entry in entries
        if len(entry.get("metrics") or {}) > 1
        for metric, value in entry["metrics"].items()
    ]
    yield Table("Other metrics", ("benchmark", "metric", "result"), rows)
    rows = [[text(name), text(why)] for name, why in results.get("missing", {}).items()]
    yield Table("Not evaluated", ("benchmark", "why, and where its data are had"), rows)


def _escaped(given: str) -> str:
    """A text of anybody's as Markdown that shows it."""
    return re.sub(r"([\\`*<>\[\]~&$])", r"\\\1", given)


def _plot(report: Report, results: Mapping[str, Any]) -> None:
    """Draw results with their intervals, a point a benchmark and mode, if there is any."""
    entries = [item for item in results.get("benchmarks", {}).items() if item[1]["accuracy"] is not None]
    groups = [
        (label, unit, kept)
        for label, unit, of_bits in (("accuracy, %", 100.0, False), ("bits per byte, perplexity", 1.0, True))
        if (kept := [each for each in entries if measured(each[1]["metric"]) is of_bits])
    ]
    if not groups:
        return
    heights, caption = [0.3 * len(kept) + 0.9 for _, _, kept in groups], "accuracy with intervals"
    axes = report.picture(caption, PICTURE, 8, sum(heights) + 0.4, len(groups), height_ratios=heights)
    modes = list(dict.fromkeys(mode for _, _, kept in groups for _, entry in kept for mode in entry.get("modes") or {}))
    colours = dict(zip(modes or [""], itertools.cycle(COLOURS), strict=False))
    for axis, (label, unit, kept) in zip(axes, groups, strict=True):
        for row, (_, entry) in enumerate(kept):
            several = {mode: each for mode, each in (entry.get("modes") or {}).items() if each["accuracy"] is not None}
            shown = several or {modes[0] if modes else "": entry}
            for place, (mode, each) in enumerate(shown.items()):
                colour = colours.get(mode, COLOURS[0])
                y = row + (place - (len(shown) - 1) / 2) * min(0.28, 0.7 / len(shown))
                if each["interval"] is not None:
                    axis.plot([unit * end for end in each["interval"]], [y, y], color=colour, alpha=0.55, linewidth=2.5)
                axis.plot(unit * each["accuracy"], y, "o", color=colour, markersize=5)
        names = [name_of(name, entry) for name, entry in kept]
        axis.set_yticks(range(len(kept)), names, fontsize=9, parse_math=False)
        limits = (-2, 102) if unit == 100 else (0, 1.05 * axis.get_xlim()[1])
        tidy(axis, grid="x", xlabel=label, xlim=limits, ylim=(len(kept) - 0.4, -0.6))
    named = [mode for mode in modes if any(mode in (entry.get("modes") or {}) for _, entry in groups[0][2])]
    if len(named) > 1:
        for mode in named:
            axes[0].plot([], [], "o", color=colours[mode], label=mode)
        axes[0].legend(frameon=False, ncols=min(6, len(named)), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
