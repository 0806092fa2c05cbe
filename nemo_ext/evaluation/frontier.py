"""Accuracy versus generated tokens: points with intervals, the Pareto front and plots. Does not import torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_ext.evaluation.compare import CompareSettings
from nemo_ext.evaluation.runs import Run, Values, benchmark_is_low, counts, entries_of, names_of, values_of
from nemo_ext.job import statistics
from nemo_ext.job.report import COLOURS, Report, error_bar, outer_legend, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCURACIES, FRONTIERS = "compare.png", "pareto.png"
MARKERS = "osD^vPX*"
BARS: Any = {"capsize": 2.5, "elinewidth": 1}
GRAND = "grand mean"
PANELS = 12
"""Maximum number of panels in a plot."""
ROWS = 40
"""Maximum number of benchmarks in the plot of accuracies."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Accuracy and generated tokens of a run in one mode.

    Attributes:
        run, mode: names of the run and the mode.
        accuracy, tokens: means over problems; over several benchmarks, weighted as in the grand mean.
        accuracy_interval, tokens_interval: confidence intervals; None if there is a single problem.
        front: whether the point is on the Pareto front.
    """

    run: str
    mode: str
    accuracy: float
    tokens: float
    accuracy_interval: tuple[float, float] | None
    tokens_interval: tuple[float, float] | None
    front: bool = False


def frontiers(runs: Sequence[Run], settings: CompareSettings) -> dict[str, list[Point]]:
    """Map each benchmark to its points; first comes the grand mean, if all runs share at least two benchmarks.

    Each mode of a run is a point. The grand mean has the modes that the shared benchmarks have in common, or if there
    are none, uses each benchmark's first mode. Tokens are weighted like accuracies (Domyn-Small, section 5.2, Table 7).
    """
    entries = entries_of(runs)
    values: dict[str, dict[tuple[str, str], Values]] = {}
    for name in names_of(runs):
        for run in runs:
            if name not in run.benchmarks or benchmark_is_low(run.benchmarks[name]):
                continue
            metric = str(run.benchmarks[name].get("metric"))
            for mode in run.modes(name):
                counted = _with_tokens(values_of(run.answers[name][mode], metric))
                if len(counted.values):
                    values.setdefault(name, {})[run.name, mode] = counted
    points = {
        name: _front(_point(run, mode, [part], [1.0], settings) for (run, mode), part in by_run.items())
        for name, by_run in values.items()
    }
    wanted = {run.name for run in runs}
    common = [name for name, by_run in values.items() if counts(entries[name]) and {run for run, _ in by_run} == wanted]
    if len(common) < 2:
        return points
    weights = [float(entries[name].get("weight", 1)) for name in common]
    grand = []
    for run in runs:
        by_name = [[mode for mode in run.modes(name) if (run.name, mode) in values[name]] for name in common]
        shared = [mode for mode in by_name[0] if all(mode in modes for modes in by_name)]
        for mode in shared or [""]:
            parts = [values[name][run.name, mode or modes[0]] for name, modes in zip(common, by_name, strict=True)]
            grand.append(_point(run.name, mode, parts, weights, settings))
    return {GRAND: _front(grand), **points}


def _with_tokens(values: Values) -> Values:
    """Keep only the values of problems for which the number of tokens is known."""
    known = ~np.isnan(values.tokens)
    return values.at([name for name, use in zip(values.problems, known, strict=True) if use])


def _point(run: str, mode: str, parts: Sequence[Values], weights: Sequence[float], settings: CompareSettings) -> Point:
    options: Any = {"draws": settings.draws, "seed": settings.seed, "level": settings.level}
    accuracy, of_accuracy = statistics.grand_mean([part.values for part in parts], weights, **options)
    tokens, of_tokens = statistics.grand_mean([part.tokens for part in parts], weights, **options)
    return Point(
        run=run, mode=mode, accuracy=accuracy, tokens=tokens, accuracy_interval=of_accuracy, tokens_interval=of_tokens
    )


def _front(points: Iterable[Point]) -> list[Point]:
    """Return the points, each marked with whether it is on the Pareto front."""
    points = list(points)
    front = on_front([(point.accuracy, -point.tokens) for point in points])
    return [replace(point, front=on) for point, on in zip(points, front, strict=True)]


def on_front(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """Return for each point whether it is on the Pareto front, where larger values are better."""
    return [
        not any(other != point and all(a >= b for a, b in zip(other, point, strict=True)) for other in points)
        for point in points
    ]


def plot_frontiers(
    report: Report, points: Mapping[str, Sequence[Point]], papers: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Plot accuracy versus tokens if there are any points, with a panel for the grand mean and for each benchmark.

    Published values that have tokens are shown as letters and are not part of the front. `points` maps benchmarks to
    their points, as from `frontiers`.
    """
    shown = dict(list(points.items())[:PANELS])
    if not shown:
        return
    runs = list(dict.fromkeys(point.run for panel in shown.values() for point in panel))
    modes = list(dict.fromkeys(point.mode for panel in shown.values() for point in panel))
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    panels = report.picture("pareto", FRONTIERS, max(6.5, 4.2 * columns), 3.6 * rows + 0.9, rows, columns)
    for axes, (name, panel) in zip(panels, shown.items(), strict=False):
        _panel(axes, name, panel, runs, modes)
        _published(axes, name, papers)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    outer_legend(panels, "lower center")
    more = f"; the first {PANELS} of {len(points)}" if len(points) > PANELS else ""
    panels[0].figure.suptitle(f"accuracy versus generated tokens, with intervals over problems{more}", fontsize=11)


