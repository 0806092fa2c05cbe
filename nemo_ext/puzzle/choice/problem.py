"""Search problem: candidates for every block, and limits on the sums of their costs.

A resource is any name for which candidates have a cost, such as parameters, active_parameters, memory_bytes,
cache_bytes, prefill_seconds, decode_seconds or attention_blocks. Its total is the amount outside the blocks plus the
costs of the chosen variants.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.settings import nearest

TOLERANCE = 1e-9
"""Relative tolerance of limits, as sums of floats are not exact.

It is relative to the part of the limit that is left for the blocks, or to the largest cost if that is more than 1000
times larger.
"""


@dataclass(frozen=True)
class Candidate:
    """One variant of one block.

    Attributes:
        name: Name of the variant, unique in its block.
        score: Increase in the model's loss with this variant; lower is better, and it may be negative.
        costs: Mapping from resources to costs, in the resource's unit.
    """

    name: str
    score: float
    costs: Mapping[str, float]


@dataclass(frozen=True)
class Limit:
    """Bounds on the total of a resource, both inclusive.

    Attributes:
        upper: Maximum total.
        lower: Minimum total.
    """

    upper: float = math.inf
    lower: float = -math.inf


@dataclass(frozen=True)
class Problem:
    """Search problem in which exactly one candidate per block is chosen.

    Attributes:
        limits: Mapping from resources to bounds on their totals.
        outside: Mapping from resources to amounts outside the blocks (embedding, runtime overhead); 0 if absent.

    Raises:
        ValueError: There are no blocks, a block is empty or repeats a name, a number is not finite, a limit has no
            bounds or crossed ones, or a candidate has no cost for a limited resource.
    """

    blocks: Sequence[Sequence[Candidate]]
    limits: Mapping[str, Limit] = field(default_factory=dict)
    outside: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(tuple(block) for block in self.blocks))
        object.__setattr__(self, "limits", dict(self.limits))
        object.__setattr__(self, "outside", dict(self.outside))
        if not self.blocks:
            raise ValueError("the search problem has no blocks; add at least one")
        for number, block in enumerate(self.blocks, start=1):
            _check_block(number, block)
        for resource, amount in self.outside.items():
            _check_number(amount, f"outside: {resource!r}")
        for resource, limit in self.limits.items():
            _check_limit(resource, limit)
            self._check_resource(resource, "a limit")

    def _check_resource(self, resource: str, user: str) -> None:
        for number, block in enumerate(self.blocks, start=1):
            for candidate in block:
                if resource not in candidate.costs:
                    where = f"block {number}, candidate {candidate.name!r}"
                    known = nearest(resource, candidate.costs)
                    raise ValueError(f"{where} has no cost {resource!r}, which {user} needs; {known}")

    @property
    def resources(self) -> tuple[str, ...]:
        """Resources for which every candidate has a cost, in the first candidate's order."""
        candidates = [candidate for block in self.blocks for candidate in block]
        return tuple(name for name in candidates[0].costs if all(name in other.costs for other in candidates))

    def score(self, choice: Sequence[int]) -> float:
        """Compute the total score of a choice, given as one 0-based index per block."""
        return math.fsum(block[index].score for block, index in zip(self.blocks, choice, strict=True))

    def costs(self, choice: Sequence[int]) -> dict[str, float]:
        """Compute the totals of `resources` for a choice, including the part outside the blocks."""
        chosen = [block[index] for block, index in zip(self.blocks, choice, strict=True)]
        return {
            name: math.fsum([self.outside.get(name, 0.0), *(float(one.costs[name]) for one in chosen)])
            for name in self.resources
        }

    def names(self, choice: Sequence[int]) -> tuple[str, ...]:
        """Return the names of a choice's candidates; the choice is given as one 0-based index per block."""
        return tuple(block[index].name for block, index in zip(self.blocks, choice, strict=True))

    def with_limits(self, limits: Mapping[str, Limit]) -> "Problem":
        """Return the same problem with other limits."""
        return replace(self, limits=limits)


