"""Accuracy against generated tokens: points with intervals, those that no other beats, and pictures. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_ext.evaluation.compare import CompareSettings
from nemo_ext.evaluation.runs import Run, Values, benchmark_is_low, counts, entries_of, names_of, values_of
from nemo_ext.job import statistics
from nemo_ext.job.report import COLOURS, new_figure, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vPX*"
GRAND = "grand mean"
PANELS = 12
"""Most panels of a picture."""
ROWS = 40
"""Most benchmarks in the picture of accuracies."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Accuracy against tokens of a run in a mode.

    Attributes:
        run, mode: names.
        accuracy, tokens: means over problems; of several benchmarks, weighted as in the grand mean.
        accuracy_interval, tokens_interval: intervals; None for one problem alone.
        front: whether no other point is as accurate with as few tokens, and better in one of them.
    """

    run: str
    mode: str
    accuracy: float
    tokens: float
    accuracy_interval: tuple[float, float] | None
    tokens_interval: tuple[float, float] | None
    front: bool = False


def frontiers(runs: Sequence[Run], given: CompareSettings) -> dict[str, list[Point]]:
    """Points by benchmark; those of the grand mean of the benchmarks that all runs have come first.

    A run is there in each of its modes; in the grand mean in those that all these benchmarks have, else in each
    benchmark's first. Tokens get the same weights (Domyn-Small, section 5.2 and Table 7).
    """
    entries = entries_of(runs)
    values: dict[str, dict[tuple[str, str], Values]] = {}
    for name in names_of(runs):
        for run in runs:
            if name not in run.benchmarks or benchmark_is_low(run.benchmarks[name]):
                continue
            metric = str(run.benchmarks[name].get("metric"))
            for mode in run.modes(name):
                found = _counted(values_of(run.answers[name][mode], metric))
                if len(found.values):
                    values.setdefault(name, {})[run.name, mode] = found
    points = {
        name: _front(_point(run, mode, [each], [1.0], given) for (run, mode), each in found.items())
        for name, found in values.items()
    }
    wanted = {run.name for run in runs}
    common = [name for name, found in values.items() if counts(entries[name]) and {run for run, _ in found} == wanted]
    if len(common) < 2:
        return points
    weights = [float(entries[name].get("weight", 1)) for name in common]
    grand = []
    for run in runs:
        there = [[mode for mode in run.modes(name) if (run.name, mode) in values[name]] for name in common]
        shared = [mode for mode in there[0] if all(mode in modes for modes in there)]
        for mode in shared or [""]:
            parts = [values[name][run.name, mode or modes[0]] for name, modes in zip(common, there, strict=True)]
            grand.append(_point(run.name, mode, parts, weights, given))
    return {GRAND: _front(grand), **points}


def _counted(values: Values) -> Values:
    """The problems whose tokens are known."""
    known = ~np.isnan(values.tokens)
    return values.at([name for name, use in zip(values.problems, known, strict=True) if use])


def _point(run: str, mode: str, parts: Sequence[Values], weights: Sequence[float], given: CompareSettings) -> Point:
    settings: Any = {"draws": given.draws, "seed": given.seed, "level": given.level}
    accuracy, of_accuracy = statistics.grand_mean([each.values for each in parts], weights, **settings)
    tokens, of_tokens = statistics.grand_mean([each.tokens for each in parts], weights, **settings)
    return Point(
        run=run,
        mode=mode,
        accuracy=accuracy,
        tokens=tokens,
        accuracy_interval=of_accuracy,
        tokens_interval=of_tokens,
    )


def _front(points: Iterable[Point]) -> list[Point]:
    """The points, with those marked that no other one dominates."""
    found = list(points)

    def beaten(one: Point) -> bool:
        return any(
            other.accuracy >= one.accuracy
            and other.tokens <= one.tokens
            and (other.accuracy > one.accuracy or other.tokens < one.tokens)
            for other in found
        )

    return [replace(each, front=not beaten(each)) for each in found]


def plot_frontiers(points: Mapping[str, Sequence[Point]], path: Path, papers: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Draw accuracy against tokens (PNG), a panel for the grand mean and each benchmark; whether there was any.

    Published values with tokens are letters; they take no part in the front.
    """
    shown = dict(list(points.items())[:PANELS])
    if not shown:
        path.unlink(missing_ok=True)
        return False
    runs = list(dict.fromkeys(point.run for each in shown.values() for point in each))
    modes = list(dict.fromkeys(point.mode for each in shown.values() for point in each))
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = new_figure(figsize=(max(6.5, 4.2 * columns), 3.6 * rows + 0.9))
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, each) in zip(panels, shown.items(), strict=False):
        _panel(axes, name, each, runs, modes)
        _published(axes, name, papers)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    handles: dict[str, Any] = {}
    for axes in panels[: len(shown)]:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), frameon=False
    )
    more = f"; the first {PANELS} of {len(points)}" if len(points) > PANELS else ""
    figure.suptitle(f"accuracy against generated tokens, with intervals over problems{more}", fontsize=11)
    save_figure(figure, path)
    return True


