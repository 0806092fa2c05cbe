"""Report of an evaluation: tables, report.md with a plot, and a summary for the terminal."""

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
    "In brackets: the 95% confidence interval of a bootstrap over problems. It shows how much the figure would vary "
    "with other problems of the same kind; overlapping intervals do not show that two models are equal."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """Table cell.

    Attributes:
        text: displayed text.
        value: sort key; None sorts last.
    """

    text: str
    value: float | str | None


def text(value: object) -> Cell:
    """Create a cell with a value as text; empty text is shown as a dash."""
    return Cell(str(value) or NONE, str(value))


def number(value: float | None) -> Cell:
    """Create a cell with a count or a mean of counts; fractional values below 100 are shown with one decimal."""
    if value is None:
        return Cell(NONE, None)
    return Cell(f"{value:,.1f}" if value < 100 and value != int(value) else f"{value:,.0f}", value)


def share(value: float | None, digits: int = 1) -> Cell:
    """Create a cell with a fraction shown in percent."""
    return Cell(NONE if value is None else f"{value:.{digits}%}", value)


def measured(metric: str) -> bool:
    """Whether a metric is a measured quantity (bits per byte, perplexity) rather than a fraction of correct answers."""
    return BITS in metric or "perplexity" in metric


def figure(value: float | None, interval: Sequence[float] | None = None, *, metric: str = "") -> Cell:
    """Create a cell with a result and its interval: unscaled if `measured(metric)` or above 1, else in percent."""
    if value is None:
        return Cell(NONE, None)
    plain = measured(metric) or abs(value) > 1
    ends = "" if interval is None else ", ".join(f"{end:.4f}" if plain else f"{100 * end:.1f}" for end in interval)
    return Cell((f"{value:.4f}" if plain else f"{100 * value:.1f}%") + (f" [{ends}]" if ends else ""), value)


def name_of(name: str, entry: Mapping[str, Any]) -> str:
    """Return a benchmark's name, with an arrow if lower is better."""
    return name if entry.get("higher_is_better", True) else f"{name} ↓"


def tables(results: Mapping[str, Any]) -> list[Table[Cell]]:
    """Return the tables for results.json: first the benchmarks, then any other tables that have rows."""
    return [_benchmarks(results), *(table for table in _parts(results) if table.rows)]


def facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return facts about the evaluation for the head of a report, as pairs of name and text."""
    mean, limit = results.get("mean"), results.get("limit")
    rows = [
        ("endpoint", str(results.get("endpoint") or "")),
        ("digest", str(results.get("digest") or "")),
        ("suite", ", ".join(results.get("suite", ()))),
        ("problems", f"at most {limit:,} per benchmark" if limit else ""),
        ("seed", str(results.get("seed", ""))),
        ("nemo_ext", str(results.get("nemo_ext", ""))),
    ]
    if mean:
        scope = f"weighted, over {mean['benchmarks']:,} benchmark" + "s" * (mean["benchmarks"] != 1)
        rows.insert(0, ("grand mean", f"{figure(mean['accuracy'], mean.get('interval')).text}, {scope}"))
    return [row for row in rows if row[1]]


def summary(results: Mapping[str, Any]) -> str:
    """Return a summary for the terminal: a row per benchmark, the grand mean, and benchmarks without results."""
    table = _benchmarks(results)
    columns = [place for place, name in enumerate(table.heading) if name not in ("wanted", "reasoning tokens")]
    rows = [[line[place] for place in columns] for line in ([*map(text, table.heading)], *table.rows)]
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
    """Write report.md and its plot into a run directory, from the content of results.json; return report.md's path."""
    report = Report(_escaped(str(results["model"]))).facts((name, _escaped(value)) for name, value in facts(results))
    (run_dir / PICTURE).unlink(missing_ok=True)
    for place, table in enumerate(tables(results)):
        report.add(table.markdown(lambda cell: _escaped(cell.text)))
        if not place:
            _plot(report, results)
    report.add("All answers: `report.html`. All numbers: `results.json`. Both are computed from `store/`.")
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
    note = f"{INTERVALS} Tokens: mean per answer, including reasoning."
    low = any(not entry.get("higher_is_better", True) for entry in entries.values())
    return Table("Benchmarks", heading, rows, note + " ↓: lower is better." * low)


