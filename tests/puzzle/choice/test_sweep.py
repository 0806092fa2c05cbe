"""Pareto fronts of score and a resource."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_ext.puzzle.choice import sweep as module
from nemo_ext.puzzle.choice.problem import Candidate, Limit, Problem
from nemo_ext.puzzle.choice.search import Infeasible, solve
from nemo_ext.puzzle.choice.sweep import Point, plot, sweep, write_csv


def problem() -> Problem:
    rng = np.random.default_rng(5)
    return Problem(
        [
            [Candidate("keep", 0.0, {"memory_bytes": 4e9, "decode_seconds": 2e-3})]
            + [
                Candidate(
                    f"v{number}", float(score), {"memory_bytes": 4e9 * (1 - share), "decode_seconds": 2e-3 * share}
                )
                for number, (share, score) in enumerate(rng.uniform(0, 1, (4, 2)))
            ]
            for _ in range(10)
        ],
        {"memory_bytes": Limit(upper=1e9), "decode_seconds": Limit(upper=15e-3)},
        {"memory_bytes": 2e9},
    )


VALUES = [float(gigabytes) * 1e9 for gigabytes in (50, 2, 12, 18, 22, 26, 30, 34, 38, 41, 42, 12)]


def test_every_point_matches_a_separate_search() -> None:
    points = sweep(problem(), "memory_bytes", values=VALUES, gap=0.0)

    assert [point.limit for point in points] == sorted(set(VALUES))
    assert points[0].solution is None
    for point in points:
        limited = problem().with_limits({**problem().limits, "memory_bytes": Limit(upper=point.limit)})
        if point.solution is None:
            with pytest.raises(Infeasible):
                solve(limited)
        else:
            assert point.solution.score == pytest.approx(solve(limited, gap=0.0).score)
            assert point.solution.costs["memory_bytes"] <= point.limit
    scores = [point.solution.score for point in points if point.solution]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 3


def test_a_loose_gap_leaves_the_front_monotone_and_its_gaps_true() -> None:
    exact = [point.solution for point in sweep(problem(), "memory_bytes", values=VALUES, gap=0.0)]
    loose = [point.solution for point in sweep(problem(), "memory_bytes", values=VALUES, gap=0.5)]
    scores = [solution.score for solution in loose if solution]
    assert scores == sorted(scores, reverse=True)
    for best, found in zip(exact, loose, strict=True):
        if best and found:
            assert found.bound <= best.score + 1e-9 <= found.score + 2e-9


def test_a_tighter_limits_choice_replaces_a_worse_one(monkeypatch: pytest.MonkeyPatch) -> None:
    solution = solve(problem().with_limits({}))
    found = {
        70e9: replace(solution, score=1.02, bound=0.9, costs={"memory_bytes": 65e9}),
        60e9: replace(solution, score=1.0, bound=0.95, costs={"memory_bytes": 55e9}),
    }
    monkeypatch.setattr(module, "find", lambda limited, *_, **__: found[limited.limits["memory_bytes"].upper])

    first, second = sweep(problem(), "memory_bytes", values=list(found))

    assert first.solution == found[60e9]
    assert second.solution is not None
    assert (second.solution.score, second.solution.bound) == (1.0, 0.9)
    assert second.solution.gap == pytest.approx(0.1)
    assert second.solution.costs == {"memory_bytes": 55e9}


def test_known_points_are_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []

    def count(limited: Problem, *others: object, **options: float) -> object:
        solved.append(limited.limits["memory_bytes"].upper)
        return find(limited, *others, **options)

    find = module.find
    monkeypatch.setattr(module, "find", count)
    points = sweep(problem(), "memory_bytes", values=[1e9, 1.5e9, 60e9, 70e9])
    assert solved == [70e9, 1.5e9]
    assert [point.solution is None for point in points] == [True, True, False, False]


def test_a_lower_bound_of_the_resource_is_kept() -> None:
    limited = problem().with_limits({"memory_bytes": Limit(lower=20e9)})
    points = sweep(limited, "memory_bytes", values=[10e9, 30e9])
    assert points[0].solution is None
    assert points[1].solution is not None
    assert 20e9 <= points[1].solution.costs["memory_bytes"] <= 30e9


@pytest.mark.parametrize(
    ("resource", "values", "message"),
    [
        ("memory_bytes", [], "values is empty"),
        ("memory_bytes", [math.inf], "has neither upper nor lower"),
        ("memory", [1.0], "which a limit needs"),
    ],
)
def test_invalid_sweeps_are_refused(resource: str, values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(problem(), resource, values=values)


def test_the_csv_has_one_line_per_limit(tmp_path: Path) -> None:
    points = sweep(problem(), "memory_bytes", values=VALUES)

    path = write_csv(points, tmp_path / "front.csv")

    rows = list(csv.DictReader(path.open()))
    assert list(rows[0]) == ["limit", "score", "bound", "gap", "memory_bytes", "decode_seconds", "choice"]
    assert [float(row["limit"]) for row in rows] == [point.limit for point in points]
    assert (rows[0]["score"], rows[0]["choice"]) == ("", "")
    last = points[-1].solution
    assert last is not None
    assert float(rows[-1]["score"]) == last.score
    assert rows[-1]["choice"].split() == [str(index) for index in last.choice]
    again = write_csv(sweep(problem(), "memory_bytes", values=VALUES), tmp_path / "again.csv")
    assert again.read_bytes() == path.read_bytes()


def test_the_plot_names_its_axes_and_marks_the_parent(tmp_path: Path) -> None:
    points = sweep(problem(), "memory_bytes", values=VALUES)
    path = plot(
        points, tmp_path / "front.svg", problem=problem(), resource="memory_bytes", parent=[0] * 10, title="tiny"
    )
    text = path.read_text()
    assert all(f"<!-- {words} -->" in text for words in ("memory (GB)", "score (increase of loss)", "parent", "tiny"))
    png = plot(points, tmp_path / "front.png", problem=problem(), resource="decode_seconds")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["front.png", "front.svg"]


def test_a_front_without_solutions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot([Point(1.0, None)], tmp_path / "front.png", problem=problem(), resource="memory_bytes")


@pytest.mark.parametrize(
    ("resource", "most", "label"),
    [
        ("memory_bytes", 7e10, (1e9, "memory (GB)")),
        ("decode_seconds", 0.02, (1e-3, "decode (ms)")),
        ("active_parameters", 3e9, (1e9, "active parameters (billions)")),
        ("attention_blocks", 70.0, (1.0, "attention blocks (number)")),
        ("bytes", 0.0, (1.0, "bytes (bytes)")),
    ],
)
def test_units_are_derived_from_names(resource: str, most: float, label: tuple[float, str]) -> None:
    assert module._axis(resource, most) == label