def _panel(axes: "Axes", name: str, points: Sequence[Point], runs: Sequence[str], modes: Sequence[str]) -> None:
    for point in points:
        number = runs.index(point.run)
        label = point.run if point.mode in ("", "default") else f"{point.run}, {point.mode}"
        axes.errorbar(
            point.tokens,
            100 * point.accuracy,
            xerr=_bars(point.tokens, point.tokens_interval, 1),
            yerr=_bars(point.accuracy, point.accuracy_interval, 100),
            fmt=MARKERS[modes.index(point.mode) % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            markersize=7,
            capsize=2.5,
            elinewidth=1,
            label=label,
        )
    front = sorted((point.tokens, 100 * point.accuracy) for point in points if point.front)
    axes.plot(*zip(*front, strict=True), "--", color="#999999", linewidth=1.1, zorder=0, label="Pareto front")
    axes.set_title(name, fontsize=10, loc="left")
    axes.set_xlabel("mean generated tokens")
    axes.set_ylabel("accuracy (%)")
    axes.margins(0.12)
    tidy(axes)


def _published(axes: "Axes", name: str, papers: Sequence[Mapping[str, Any]]) -> None:
    """Draw a paper's models as letters, which the legend explains."""
    models = [(model, one["values"]) for paper in papers for model, one in paper["models"].items()]
    timed = [model for model, values in models if any(value.get("tokens") for value in values.values())]
    for model, values in models:
        value = values.get(name, {})
        if value.get("tokens") and value.get("unit", "percent") == "percent":
            letter = chr(ord("a") + timed.index(model) % 26)
            place = value["tokens"], value["value"]
            axes.plot(
                *place, linestyle="", marker=f"${letter}$", color="#555555", markersize=7, label=f"{model}, published"
            )


def _bars(value: float, interval: tuple[float, float] | None, times: float) -> Any:
    """Lengths below and above of an error bar."""
    if interval is None:
        return None
    return [[max(0.0, times * (value - interval[0]))], [max(0.0, times * (interval[1] - value))]]


def plot_accuracies(runs: Sequence[Run], path: Path) -> bool:
    """Draw each run's accuracies with their intervals, a row a benchmark (PNG); whether there was any."""
    entries = entries_of(runs)
    names = [name for name in names_of(runs) if not benchmark_is_low(entries[name])][:ROWS]
    if not names:
        path.unlink(missing_ok=True)
        return False
    figure = new_figure(figsize=(8, 1.4 + 0.24 * len(names) * (len(runs) + 1)))
    axes = figure.subplots()
    for number, run in enumerate(runs):
        for row, name in enumerate(names):
            entry = run.benchmarks.get(name, {})
            if entry.get("accuracy") is None:
                continue
            interval = entry.get("interval")
            axes.errorbar(
                100 * entry["accuracy"],
                row + (number - (len(runs) - 1) / 2) * 0.8 / len(runs),
                xerr=_bars(entry["accuracy"], None if interval is None else tuple(interval), 100),
                fmt=MARKERS[number // len(COLOURS) % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                markersize=5,
                capsize=2.5,
                elinewidth=1,
                label=run.name,
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("accuracy (%), with intervals over problems")
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(runs)), frameon=False)
    tidy(axes, grid="x")
    save_figure(figure, path)
    return True
