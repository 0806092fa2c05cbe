"""Pareto front of score against one resource: the best choice under each of several limits, as CSV and picture."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.report import panels, save_figure, tidy
from nemo_ext.puzzle.choice.problem import Limit, Problem
from nemo_ext.puzzle.choice.search import GAP, TIME_LIMIT, Solution, find, relative_gap, to_program


@dataclass(frozen=True)
class Point:
    """Best choice under one upper limit; `solution` is None if the limit is infeasible."""

    limit: float
    solution: Solution | None


def sweep(
    problem: Problem, resource: str, *, values: Sequence[float], gap: float = GAP, time_limit: float = TIME_LIMIT
) -> list[Point]:
    """Solve the problem with each of `values` as the upper limit of a resource, its other limits unchanged.

    Scores never increase with a looser limit. A choice that also satisfies the next tighter limit is reused, and limits
    below the first infeasible one are not solved.

    Args:
        problem: Blocks, candidates and limits; a limit on `resource` gives its lower bound.
        resource: Resource for which every candidate has a cost.
        values: Upper limits on its total, in its unit; duplicates count once.
        gap: Relative optimality gap of each score.
        time_limit: Seconds per solve.

    Returns:
        One point per distinct value, in ascending order.

    Raises:
        TimeoutError: For some value, neither a choice nor a proof of infeasibility was found in time.
        ValueError: A candidate has no cost for `resource`, or `values` is empty or contains a number that is not
            finite.
    """
    if not values:
        raise ValueError("values is empty; expected at least one upper limit")
    resource_limit = problem.limits.get(resource, Limit())
    points: list[Point] = []
    for value in sorted(set(values), reverse=True):
        if value < resource_limit.lower:
            points.append(Point(value, None))
            continue
        limited = problem.with_limits({**problem.limits, resource: replace(resource_limit, upper=value)})
        looser = points[-1].solution if points else None
        if points and looser is None:
            solution = None
        elif looser is not None and looser.costs[resource] <= value:
            solution = replace(looser, seconds=0.0)
        else:
            solution = find(limited, to_program(limited), gap=gap, time_limit=time_limit)
        points.append(Point(value, solution))
    points.reverse()
    return _monotone(points)


def _monotone(points: list[Point]) -> list[Point]:
    """Make scores non-increasing: give a point the solution of the previous, tighter limit if that has a lower score.

    A looser limit may have a higher score, as a solution may be worse than the best one by up to the gap. `points` are
    in ascending order of their limits.
    """
    better: list[Point] = []
    for point in points:
        tighter = better[-1].solution if better else None
        solution = point.solution
        if tighter is not None and solution is not None and tighter.score < solution.score:
            bound = min(solution.bound, tighter.score)
            solution = replace(tighter, bound=bound, gap=relative_gap(tighter.score, bound), seconds=solution.seconds)
        better.append(Point(point.limit, solution))
    return better


def write_csv(points: Sequence[Point], path: Path) -> Path:
    """Write one CSV line per limit: limit, score, bound, gap, total of each resource, and the choice's indices.

    Lines of infeasible limits contain only the limit. Times are omitted, so that equal searches give equal files.
    """
    solved = [point.solution for point in points if point.solution is not None]
    resources = list(solved[0].costs) if solved else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["limit", "score", "bound", "gap", *resources, "choice"])
    for point in points:
        row: list[object] = [""] * (len(resources) + 4)
        if (one := point.solution) is not None:
            costs = (one.costs[name] for name in resources)
            row = [one.score, one.bound, one.gap, *costs, " ".join(map(str, one.choice))]
        writer.writerow([point.limit, *row])
    write_text(path, text.getvalue())
    return path


def plot(
    points: Sequence[Point],
    path: Path,
    *,
    problem: Problem,
    resource: str,
    parent: Sequence[int] | None = None,
    child: Sequence[int] | None = None,
    title: str = "",
) -> Path:
    """Plot the score against the choices' actual cost, as PNG or SVG depending on the suffix.

    Args:
        points: Points from `sweep`.
        resource: Resource on the horizontal axis.
        parent: The parent's choice, one index per block, to be marked; None to mark none.
        child: The child's choice, in the same form.

    Raises:
        ValueError: No point has a solution.
    """
    solved = [point.solution for point in points if point.solution is not None]
    if not solved:
        raise ValueError("no limit of the sweep is feasible, so there is nothing to draw; sweep over looser limits")

    figure, (axis,) = panels(8, 5)
    costs = [solution.costs[resource] for solution in solved]
    looks = (("parent", parent, "*", "#d1495b", 13), ("child", child, "D", "#edae49", 8))
    marks = [
        (name, problem.costs(choice)[resource], problem.score(choice), marker, colour, size)
        for name, choice, marker, colour, size in looks
        if choice is not None
    ]
    unit, label = _axis(resource, max([*costs, *(mark[1] for mark in marks)]))
    scores = [solution.score for solution in solved]
    axis.plot([cost / unit for cost in costs], scores, "o-", color="#1f4e8c", markersize=4.5, label="best choice")
    for name, cost, score, marker, colour, size in marks:
        axis.plot([cost / unit], [score], marker, color=colour, markersize=size, label=name)
    tidy(axis, title=title, xlabel=label, ylabel="score (increase of loss)", legend=True)
    save_figure(figure, path)
    return path


def _axis(resource: str, most: float) -> tuple[float, str]:
    """Return the unit in which to plot a resource, as a number to divide by, and the axis label.

    The unit depends on the resource's name (bytes, seconds or a count) and on `most`, the largest value to plot.
    """
    words, _, last = resource.rpartition("_")
    units: tuple[tuple[float, str], ...] = ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands"), (1.0, "number"))
    if last == "bytes":
        units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
    elif last == "seconds":
        units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    else:
        words = resource
    unit, name = next((each for each in units if most >= each[0]), units[-1])
    return unit, f"{(words or last).replace('_', ' ')} ({name})"
