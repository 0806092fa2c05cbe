"""Integer program that chooses one variant per block with the lowest total, solved by SciPy's `milp` (HiGHS).

Exact reductions are applied before HiGHS gets the program:
- Variants are removed if another one of the same block is at least as good in the objective and in every row.
- Blocks with equal variants become one set of integer counts. Blocks usually differ in their scores, so this has no
  effect on an ordinary search, but makes searches over costs alone (which limits conflict?) easy at 126 blocks.
- Rows and objective are scaled so that HiGHS's absolute tolerances mean the same for bytes and for seconds.

Ties: HiGHS runs on one thread with a fixed seed, so equal input gives equal output. Then each block gets the best
variant that satisfies the rows (the first of equally good ones), and equal blocks get their variants in ascending
order. Neither step can increase the total.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from nemo_ext.puzzle.choice.problem import TOLERANCE

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_ROW_SIZE = 1e3
"""Scaled size of a row's bound: HiGHS's absolute feasibility tolerance of 1e-6 is then `TOLERANCE` of the bound."""

_OBJECTIVE_SIZE = 1e4
"""Scaled range of the objective."""

_ABSOLUTE_GAP = 1e-6
"""Absolute gap at which HiGHS stops, needed for totals near 0. A bound this close counts as reached."""

_RETRIES = 20


@dataclass(frozen=True)
class Program:
    """An integer program that chooses one variant per block.

    Attributes:
        objective: Array [variants] per block; the sum over the chosen variants is minimised.
        rows: Array [variants, rows] per block; the sum of each column over the chosen variants is bounded.
        lower: Lower bounds [rows], -inf where there is none.
        upper: Upper bounds [rows], inf where there is none.
    """

    objective: Sequence[Floats]
    rows: Sequence[Floats]
    lower: Floats
    upper: Floats

    def totals(self, choice: Sequence[int]) -> Floats:
        """Return the total of each row over the chosen variants, [rows]; `choice` has one variant index per block."""
        return np.sum([row[index] for row, index in zip(self.rows, choice, strict=True)], axis=0)

    def keeps(self, totals: Floats) -> NDArray[np.bool_]:
        """Return, as an array [...], whether totals [..., rows] are within all bounds up to the tolerance."""
        slack = TOLERANCE * self.sizes
        return ((totals <= self.upper + slack) & (totals >= self.lower - slack)).all(axis=-1)

    @cached_property
    def spread(self) -> float:
        """Difference between the largest and the smallest total of the objective, ignoring bounds."""
        return float(sum(each.max() - each.min() for each in self.objective))

    @cached_property
    def sizes(self) -> Floats:
        """Scale of each row's tolerance, [rows]: its bound, or its largest entry if the bound is far smaller."""
        entries = np.max([np.abs(row).max(axis=0) for row in self.rows], axis=0)
        bounds = [np.where(np.isfinite(bound), np.abs(bound), 0.0) for bound in (self.lower, self.upper)]
        larger = np.maximum(*bounds)
        sizes = np.where(larger > 1e-3 * entries, larger, entries)
        return np.where(sizes > 0, sizes, 1.0)

    def apart_from(self, choice: Sequence[int], distance: int) -> "Program":
        """Return the program without the choices that differ from `choice` in fewer than `distance` blocks."""
        same = [np.arange(len(each)) == index for each, index in zip(self.objective, choice, strict=True)]
        return replace(
            self,
            rows=[np.column_stack([row, equal]) for row, equal in zip(self.rows, same, strict=True)],
            lower=np.append(self.lower, -np.inf),
            upper=np.append(self.upper, float(len(choice) - distance)),
        )


@dataclass(frozen=True)
class Answer:
    """Result of solving a program.

    Attributes:
        choice: Index of each block's chosen variant; None if no choice exists or none was found.
        bound: Lower bound on the total, accurate to 1e-10 of the objective's range; inf if no choice exists.
    """

    choice: tuple[int, ...] | None
    bound: float

    @property
    def infeasible(self) -> bool:
        """True if it is proved that no choice satisfies the rows."""
        return self.choice is None and self.bound == np.inf


def minimise(program: Program, *, gap: float, time_limit: float) -> Answer:
    """Find a choice whose total is within the relative `gap` of the lowest one that satisfies the rows.

    After `time_limit` seconds, the best choice found so far is returned, or None if there is none.

    Raises:
        RuntimeError: HiGHS failed for numerical reasons.
    """
    deadline = time.monotonic() + time_limit
    tried = program
    for _ in range(_RETRIES):
        answer = _Reduced(tried).minimise(gap=gap, deadline=deadline)
        if answer.choice is None or program.keeps(program.totals(answer.choice)):
            break
        # Valid by HiGHS's tolerance but not by ours: exclude this choice.
        tried = tried.apart_from(answer.choice, 1)
    else:
        raise RuntimeError(
            f"HiGHS returned {_RETRIES} choices that exceed the limits by rounding errors; loosen a limit of "
            "puzzle.search"
        )
    if answer.choice is None:
        return answer
    choice = _settle_ties(program, answer.choice)
    total = math.fsum(float(each[index]) for each, index in zip(program.objective, choice, strict=True))
    closed = total - answer.bound <= _ABSOLUTE_GAP / _OBJECTIVE_SIZE * program.spread
    return Answer(choice, total if closed else answer.bound)


