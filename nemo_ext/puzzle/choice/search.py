"""Search for one variant per block with the lowest total score within limits, or explain why the limits conflict.

Example:
    problem = Problem(blocks=library, limits={"memory_bytes": Limit(upper=72e9)}, outside={"memory_bytes": 2e9})
    solution = solve(problem)
    problem.names(solution.choice)
"""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from nemo_ext.puzzle.choice.integer_program import Answer, Floats, Program, minimise
from nemo_ext.puzzle.choice.problem import Problem

Side = Literal["upper", "lower"]
LimitSide = tuple[str, Side]
"""A resource and a side of its limit."""

GAP = 1e-4
TIME_LIMIT = 600.0

NEAREST_GAP = 1e-6
"""Relative optimality gap of the nearest feasible values that explain an infeasible problem."""


@dataclass(frozen=True)
class Solution:
    """One choice of variants.

    Attributes:
        choice: 0-based index of the chosen candidate of every block.
        score: Total score.
        costs: Total of every resource that all candidates have, including the part outside the blocks.
        gap: (score - bound) / |score|, HiGHS's relative gap; larger than requested if the time limit was reached.
        bound: Lower bound on the score of any choice within the limits (HiGHS's dual bound).
        seconds: Wall-clock time of the search.
    """

    choice: tuple[int, ...]
    score: float
    costs: dict[str, float]
    gap: float
    bound: float
    seconds: float


@dataclass(frozen=True)
class Conflict:
    """One limit of an irreducible infeasible set.

    Attributes:
        resource: Resource of the limit.
        side: Side of the limit, `upper` or `lower`.
        limit: Value of the bound.
        nearest: Feasible total under the other limits that is nearest to the bound; None if the time limit was reached.
        with_all_others: True if `nearest` satisfies all other limits of the problem, so that moving this bound to it
            makes the problem feasible; False if they conflict even without this one, so that only the other limits of
            the set are satisfied.
    """

    resource: str
    side: Side
    limit: float
    nearest: float | None
    with_all_others: bool

    def __str__(self) -> str:
        sign = "<=" if self.side == "upper" else ">="
        if self.nearest is None:
            reach = "nearest feasible value not found in time"
        else:
            others = "all other limits" if self.with_all_others else "the other limits listed here"
            reach = f"nearest feasible value under {others}: {self.nearest:.9g}"
        return f"{self.resource} {sign} {self.limit:.9g} ({reach})"


class Infeasible(ValueError):
    """Raised if no choice of variants satisfies the limits.

    Attributes:
        conflicts: Limits that conflict; if any one is removed, the rest can be satisfied.
        irreducible: True if this was proved; False if the time limit was reached first.
    """

    def __init__(self, conflicts: tuple[Conflict, ...], *, irreducible: bool = True) -> None:
        self.conflicts = conflicts
        self.irreducible = irreducible
        limits = "; ".join(map(str, conflicts))
        what = "these limits conflict" if len(conflicts) > 1 else "this limit cannot be met"
        doubt = "" if irreducible else " (stopped at the time limit; some of them may not be part of the conflict)"
        super().__init__(
            f"no choice of variants fits; {what}: {limits}{doubt}. Move a bound to its nearest feasible value"
        )


def solve(problem: Problem, gap: float = GAP, *, time_limit: float = TIME_LIMIT) -> Solution:
    """Choose one variant per block with the lowest total score within the limits.

    Args:
        gap: Relative optimality gap of the score.
        time_limit: Seconds after which the best choice so far is returned; explaining `Infeasible` may take as long.

    Raises:
        Infeasible: No choice satisfies the limits; holds the conflicting limits and their nearest feasible values.
        TimeoutError: Neither a choice nor a proof of infeasibility was found in time.
        RuntimeError: HiGHS failed for numerical reasons.
        ValueError: `gap` or `time_limit` is out of range.
    """
    solution = find(problem, to_program(problem), gap=gap, time_limit=time_limit)
    if solution is None:
        raise explain(problem, time_limit=time_limit)
    return solution


def find(problem: Problem, program: Program, *, gap: float, time_limit: float) -> Solution | None:
    """Solve an integer program, and return the problem's solution; None if the program is infeasible.

    Args:
        problem: the problem, which names the candidates and gives their scores and costs.
        program: the problem's program (`to_program`), possibly with further rows that exclude some choices.
        gap: relative optimality gap of the score.
        time_limit: time limit in seconds.

    Raises:
        TimeoutError: Neither a choice nor a proof of infeasibility was found in time.
    """
    start = time.perf_counter()
    answer = minimise(program, gap=gap, time_limit=time_limit)
    if answer.infeasible:
        return None
    if answer.choice is None:
        raise TimeoutError(
            f"neither a choice of variants nor a proof that none exists was found within {time_limit:g} s; raise "
            "puzzle.search.time_limit"
        )
    score = problem.score(answer.choice)
    return Solution(
        choice=answer.choice,
        score=score,
        costs=problem.costs(answer.choice),
        gap=relative_gap(score, answer.bound),
        bound=answer.bound,
        seconds=time.perf_counter() - start,
    )


