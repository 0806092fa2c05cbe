"""Pool of distinct good choices, which are then evaluated, as block-wise scores only predict the loss."""

import time

from nemo_ext.puzzle.choice.problem import Problem
from nemo_ext.puzzle.choice.search import GAP, TIME_LIMIT, Solution, find, solve, to_program


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
        ValueError: `size` is below 1, or `min_distance` is not between 1 and the number of blocks.
    """
    if size < 1:
        raise ValueError(f"size={size} (puzzle.search.pool) must be at least 1")
    if not 1 <= min_distance <= len(problem.blocks):
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