class _Reduced:
    """Reduced program for HiGHS, whose variables count how often each variant is chosen in a group of equal blocks.

    Variables are ordered by group: those of group g are `start[g]` to `start[g + 1] - 1`.
    """

    def __init__(self, program: Program) -> None:
        self.members = _equal_blocks(program)
        first = [blocks[0] for blocks in self.members]
        self.variants = [undominated(program, block) for block in first]
        self.count = np.array([len(blocks) for blocks in self.members], dtype=np.int64)
        self.start = np.cumsum([0, *map(len, self.variants)])
        objective = np.concatenate([program.objective[b][kept] for b, kept in zip(first, self.variants, strict=True)])
        rows = np.concatenate([program.rows[b][kept] for b, kept in zip(first, self.variants, strict=True)])
        ranges = np.maximum.reduceat(objective, self.start[:-1]) - np.minimum.reduceat(objective, self.start[:-1])
        size = max(float(ranges @ self.count), 1e-9 * float(np.abs(objective).max()))
        self.scale = _OBJECTIVE_SIZE / size if size > 1e-300 else 1.0
        self.objective: Floats = objective * self.scale
        # Half the tolerance, so that a sum equal to its bound up to rounding is accepted. Divide first: the inverse of
        # a size may be infinite.
        self.rows: Floats = rows / program.sizes * _ROW_SIZE
        self.lower: Floats = (program.lower / program.sizes - 0.5 * TOLERANCE) * _ROW_SIZE
        self.upper: Floats = (program.upper / program.sizes + 0.5 * TOLERANCE) * _ROW_SIZE
        self.group = np.repeat(np.arange(len(self.count)), np.diff(self.start))  # group of every variable

    def minimise(self, *, gap: float, deadline: float) -> Answer:
        """Solve the program with HiGHS, and return the best choice found and the bound.

        Args:
            deadline: latest time at which the search stops, by `time.monotonic`.

        Raises:
            RuntimeError: HiGHS failed for numerical reasons.
        """
        one_each = csr_array((np.ones(len(self.group)), (self.group, np.arange(len(self.group)))))
        constraints = [LinearConstraint(one_each, self.count, self.count)]
        if len(self.upper):
            constraints.append(LinearConstraint(self.rows.T, self.lower, self.upper))
        result = milp(
            self.objective,
            integrality=np.ones(len(self.objective)),
            bounds=Bounds(0, self.count[self.group]),
            constraints=constraints,
            options={"mip_rel_gap": gap, "time_limit": max(0.01, deadline - time.monotonic())},
        )
        # Every variable is bounded, so "unbounded or infeasible" (status 4) is infeasible.
        if result.status == 2 or (result.status == 4 and "infeasible" in result.message.lower()):
            return Answer(None, np.inf)
        if result.status not in (0, 1):
            raise RuntimeError(
                f"HiGHS could not solve the integer program ({result.message}); loosen a limit of puzzle.search"
            )
        bound = -np.inf if result.mip_dual_bound is None else float(result.mip_dual_bound) / self.scale
        if result.x is None:
            return Answer(None, bound)
        counts = np.rint(result.x).astype(np.int64)
        assert (np.add.reduceat(counts, self.start[:-1]) == self.count).all(), "HiGHS broke 'one variant per block'"
        choice = [0] * sum(map(len, self.members))
        for number, (blocks, variants) in enumerate(zip(self.members, self.variants, strict=True)):
            spread = np.repeat(variants, counts[self.start[number] : self.start[number + 1]])
            for block, variant in zip(blocks, spread, strict=True):
                choice[block] = int(variant)
        return Answer(tuple(choice), bound)


def undominated(program: Program, block: int) -> Integers:
    """Return the indices of a block's variants that no other variant can replace without loss, in ascending order.

    Of equal variants, only the first one is included. `block` is the block's 0-based index.
    """
    rows = program.rows[block]
    keys = np.column_stack(
        [program.objective[block], rows[:, np.isfinite(program.upper)], -rows[:, np.isfinite(program.lower)]]
    )
    no_worse = (keys[:, None, :] <= keys[None, :, :]).all(axis=2)  # [a, b]: a can replace b
    first = np.arange(len(keys))[:, None] < np.arange(len(keys))[None, :]
    return np.flatnonzero(~(no_worse & (~no_worse.T | first)).any(axis=0))


def _equal_blocks(program: Program) -> list[list[int]]:
    """Group the blocks that have the same variants in the same order; return lists of block indices."""
    alike: dict[tuple[int, bytes, bytes], list[int]] = {}
    for block, (objective, rows) in enumerate(zip(program.objective, program.rows, strict=True)):
        alike.setdefault((len(objective), objective.tobytes(), rows.tobytes()), []).append(block)
    return list(alike.values())


def _settle_ties(program: Program, choice: tuple[int, ...]) -> tuple[int, ...]:
    settled = list(choice)
    totals, changed = program.totals(settled), True
    while changed:
        changed = False
        for block, objective in enumerate(program.objective):
            now = settled[block]
            indices = np.arange(len(objective))
            better = (objective < objective[now]) | ((objective == objective[now]) & (indices < now))
            after = totals - program.rows[block][now] + program.rows[block]
            able = np.flatnonzero(better & program.keeps(after))
            if len(able):
                settled[block] = int(able[np.argmin(objective[able])])
                totals, changed = program.totals(settled), True
    for blocks in _equal_blocks(program):
        for block, variant in zip(blocks, sorted(settled[block] for block in blocks), strict=True):
            settled[block] = variant
    # Sums in another order may differ by rounding.
    return tuple(settled) if program.keeps(program.totals(settled)) else choice
