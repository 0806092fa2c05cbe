"""Several good choices that differ: candidates for evaluation, which block-wise scores only predict."""

import time

from nemo_ext.puzzle.choice.problem import Problem
from nemo_ext.puzzle.choice.search import GAP, TIME_LIMIT, Solution, find, solve, to_program


def pool(
    problem: Problem, size: int, *, min_distance: int = 1, gap: float = GAP, time_limit: float = TIME_LIMIT
) -> list[Solution]:
    """Collect up to `size` choices, each the best (within `gap`) that is far enough from the previous ones.

    The distance of two choices is the number of blocks in which they differ (Hamming distance). A dominated variant can
    be part of a solution here: it may be the cheapest way to differ.

    Args:
        problem: Blocks, candidates and limits.
        size: Most solutions to return.
        min_distance: Least number of blocks in which any two solutions differ.
        gap: Relative optimality gap of each solution.
        time_limit: Total seconds for all solutions.

    Returns:
        The solutions found in time, in ascending score; bound and gap of each are relative to the choices that were
        still available for it.

    Raises:
        Infeasible: No choice satisfies the limits.
        TimeoutError: No choice was found in time.
        ValueError: `size` is below 1, or `min_distance` is not between 1 and the number of blocks.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if not 1 <= min_distance <= len(problem.blocks):
        raise ValueError(f"min_distance must be from 1 to the {len(problem.blocks)} blocks, got {min_distance}")
    deadline = time.monotonic() + time_limit
    solutions = [solve(problem, gap, time_limit=time_limit)]
    program = to_program(problem)
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
            break
        solutions.append(solution)
    # Within the gap, a later solution may be better than an earlier one.
    return sorted(solutions, key=lambda solution: solution.score)
