"""Several good choices that differ: candidates for the real evaluation, which block-wise scores only predict."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_ext.puzzle.choice.problem import Problem
from nemo_ext.puzzle.choice.search import GAP, TIME_LIMIT, Solution, find, solve, to_program


@dataclass(frozen=True)
class Pool:
    """Choices that differ.

    Attributes:
        solutions: In ascending score. Bound and gap of each are those among the choices that were left for it.
        exhausted: Whether it is proved that no further choice is far enough from all of these. With fewer solutions
            than asked for, False means that the time limit came first.
    """

    solutions: tuple[Solution, ...]
    exhausted: bool


def pool(
    problem: Problem, size: int, *, min_distance: int = 1, gap: float = GAP, time_limit: float = TIME_LIMIT
) -> Pool:
    """Collect up to `size` choices, each the best (within `gap`) of those far enough from the ones before it.

    Two choices are as far apart as the number of blocks in which they differ (Hamming distance). A variant that is
    dominated can be part of a solution here: it may be the cheapest way to differ.

    Args:
        problem: Blocks, candidates and limits.
        size: Most solutions to return.
        min_distance: Least number of blocks in which any two solutions differ.
        gap: How far each may be from the best, as a share of its score.
        time_limit: Seconds for all of them together.

    Raises:
        Infeasible: Not even one choice keeps the limits.
        TimeoutError: Not even one was found in time.
        ValueError: `size` is below 1, or `min_distance` not from 1 to the number of blocks.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not 1 <= min_distance <= len(problem.blocks):
        raise ValueError(f"min_distance must be from 1 to the {len(problem.blocks)} blocks, got {min_distance}")
    deadline = time.monotonic() + time_limit
    solutions = [solve(problem, gap, time_limit=time_limit)]
    program = to_program(problem)
    exhausted = False
    while len(solutions) < size:
        program = program.apart_from(solutions[-1].choice, min_distance)
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            solution = find(problem, program, gap=gap, time_limit=left)
        except TimeoutError:
            break
        if solution is None:
            exhausted = True
            break
        solutions.append(solution)
    # Within the gap a later one may have come out better than an earlier one.
    return Pool(tuple(sorted(solutions, key=lambda solution: solution.score)), exhausted)


def distance(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of blocks in which two choices differ."""
    return sum(a != b for a, b in zip(one, other, strict=True))
