"""The search: the variant of every block with the least total score within the limits, or why there is none.

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
"""Relative optimality gap of the nearest feasible values in an infeasible problem's explanation."""


@dataclass(frozen=True)
class Solution:
    """One choice of variants.

    Attributes:
        choice: 0-based index of the chosen candidate of every block.
        score: Total score.
        costs: Totals of every resource that all candidates have, including what is outside the blocks.
        gap: (score - bound) / |score|, HiGHS's relative gap. More than was asked for means that the time limit was
            reached.
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
        nearest: Total nearest to the bound that is feasible under the other limits; None if the time limit was reached.
        with_all_others: True if "the other limits" are all of the problem's, so that moving this one bound to `nearest`
            makes the problem feasible; False if the remaining limits conflict even without it, and only those of the
            set are kept.
    """

    resource: str
    side: Side
    limit: float
    nearest: float | None
    with_all_others: bool

    def __str__(self) -> str:
        sign = "<=" if self.side == "upper" else ">="
        if self.nearest is None:
            reach = "nearest value not found in time"
        else:
            others = "the other limits" if self.with_all_others else "the others named here"
            reach = f"nearest with {others} kept: {self.nearest:.9g}"
        return f"{self.resource} {sign} {self.limit:.9g} ({reach})"


class Infeasible(ValueError):
    """No choice of variants satisfies the limits.

    Attributes:
        conflicts: Limits that conflict as a set; without any one of them the others can be satisfied.
        irreducible: True if the last part is proved; False if the time limit was reached first.
    """

    def __init__(self, conflicts: tuple[Conflict, ...], *, irreducible: bool = True) -> None:
        self.conflicts = conflicts
        self.irreducible = irreducible
        limits = "; ".join(map(str, conflicts))
        many = "these limits cannot be kept together" if len(conflicts) > 1 else "this limit cannot be kept"
        doubt = "" if irreducible else " (the time limit came before it was clear whether all of them are needed)"
        super().__init__(f"no choice of variants fits, {many}: {limits}{doubt}. Move one of the bounds to its nearest")


def solve(problem: Problem, gap: float = GAP, *, time_limit: float = TIME_LIMIT) -> Solution:
    """Choose one variant per block with the least total score within the limits.

    Args:
        problem: Blocks, candidates and limits.
        gap: Relative optimality gap of the score.
        time_limit: Seconds after which the best choice so far is returned; as long again to explain `Infeasible`.

    Raises:
        Infeasible: No choice satisfies the limits; names the conflicting ones and how far each would have to move.
        TimeoutError: Neither a choice nor a proof of infeasibility was found in time.
        RuntimeError: HiGHS gave up for numerical reasons.
        ValueError: `gap` or `time_limit` is out of range.
    """
    solution = find(problem, to_program(problem), gap=gap, time_limit=time_limit)
    if solution is None:
        raise explain(problem, time_limit=time_limit)
    return solution


def find(problem: Problem, program: Program, *, gap: float, time_limit: float) -> Solution | None:
    """`solve` for the problem's program or one with further rows; None if it is infeasible.

    Raises:
        TimeoutError: Neither a choice nor a proof of infeasibility was found in time.
        ValueError: `gap` or `time_limit` is out of range.
    """
    if not 0 <= gap < 1:
        raise ValueError(f"gap must be a share from 0 to below 1, got {gap}")
    if not 0 < time_limit < math.inf:
        raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit}")
    start = time.perf_counter()
    answer = minimise(program, gap=gap, time_limit=time_limit)
    if answer.infeasible:
        return None
    if answer.choice is None:
        raise TimeoutError(f"no choice of variants within {time_limit:g} s, and no proof that there is none")
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
    """Distance of a score from its bound, as a share of the score."""
    if score == bound:
        return 0.0
    return (score - bound) / abs(score) if score else math.inf


def limit_sides(problem: Problem) -> tuple[LimitSide, ...]:
    """All finite bounds of the problem's limits."""
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
    """Convert a problem to arrays.

    Args:
        problem: The problem.
        sides: Bounds to include; None for all.
        objective: Resource to minimise instead of the score; the empty string for no objective.
        sign: -1 to maximise that resource.
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
    """Explain why a problem has no feasible choice.

    Finds an irreducible set by deletion: each bound in turn is dropped for good if the rest still conflict. A bound
    left undecided by the time limit stays.
    """
    deadline = time.monotonic() + time_limit

    def left() -> float:
        return max(0.01, deadline - time.monotonic())

    every, irreducible = limit_sides(problem), True
    needed = list(every)
    for side in every:
        rest = [other for other in needed if other != side]
        answer = minimise(to_program(problem, rest, objective=""), gap=0.0, time_limit=left())
        if answer.infeasible:
            needed = rest
        elif answer.choice is None:
            irreducible = False

    def nearest(resource: str, side: Side, kept: Collection[LimitSide]) -> Answer:
        others = [other for other in kept if other != (resource, side)]
        sign = 1.0 if side == "upper" else -1.0
        program = to_program(problem, others, objective=resource, sign=sign)
        return minimise(program, gap=NEAREST_GAP, time_limit=left())

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