def add_resource(problem: Problem, name: str, *, weights: Mapping[str, float]) -> Problem:
    """Add a resource to every candidate and to the part outside: a weighted sum of existing ones.

    Examples: memory of weights and cache, `{"weight_bytes": 1, "cache_bytes_per_token": 600_000}`; latency of a
    request, `{"prefill_seconds": 1, "decode_seconds": 512}`.

    Raises:
        ValueError: The name is taken, or a candidate does not have one of the resources.
    """
    if any(name in candidate.costs for block in problem.blocks for candidate in block):
        raise ValueError(f"candidates already have a cost {name!r}: choose another name")
    for resource in weights:
        problem._check_resource(resource, f"the new resource {name!r}")

    def added(costs: Mapping[str, float]) -> dict[str, float]:
        return {**costs, name: math.fsum(weight * costs.get(key, 0.0) for key, weight in weights.items())}

    blocks = [[replace(one, costs=added(one.costs)) for one in block] for block in problem.blocks]
    return replace(problem, blocks=blocks, outside=added(problem.outside))


def seconds_at_throughput(tokens_per_second: float, *, batch: int, tokens: int) -> float:
    """Return the maximum number of seconds that a batch may take at a minimum throughput.

    Args:
        tokens_per_second: throughput of the whole batch.
        batch: number of sequences.
        tokens: number of tokens generated per sequence.

    Raises:
        ValueError: an argument is not positive.
    """
    if not (0 < tokens_per_second < math.inf and batch > 0 and tokens > 0):
        raise ValueError(
            f"tokens_per_second={tokens_per_second}, batch={batch} and tokens={tokens} must all be positive"
        )
    return batch * tokens / tokens_per_second


def write_problem(problem: Problem, path: Path) -> Path:
    """Write a problem as JSON, one candidate per line."""

    def line(candidate: Candidate) -> str:
        row = {"name": candidate.name, "score": candidate.score, "costs": dict(candidate.costs)}
        return "  " + json.dumps(row, allow_nan=False)

    blocks = ",\n".join(" [\n" + ",\n".join(map(line, block)) + "\n ]" for block in problem.blocks)
    limits = {
        resource: {
            key: value
            for key, value, default in (
                ("upper", limit.upper, math.inf),
                ("lower", limit.lower, -math.inf),
            )
            if value != default
        }
        for resource, limit in problem.limits.items()
    }
    head = ",\n".join(
        f'"{key}": {json.dumps(value, allow_nan=False)}'
        for key, value in (("limits", limits), ("outside", dict(problem.outside)))
    )
    write_text(path, f'{{{head},\n"blocks": [\n{blocks}\n]}}\n')
    return path


def _check_block(number: int, block: Sequence[Candidate]) -> None:
    if not block:
        raise ValueError(f"block {number} has no candidates: add at least the parent's block")
    seen: dict[str, int] = {}
    for position, candidate in enumerate(block, start=1):
        where = f"block {number}, candidate {candidate.name!r}"
        if candidate.name in seen:
            raise ValueError(f"{where}: candidates {seen[candidate.name]} and {position} have this name; rename one")
        seen[candidate.name] = position
        _check_number(candidate.score, f"{where}: score")
        for resource, cost in candidate.costs.items():
            _check_number(cost, f"{where}: cost {resource!r}")


def _check_limit(resource: str, limit: Limit) -> None:
    where = f"limit on {resource!r}"
    for side, unbounded in (("upper", math.inf), ("lower", -math.inf)):
        if (bound := getattr(limit, side)) != unbounded:
            _check_number(bound, f"{where}: {side}")
    if limit.upper == math.inf and limit.lower == -math.inf:
        raise ValueError(f"{where} has neither upper nor lower; add one, or remove the limit")
    if limit.lower > limit.upper:
        raise ValueError(f"{where}: lower={limit.lower:g} must not be above upper={limit.upper:g}")


def _check_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, not {value!r}")
