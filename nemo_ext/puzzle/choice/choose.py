"""Choices based on scores and costs: the search problem, pool of solutions and Pareto front. Does not import torch."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.pattern import parse
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import notice
from nemo_ext.puzzle.choice.problem import Candidate, Limit, Problem, write_problem
from nemo_ext.puzzle.choice.search import pool, solve
from nemo_ext.puzzle.choice.sweep import plot, sweep, write_csv
from nemo_ext.puzzle.cost import OUTSIDE, REQUEST_SECONDS, RESOURCES, Serving, throughput_limit, with_request_seconds
from nemo_ext.puzzle.score_file import Score
from nemo_ext.puzzle.settings import THROUGHPUT, Search, limit
from nemo_ext.puzzle.variants import KEEP

SIZES = ("memory_bytes", "weight_bytes", "parameters", "active_parameters")


@dataclass(frozen=True)
class Costs:
    """Costs of every variant, keyed by resource.

    Attributes:
        outside: costs of everything outside the blocks.
        variants: mapping from (1-based block number, variant name) to the block (None for a no-op) and its costs.
    """

    outside: Mapping[str, float]
    variants: Mapping[tuple[int, str], tuple[Block | None, Mapping[str, float]]]

    def write(self, file: Path) -> None:
        """Write a CSV file with one line for the part outside the blocks and one per variant."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["block", "variant", "notation", *RESOURCES])
        writer.writerow([OUTSIDE, "", "", *(self.outside[name] for name in RESOURCES)])
        for (number, variant), (block, costs) in self.variants.items():
            writer.writerow([number, variant, block or "", *(costs[name] for name in RESOURCES)])
        write_text(file, text.getvalue())

    @classmethod
    def read(cls, file: Path) -> "Costs":
        """Read a file written by `write`."""
        with file.open(newline="") as opened:
            rows = list(csv.DictReader(opened))
        numbers = [{name: float(row[name]) for name in RESOURCES} for row in rows]
        variants: dict[tuple[int, str], tuple[Block | None, Mapping[str, float]]] = {}
        for row, costs in zip(rows[1:], numbers[1:], strict=True):
            blocks = parse(row["notation"]).blocks if row["notation"] else (None,)
            variants[int(row["block"]), row["variant"]] = (blocks[0], costs)
        return cls(numbers[0], variants)


def state_problem(scores: Sequence[Score], costs: Costs, chosen: Search, serving: Serving) -> Problem:
    """Build the search problem: one candidate per variant, scored by the metric's increase over the parent.

    Args:
        serving: serving scenario, from which a limit on the throughput is converted to seconds.

    Raises:
        ValueError: a throughput cannot be reached even without blocks, or a lower bound is above the upper one.
    """
    blocks: dict[int, list[Candidate]] = {}
    unchanged = {score.block: getattr(score, chosen.metric) for score in scores if score.variant == KEEP}
    for score in scores:
        increase = getattr(score, chosen.metric) - unchanged[score.block]
        blocks.setdefault(score.block, []).append(
            Candidate(score.variant, increase, dict(costs.variants[score.block, score.variant][1]))
        )
    problem = Problem([blocks[number] for number in sorted(blocks)], outside=costs.outside)
    resources = {*chosen.shares, *chosen.limits, chosen.sweep.resource}
    if resources & {REQUEST_SECONDS, THROUGHPUT}:
        problem = with_request_seconds(problem, new_tokens=serving.context - serving.prompt)
    return problem.with_limits(_limits(problem, chosen, serving))


def _limits(problem: Problem, chosen: Search, serving: Serving) -> dict[str, Limit]:
    limits: dict[str, Limit] = {}
    parent = problem.costs([0] * len(problem.blocks))

    def add(name: str, bounds: Limit, unit: float) -> None:
        # If a resource is limited both as a share and absolutely, the tighter bound counts.
        before = limits.get(name, Limit())
        limits[name] = Limit(
            upper=min(before.upper, bounds.upper * unit),
            lower=max(before.lower, bounds.lower * unit),
        )

    for name, value in chosen.shares.items():
        add(name, limit(f"puzzle.search.shares.{name}", value), parent[name])
    for name, value in chosen.limits.items():
        bounds = limit(f"puzzle.search.limits.{name}", value, at_least=name == THROUGHPUT)
        if name != THROUGHPUT:
            add(name, bounds, 1.0)
            continue
        new_tokens = serving.context - serving.prompt
        seconds = throughput_limit(bounds.lower, serving=serving, new_tokens=new_tokens, outside=problem.outside)
        add(REQUEST_SECONDS, seconds, 1.0)
    return limits