def _parts(results: Mapping[str, Any]) -> Iterator[Table[Cell]]:
    """Yield the tables for modes, prompts, domains, further metrics, and missing scores and benchmarks."""
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
        note = "With reasoning: share of answers with a reasoning trace, with its interval."
        yield Table(title, heading, rows, note)
    rows = [
        [text(name), figure(sensitivity["std"], sensitivity["interval"]), number(len(entry["prompts"]))]
        for name, entry in entries
        if (sensitivity := entry.get("sensitivity"))
    ]
    note = "Standard deviation of the accuracy over prompts, in percentage points."
    yield Table("Sensitivity to prompts", ("benchmark", "standard deviation", "prompts"), rows, note)
    rows = [
        [text(name), text(domain), figure(values["accuracy"], metric=entry["metric"]), number(values["n"])]
        for name, entry in entries
        for domain, values in (entry.get("domains") or {}).items()
    ]
    yield Table("Domains", ("benchmark", "domain", "result", "problems"), rows)
    rows = [
        [
            Cell(name_of(name, entry), name),
            text(entry["environment"]),
            figure(entry["accuracy"], entry["interval"], metric=entry["metric"]),
            number(entry["calls"]),
            share(entry["failed_calls"]),
        ]
        for name, entry in entries
        if entry.get("calls") is not None
    ]
    note = "Calls: mean per answer. Failed: share of all calls that raised an error or exceeded a limit."
    yield Table("Tool calls", ("benchmark", "environment", "result", "calls", "failed"), rows, note)
    reasons = [(name, *item) for name, entry in entries for item in (entry.get("reasons") or {}).items()]
    reasons += [(name, "not requested", entry["missing"]) for name, entry in entries if entry.get("missing")]
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
    yield Table("Not evaluated", ("benchmark", "why, and where to get its data"), rows)


def _escaped(text: str) -> str:
    """Escape arbitrary text for Markdown."""
    return re.sub(r"([\\`*<>\[\]~&$])", r"\\\1", text)


def _plot(report: Report, results: Mapping[str, Any]) -> None:
    """Plot the results with their intervals, one point per benchmark and mode, if there are any results."""
    entries = [item for item in results.get("benchmarks", {}).items() if item[1]["accuracy"] is not None]
    groups = [
        (label, unit, group)
        for label, unit, of_bits in (("accuracy, %", 100.0, False), ("bits per byte, perplexity", 1.0, True))
        if (group := [item for item in entries if measured(item[1]["metric"]) is of_bits])
    ]
    if not groups:
        return
    heights, caption = [0.3 * len(group) + 0.9 for _, _, group in groups], "accuracy with intervals"
    axes = report.picture(caption, PICTURE, 8, sum(heights) + 0.4, len(groups), height_ratios=heights)
    modes = list(
        dict.fromkeys(mode for _, _, group in groups for _, entry in group for mode in entry.get("modes") or {})
    )
    colours = dict(zip(modes or [""], itertools.cycle(COLOURS), strict=False))
    for axis, (label, unit, group) in zip(axes, groups, strict=True):
        for row, (_, entry) in enumerate(group):
            by_mode = {mode: part for mode, part in (entry.get("modes") or {}).items() if part["accuracy"] is not None}
            shown = by_mode or {modes[0] if modes else "": entry}
            for place, (mode, part) in enumerate(shown.items()):
                colour = colours.get(mode, COLOURS[0])
                y = row + (place - (len(shown) - 1) / 2) * min(0.28, 0.7 / len(shown))
                if part["interval"] is not None:
                    axis.plot([unit * end for end in part["interval"]], [y, y], color=colour, alpha=0.55, linewidth=2.5)
                axis.plot(unit * part["accuracy"], y, "o", color=colour, markersize=5)
        names = [name_of(name, entry) for name, entry in group]
        axis.set_yticks(range(len(group)), names, fontsize=9, parse_math=False)
        limits = (-2, 102) if unit == 100 else (0, 1.05 * axis.get_xlim()[1])
        tidy(axis, grid="x", xlabel=label, xlim=limits, ylim=(len(group) - 0.4, -0.6))
    named = [mode for mode in modes if any(mode in (entry.get("modes") or {}) for _, entry in groups[0][2])]
    if len(named) > 1:
        for mode in named:
            axes[0].plot([], [], "o", color=colours[mode], label=mode)
        axes[0].legend(frameon=False, ncols=min(6, len(named)), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
