"""The search, compared with enumeration of every choice."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.puzzle.choice import integer_program
from nemo_ext.puzzle.choice.problem import Candidate, Limit, Problem
from nemo_ext.puzzle.choice.search import (
    Conflict,
    Infeasible,
    LimitSide,
    explain,
    limit_sides,
    pool,
    relative_gap,
    solve,
    to_program,
)

RESOURCES = ("memory_bytes", "cache_bytes", "decode_seconds", "attention_blocks")


def candidates(*rows: tuple[float, float], resource: str = "memory_bytes") -> list[Candidate]:
    """Candidates of (score, cost)."""
    return [Candidate(f"v{number}", score, {resource: cost}) for number, (score, cost) in enumerate(rows)]


@st.composite
def problems(draw: st.DrawFn, *, blocks: int = 6, limits: int = 4) -> Problem:
    """Small problems; scores are eighths and costs whole, so that sums are exact and ties common."""
    eighths = st.integers(-8, 24).map(lambda number: number / 8)
    costs = st.fixed_dictionaries(dict.fromkeys(RESOURCES, st.integers(-1, 5)))
    rows = st.lists(st.tuples(eighths, costs), min_size=1, max_size=5)
    library = [
        [Candidate(f"v{number}", score, cost) for number, (score, cost) in enumerate(block)]
        for block in draw(st.lists(rows, min_size=1, max_size=blocks))
    ]
    drawn = {}
    for resource in draw(st.lists(st.sampled_from(RESOURCES), unique=True, max_size=limits)):
        upper = draw(st.none() | st.integers(-2, 3 * len(library)))
        lower = draw(st.none() | st.integers(-2, upper)) if upper is not None else draw(st.integers(-2, 10))
        drawn[resource] = Limit(
            upper=math.inf if upper is None else upper,
            lower=-math.inf if lower is None else lower,
        )
    return Problem(library, drawn, {resource: draw(st.integers(-2, 2)) for resource in drawn})


def choices(problem: Problem, sides: Sequence[LimitSide] | None = None) -> Iterator[tuple[int, ...]]:
    """Every choice that satisfies the limits, or only the given sides of them."""
    sides = limit_sides(problem) if sides is None else sides
    for choice in itertools.product(*(range(len(block)) for block in problem.blocks)):
        totals = {
            resource: problem.outside[resource]
            + sum(block[index].costs[resource] for block, index in zip(problem.blocks, choice, strict=True))
            for resource in problem.limits
        }
        if all(
            totals[resource] <= problem.limits[resource].upper
            if side == "upper"
            else totals[resource] >= problem.limits[resource].lower
            for resource, side in sides
        ):
            yield choice


def distance(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def check_account(problem: Problem, error: Infeasible) -> None:
    """Check that the conflicting limits are irreducible, and that the nearest values are correct."""
    needed = [(conflict.resource, conflict.side) for conflict in error.conflicts]
    assert error.irreducible
    assert next(choices(problem, needed), None) is None
    for conflict in error.conflicts:

        def reached(kept: Sequence[LimitSide], conflict: Conflict = conflict) -> list[float]:
            others = [side for side in kept if side != (conflict.resource, conflict.side)]
            return [problem.costs(choice)[conflict.resource] for choice in choices(problem, others)]

        with_all_others = reached(limit_sides(problem))
        assert conflict.with_all_others == bool(with_all_others)
        best = min if conflict.side == "upper" else max
        assert conflict.nearest == best(with_all_others or reached(needed))
        assert conflict.limit == getattr(problem.limits[conflict.resource], conflict.side)


@pytest.mark.parametrize(("outside", "chosen"), [(0.0, ("v1",)), (5.0, ("v0",))])
def test_costs_outside_the_blocks_count_towards_a_limit(outside: float, chosen: tuple[str]) -> None:
    problem = Problem([candidates((1.0, 4), (0.0, 6))], {"memory_bytes": Limit(upper=10)}, {"memory_bytes": outside})

    assert problem.names(solve(problem).choice) == chosen


@given(problem=problems())
def test_the_search_finds_the_same_as_enumeration(problem: Problem) -> None:
    feasible = {choice: problem.score(choice) for choice in choices(problem)}
    try:
        solution = solve(problem, gap=0.0)
    except Infeasible as error:
        assert not feasible
        check_account(problem, error)
    else:
        best = min(feasible.values())
        assert solution.choice in feasible
        assert solution.score == problem.score(solution.choice) == best
        assert best - 1e-6 <= solution.bound <= best
        assert solution.gap == pytest.approx(0.0, abs=1e-6)
        assert solution.costs == problem.costs(solution.choice)


@given(problem=problems(blocks=4, limits=2), size=st.integers(1, 6), data=st.data())
def test_a_pool_has_the_best_choices_at_the_required_distance(problem: Problem, size: int, data: Any) -> None:
    apart = data.draw(st.integers(1, len(problem.blocks)))
    feasible = list(choices(problem))
    if not feasible:
        with pytest.raises(Infeasible):
            pool(problem, size, min_distance=apart)
        return

    found = pool(problem, size, min_distance=apart, gap=0.0)

    for number, solution in enumerate(found):
        before = [other.choice for other in found[:number]]
        left = [choice for choice in feasible if all(distance(choice, other) >= apart for other in before)]
        assert solution.choice in left
        assert solution.score == min(map(problem.score, left))
    chosen = [solution.choice for solution in found]
    more = [choice for choice in feasible if all(distance(choice, other) >= apart for other in chosen)]
    assert len(found) == size or (len(found) < size and not more)


def test_a_dominated_variant_may_be_the_cheapest_way_to_differ() -> None:
    problem = Problem([candidates((0.0, 1.0), (0.1, 2.0), (5.0, 0.0))])

    found = pool(problem, 9)

    assert [solution.choice for solution in found] == [(0,), (1,), (2,)]


def test_impossible_distances_are_refused() -> None:
    with pytest.raises(ValueError, match="min_distance=2 must be from 1 to 1"):
        pool(Problem([candidates((0.0, 1.0))]), 1, min_distance=2)


@given(problem=problems())
def test_removing_dominated_variants_loses_nothing(problem: Problem) -> None:
    program = to_program(problem)
    kept = [set(integer_program.undominated(program, block)) for block in range(len(problem.blocks))]
    feasible = list(choices(problem))
    left = [choice for choice in feasible if all(index in some for index, some in zip(choice, kept, strict=True))]
    assert min(map(problem.score, left), default=None) == min(map(problem.score, feasible), default=None)


def test_the_first_of_equal_variants_and_blocks_is_chosen() -> None:
    block = candidates((0.0, 2.0), (0.0, 2.0), (1.0, 1.0), (1.0, 1.0))
    problem = Problem([block] * 5, {"memory_bytes": Limit(upper=8)})
    assert solve(problem, gap=0.0).choice == (0, 0, 0, 2, 2)


@pytest.mark.parametrize("count", [40, 200])
def test_many_equal_blocks_are_counted(count: int) -> None:
    block = candidates((0.0, 7.0), (1.0, 4.0), (1.9, 2.0), (6.0, 0.0))
    upper = 3 * count + 1
    best = min(
        one + 1.9 * two + 6.0 * none
        for one in range(count + 1)
        for two in range(count + 1 - one)
        for none in range(count + 1 - one - two)
        if 7 * (count - one - two - none) + 4 * one + 2 * two <= upper
    )

    solution = solve(Problem([block] * count, {"memory_bytes": Limit(upper=upper)}), gap=0.0)

    assert solution.score == pytest.approx(best, rel=1e-9)
    assert list(solution.choice) == sorted(solution.choice)


def test_a_score_of_nothing_has_no_gap() -> None:
    blocks = [candidates((0.0, 0.1), (0.3, 0.05), (-0.1, 0.3))] * 30
    found = solve(Problem(blocks, {"memory_bytes": Limit(upper=3.05)}))
    assert (found.score, found.bound, found.gap) == (0.0, 0.0, 0.0)


def test_a_limit_exceeded_only_by_rounding_is_satisfied() -> None:
    problem = Problem([candidates((0.0, 0.1), (1.0, 0.0))] * 3)
    assert sum([0.1] * 3) > 0.3
    assert solve(problem.with_limits({"memory_bytes": Limit(upper=0.3)})).choice == (0, 0, 0)


@pytest.mark.parametrize("over", [1.2e-9, 1.4e-9, 1e-8, 1e-6])
def test_a_limit_exceeded_by_more_is_not(over: float) -> None:
    problem = Problem([candidates((0.0, 1e11), (1.0, 1.0))] * 3)
    assert solve(problem.with_limits({"memory_bytes": Limit(upper=3e11 / (1 + over))})).score == 1.0


def test_magnitudes_do_not_matter() -> None:
    rng = np.random.default_rng(0)
    rows = [[tuple(map(float, row)) for row in rng.integers(0, 50, (6, 2))] for _ in range(8)]
    choices_found = set()
    for score, cost in ((1.0, 1.0), (1e-9, 1e12), (1e7, 1e-9)):
        blocks = [candidates(*((score * s, cost * c) for s, c in block)) for block in rows]
        choices_found.add(solve(Problem(blocks, {"memory_bytes": Limit(upper=100.5 * cost)}), gap=0.0).choice)
    assert len(choices_found) == 1


def test_the_explanation_of_a_conflict_says_what_to_change() -> None:
    blocks = [
        [
            Candidate("keep", 0.0, {"memory_bytes": 4e9, "parameters": 2, "decode_seconds": 1.0}),
            Candidate("half", 0.5, {"memory_bytes": 2e9, "parameters": 1, "decode_seconds": 1.0}),
        ]
    ] * 4
    limits = {
        "memory_bytes": Limit(upper=10e9),
        "decode_seconds": Limit(upper=9.0),
        "parameters": Limit(lower=6),
    }

    with pytest.raises(Infeasible) as caught:
        solve(Problem(blocks, limits, {"memory_bytes": 1e9}))

    by_resource = {conflict.resource: conflict for conflict in caught.value.conflicts}
    assert by_resource.keys() == {"memory_bytes", "parameters"}
    assert (by_resource["memory_bytes"].nearest, by_resource["parameters"].nearest) == (13e9, 4)
    message = str(caught.value)
    assert "memory_bytes <= 1e+10 (nearest feasible value under all other limits: 1.3e+10)" in message
    assert "parameters >= 6 (nearest feasible value under all other limits: 4)" in message


def test_one_of_two_conflicts_is_explained_and_the_other_mentioned() -> None:
    blocks = [[Candidate("only", 0.0, {"memory_bytes": 4, "parameters": 2})]]
    problem = Problem(blocks, {"memory_bytes": Limit(upper=3), "parameters": Limit(upper=1)})
    error = explain(problem, time_limit=10.0)
    assert [(one.resource, one.nearest, one.with_all_others) for one in error.conflicts] == [("parameters", 2, False)]


def ultra() -> Problem:
    """126 blocks with 6 attention and 9 FFN variants, and five active limits."""
    rng = np.random.default_rng(3)
    attention, ffn = np.meshgrid(
        [1, 0.5, 0.25, 0.12, 0.06, 0], [1, 0.87, 0.75, 0.5, 0.25, 0.2, 0.1, 0.08, 0], indexing="ij"
    )
    attention, ffn = attention.ravel(), ffn.ravel()
    memory, prefill, decode = 3 * ffn + 0.7 * (attention > 0), ffn + 0.4 * (attention > 0), 2 * ffn + attention + 0.1
    costs = np.stack([memory + attention, attention, prefill, decode, attention > 0], axis=1)
    blocks = []
    for sensitivity in rng.lognormal(0, 0.8, (126, 2)) * 0.02:
        scores = sensitivity[0] * (1 - attention) + sensitivity[1] * (1 - ffn) ** 1.5 + rng.normal(0, 1e-4, 54)
        blocks.append(
            [
                Candidate(
                    f"v{number}", float(score), dict(zip((*RESOURCES, "parameters"), map(float, row), strict=True))
                )
                for number, (score, row) in enumerate(zip(scores, costs, strict=True))
            ]
        )
    parent = Problem(blocks).costs([0] * 126)
    return Problem(blocks, {name: Limit(upper=0.55 * total) for name, total in parent.items()})


@pytest.mark.slow
def test_a_problem_of_the_size_of_ultra() -> None:
    problem = ultra()

    solution, again = solve(problem), solve(problem)

    assert solution.gap <= 1e-4
    assert all(solution.costs[name] <= limit.upper * (1 + 1e-9) for name, limit in problem.limits.items())
    assert (again.choice, again.score, again.bound) == (solution.choice, solution.score, solution.bound)


@pytest.mark.parametrize("gap", [pytest.param(0.3, marks=pytest.mark.slow), pytest.param(0.02, marks=pytest.mark.deep)])
def test_a_loose_gap_gives_a_true_bound_and_a_locally_optimal_choice(gap: float) -> None:
    problem = ultra()
    best = solve(problem)

    solution = solve(problem, gap)

    assert solution.bound <= best.score <= solution.score * (1 + 1e-9)
    assert solution.gap <= gap
    program = to_program(problem)
    for block, now in enumerate(solution.choice):
        for index, candidate in enumerate(problem.blocks[block]):
            if candidate.score < problem.blocks[block][now].score:
                other = (*solution.choice[:block], index, *solution.choice[block + 1 :])
                assert not program.keeps(program.totals(other))


def test_a_conflict_in_a_problem_of_the_size_of_ultra() -> None:
    problem = ultra()
    limits = {**problem.limits, "cache_bytes": Limit(lower=100.0), "attention_blocks": Limit(upper=99)}

    with pytest.raises(Infeasible) as caught:
        solve(problem.with_limits(limits))

    names = [conflict.resource for conflict in caught.value.conflicts]
    assert "cache_bytes" in names
    assert len(names) > 1
    for conflict in caught.value.conflicts:
        assert conflict.nearest is not None
        moved = Limit(**{conflict.side: conflict.nearest})
        if conflict.with_all_others:
            solve(problem.with_limits({**limits, conflict.resource: moved}))


def test_a_gap_is_relative_to_the_score() -> None:
    assert [relative_gap(4.0, 3.0), relative_gap(-4.0, -5.0), relative_gap(2.0, 2.0)] == [0.25, 0.25, 0.0]