def _panel(axes: "Axes", name: str, points: Sequence[Point], runs: Sequence[str], modes: Sequence[str]) -> None:
    for point in points:
        number = runs.index(point.run)
        label = point.run if point.mode in ("", "default") else f"{point.run}, {point.mode}"
        axes.errorbar(
            point.tokens,
            100 * point.accuracy,
            xerr=error_bar(point.tokens, point.tokens_interval),
            yerr=error_bar(point.accuracy, point.accuracy_interval, 100),
            fmt=MARKERS[modes.index(point.mode) % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            markersize=7,
            label=label,
            **BARS,
        )
    front = sorted((point.tokens, 100 * point.accuracy) for point in points if point.front)
    axes.plot(*zip(*front, strict=True), "--", color="#999999", linewidth=1.1, zorder=0, label="Pareto front")
    axes.margins(0.12)
    tidy(axes, title=name, xlabel="mean generated tokens", ylabel="accuracy (%)")


def _published(axes: "Axes", name: str, papers: Sequence[Mapping[str, Any]]) -> None:
    """Plot the papers' results on the benchmark `name`, each as its model's letter, which the legend explains."""
    models = [(model, entry["values"]) for paper in papers for model, entry in paper["models"].items()]
    lettered = [model for model, values in models if any(value.get("tokens") for value in values.values())]
    for model, values in models:
        value = values.get(name, {})
        if value.get("tokens") and value.get("unit", "percent") == "percent":
            letter = chr(ord("a") + lettered.index(model) % 26)
            place = value["tokens"], value["value"]
            looks: Any = {"linestyle": "", "color": "#555555", "markersize": 7}
            axes.plot(*place, marker=f"${letter}$", label=f"{model}, published", **looks)


def plot_accuracies(report: Report, runs: Sequence[Run]) -> None:
    """Plot the accuracies of all runs with their intervals, one row per benchmark, if there are any benchmarks."""
    entries = entries_of(runs)
    names = [name for name in names_of(runs) if not benchmark_is_low(entries[name])][:ROWS]
    if not names:
        return
    (axes,) = report.picture("compare", ACCURACIES, 8, 1.4 + 0.24 * len(names) * (len(runs) + 1))
    for number, run in enumerate(runs):
        for row, name in enumerate(names):
            entry = run.benchmarks.get(name, {})
            if entry.get("accuracy") is None:
                continue
            axes.errorbar(
                100 * entry["accuracy"],
                row + (number - (len(runs) - 1) / 2) * 0.8 / len(runs),
                xerr=error_bar(entry["accuracy"], entry.get("interval"), 100),
                fmt=MARKERS[number // len(COLOURS) % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                markersize=5,
                label=run.name,
                **BARS,
            )
    axes.set_yticks(range(len(names)), names)
    limits = (len(names) - 0.5, -0.5)
    tidy(axes, grid="x", xlabel="accuracy (%), with intervals over problems", ylim=limits)
    outer_legend([axes], "lower center")