def relative_gap(score: float, bound: float) -> float:
    """Return the distance of a score from its lower bound, relative to the score; inf if only the score is 0."""
    if score == bound:
        return 0.0
    return (score - bound) / abs(score) if score else math.inf


def limit_sides(problem: Problem) -> tuple[LimitSide, ...]:
    """List the finite bounds of the problem's limits."""
    sides: tuple[Side, ...] = ("upper", "lower")
    return tuple(
        (resource, side)
        for resource, limit in problem.limits.items()
        for side in sides
        if math.isfinite(getattr(limit, side))
    )


def to_program(
    problem: Problem, sides: Collection[LimitSide] | None = None, *, objective: str | None = None, sign: float = 1.0
) -> Program:
    """Convert a problem to an integer program.

    Args:
        sides: Bounds to include; None to include all.
        objective: Resource to minimise instead of the score; "" to find any feasible choice.
        sign: -1 to maximise the resource.
    """
    sides = limit_sides(problem) if sides is None else sides
    resources = [resource for resource in problem.limits if {(resource, "upper"), (resource, "lower")} & set(sides)]

    def bounds(side: Side, missing: float) -> Floats:
        limits = [(resource, problem.limits[resource]) for resource in resources]
        return np.array(
            [
                getattr(limit, side) - problem.outside.get(name, 0.0) if (name, side) in sides else missing
                for name, limit in limits
            ]
        )

    def goal(block: int) -> Floats:
        if objective is None:
            return np.array([candidate.score for candidate in problem.blocks[block]], dtype=np.float64)
        if not objective:
            return np.zeros(len(problem.blocks[block]))
        return sign * np.array([candidate.costs[objective] for candidate in problem.blocks[block]], dtype=np.float64)

    return Program(
        objective=[goal(block) for block in range(len(problem.blocks))],
        rows=[
            np.array([[one.costs[resource] for resource in resources] for one in block], dtype=np.float64)
            for block in problem.blocks
        ],
        lower=bounds("lower", -math.inf),
        upper=bounds("upper", math.inf),
    )


def explain(problem: Problem, *, time_limit: float) -> Infeasible:
    """Return the exception that explains why a problem has no feasible choice, with an irreducible set of limits.

    The set is found by deletion: each bound in turn is dropped if the rest still conflict. Bounds undecided after
    `time_limit` seconds are kept.
    """
    deadline = time.monotonic() + time_limit

    def remaining() -> float:
        return max(0.01, deadline - time.monotonic())

    every, irreducible = limit_sides(problem), True
    needed = list(every)
    for side in every:
        rest = [other for other in needed if other != side]
        answer = minimise(to_program(problem, rest, objective=""), gap=0.0, time_limit=remaining())
        if answer.infeasible:
            needed = rest
        elif answer.choice is None:
            irreducible = False

    def nearest(resource: str, side: Side, kept: Collection[LimitSide]) -> Answer:
        others = [other for other in kept if other != (resource, side)]
        sign = 1.0 if side == "upper" else -1.0
        program = to_program(problem, others, objective=resource, sign=sign)
        return minimise(program, gap=NEAREST_GAP, time_limit=remaining())

    def conflict(resource: str, side: Side) -> Conflict:
        answer = nearest(resource, side, every)
        if others_conflict := answer.infeasible:
            answer = nearest(resource, side, needed)
        return Conflict(
            resource=resource,
            side=side,
            limit=getattr(problem.limits[resource], side),
            nearest=None if answer.choice is None else problem.costs(answer.choice)[resource],
            with_all_others=not others_conflict,
        )

    return Infeasible(tuple(conflict(*side) for side in needed), irreducible=irreducible)


def pool(
    problem: Problem, size: int, *, min_distance: int = 1, gap: float = GAP, time_limit: float = TIME_LIMIT
) -> list[Solution]:
    """Find up to `size` choices, each the best (within `gap`) at the required distance from the previous ones.

    Distance is the number of blocks that differ (Hamming distance). A solution may contain a dominated variant, if it
    is the cheapest way to differ.

    Args:
        size: Maximum number of solutions.
        min_distance: Minimum number of blocks in which any two solutions differ.
        gap: Relative optimality gap of each solution.
        time_limit: Total seconds for all solutions.

    Returns:
        Solutions found in time, in ascending order of score. Each one's bound and gap refer to the choices that were
        still allowed.

    Raises:
        Infeasible: No choice satisfies the limits.
        TimeoutError: No choice was found in time.
        ValueError: `min_distance` is above the number of blocks.
    """
    if min_distance > len(problem.blocks):
        raise ValueError(
            f"puzzle.search.min_distance={min_distance} must be from 1 to {len(problem.blocks)}, the number of blocks"
        )
    deadline = time.monotonic() + time_limit
    solutions = [solve(problem, gap, time_limit=time_limit)]
    program = to_program(problem)
    while len(solutions) < size:
        program = program.apart_from(solutions[-1].choice, min_distance)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        try:
            solution = find(problem, program, gap=gap, time_limit=remaining)
        except TimeoutError:
            break
        if solution is None:
            break
        solutions.append(solution)
    # A later solution may be better than an earlier one, within the gap.
    return sorted(solutions, key=lambda solution: solution.score)