def choose(problem: Problem, chosen: Search, folder: Path) -> None:
    """Run the search, and write problem.json and choices.json to a folder.

    choices.json holds the solutions, in ascending order of score, and the inputs of the baselines: a resource, its
    limit, and the solution of a search with this limit alone.

    Raises:
        Infeasible: no choice satisfies the limits.
    """
    write_problem(problem, folder / "problem.json")
    solutions = pool(
        problem, chosen.pool, min_distance=chosen.min_distance, gap=chosen.gap, time_limit=chosen.time_limit
    )
    for solution in solutions:
        if solution.gap > chosen.gap:
            notice(
                f"search: stopped at puzzle.search.time_limit; raise it, as the score may be {solution.gap:.1%} from "
                "the best"
            )
    resource, limit_of_reference = _reference(problem)
    limit_of_reference = solutions[0].costs[resource] if limit_of_reference == math.inf else limit_of_reference
    alone = None
    if set(problem.limits) != {resource}:
        # A reference for the baselines, which satisfy only the limit on this resource.
        reference = solve(
            problem.with_limits({resource: Limit(upper=limit_of_reference)}), chosen.gap, time_limit=chosen.time_limit
        )
        alone = {"variants": problem.names(reference.choice), "score": reference.score}
    choices = {
        "resource": resource,
        "most": limit_of_reference,
        "alone": alone,
        "choices": [
            {
                "variants": problem.names(each.choice),
                "score": each.score,
                "bound": each.bound,
                "costs": each.costs,
            }
            for each in solutions
        ],
    }
    write_text(folder / "choices.json", json.dumps(choices, indent=1) + "\n")


def _reference(problem: Problem) -> tuple[str, float]:
    """Return the resource on which baselines must match the child, and its upper limit.

    It is the first size (a resource to which every block adds) that has an upper limit. If there is none, it is
    `parameters`, with inf as the limit.
    """
    for name in SIZES:
        if name in problem.limits and problem.limits[name].upper < math.inf:
            return name, problem.limits[name].upper
    return "parameters", math.inf


def draw_front(problem: Problem, chosen: Search, folder: Path, *, title: str) -> bool:
    """Compute the Pareto front that `chosen.sweep` describes, and write pareto.csv and pareto.png.

    No picture is drawn if all points of the front are infeasible.

    Args:
        problem: search problem; its limit on the swept resource is ignored.
        chosen: settings of the search.
        folder: folder with choices.json from `choose`, where both files are written.

    Returns:
        True if the front was written; False if `chosen.sweep` names no resource or the time limit was reached.
    """
    resource = chosen.sweep.resource
    if resource is None:
        return False
    parent = (0,) * len(problem.blocks)
    resource_limit = problem.limits.get(resource, Limit())
    total = problem.costs(parent)[resource]
    count, smallest = chosen.sweep.points, chosen.sweep.smallest
    shares = [smallest + (1 - smallest) * step / max(1, count - 1) for step in range(count)]
    # A limit on the swept resource would truncate the front.
    free = problem.with_limits(
        {name: bounds for name, bounds in problem.limits.items() if name != resource}
        | {resource: replace(resource_limit, upper=total, lower=-math.inf)}
    )
    try:
        points = sweep(
            free,
            resource,
            values=[total * share for share in shares],
            gap=chosen.gap,
            time_limit=chosen.time_limit,
        )
    except TimeoutError:
        notice("front: not drawn, as a search reached its time limit; raise puzzle.search.time_limit")
        return False
    write_csv(points, folder / "pareto.csv")
    if any(point.solution for point in points):
        first = json.loads((folder / "choices.json").read_text())["choices"][0]["variants"]
        child = [[one.name for one in block].index(name) for block, name in zip(problem.blocks, first, strict=True)]
        plot(points, folder / "pareto.png", problem=free, resource=resource, parent=parent, child=child, title=title)
    return True
