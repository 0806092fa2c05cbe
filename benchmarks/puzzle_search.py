"""Puzzle's search at the size of LN-Ultra: ours, plain HiGHS and PuLP + CBC on the same problem files, in one run.

    pip install 'pulp[cbc]>=4'
    python benchmarks/puzzle_search.py [--seeds 5] [--gap 1e-4] [--limit 120] [--blocks 126] [--raw] [--json FILE]

A problem has 126 blocks of 6 attention x 9 FFN variants, costs computed from the 405B parent's sizes with 1 % noise on
the times, scores that grow with the removed part and the block's sensitivity, and five active limits.

- ours: `nemo_ext.puzzle.choice.search.solve`, everything from the problem to the solution.
- HiGHS: SciPy's `milp` on all variables, rows divided by their limits; only the time of `milp`.
- CBC: PuLP with one thread, rows and objective scaled as ours (`--raw`: unscaled); only the time of `solve`, which
  writes and reads CBC's files, without building the model.

All get the same gap and time limit. The run fails if two finished sides differ by more than the gap, or if a side is
better than the bound of another. The ratio of an unfinished side is marked `>`, as it is a lower bound.
"""

import argparse
import json
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from nemo_ext.puzzle.choice.problem import Candidate, Limit, Problem
from nemo_ext.puzzle.choice.search import solve

HIDDEN, HEADS, HEAD_DIM, FFN = 16384, 128, 128, 53248
ATTENTION = {"kv8": 8, "kv4": 4, "kv2": 2, "kv1": 1, "linear": None, "none": 0}
FFN_WIDTHS = {
    "1": 1.0,
    "0.87": 0.87,
    "0.75": 0.75,
    "0.5": 0.5,
    "0.25": 0.25,
    "0.2": 0.2,
    "0.1": 0.1,
    "linear": None,
    "none": 0.0,
}
ATTENTION_HARM = (0.0, 0.08, 0.2, 0.35, 0.7, 1.0)
FFN_HARM = (0.0, 0.04, 0.1, 0.28, 0.55, 0.62, 0.78, 0.9, 1.0)
CACHED_TOKENS, BATCH, CONTEXT, PROMPT = 600_000, 256, 4096, 8192
FLOPS, BANDWIDTH = 8 * 1979e12 * 0.4, 8 * 3.35e12 * 0.6
SHARES = {"parameters": 0.62, "memory_bytes": 0.58, "cache_bytes": 0.5, "prefill_seconds": 0.6, "decode_seconds": 0.58}


@dataclass(frozen=True)
class Side:
    """Result of one solver; `bound` is -inf if it gives none."""

    score: float
    bound: float
    seconds: float
    finished: bool


def ultra_problem(seed: int, blocks: int) -> Problem:
    """Random problem with the structure of Puzzle's on Llama-3.1-405B, FP8 on one node of 8 H100s."""
    rng = np.random.default_rng(seed)
    costs = {
        f"{attention}+{ffn}": block_costs(heads, width, rng.normal(1, 0.01, 2))
        for attention, heads in ATTENTION.items()
        for ffn, width in FFN_WIDTHS.items()
    }
    depth = np.linspace(0, 1, blocks)
    ends = 0.3 + 2.5 * np.exp(-12 * depth) + 1.2 * np.exp(-15 * (1 - depth))
    sensitivity = np.stack(
        [0.01 * ends * rng.lognormal(0, 0.8, blocks), 0.02 * ends * rng.lognormal(0, 0.5, blocks)], axis=1
    )
    library = []
    for attention, ffn in sensitivity:
        one, other = np.meshgrid(attention * np.array(ATTENTION_HARM), ffn * np.array(FFN_HARM), indexing="ij")
        harm = (one + other + 0.5 * np.sqrt(one * other)).ravel()
        scores = harm * rng.normal(1, 0.05, harm.size) + rng.normal(0, 2e-5, harm.size)
        scores[0] = 0.0
        library.append([Candidate(name, float(score), costs[name]) for name, score in zip(costs, scores, strict=True)])
    parent = Problem(library).costs([0] * blocks)
    shares = {name: share * rng.normal(1, 0.03) for name, share in SHARES.items()}
    return Problem(library, {name: Limit(upper=float(share * parent[name])) for name, share in shares.items()})


def block_costs(heads: int | None, width: float | None, noise: np.ndarray) -> dict[str, float]:
    """Costs of one layer; `heads` are KV heads, `width` the fraction of the FFN width, None a linear, 0 a no-op."""
    linear = HIDDEN * HIDDEN
    attention = linear if heads is None else 2 * HIDDEN * (HEADS + heads) * HEAD_DIM if heads else 0
    parameters = attention + (linear if width is None else 3 * HIDDEN * int(FFN * width))
    cache_per_token = 2 * (heads or 0) * HEAD_DIM
    launches = 12e-6 * (heads != 0) + 10e-6 * (width != 0)
    scores = 2 * PROMPT**2 * HEADS * HEAD_DIM if heads else 0
    return {
        "parameters": parameters,
        "memory_bytes": parameters + cache_per_token * CACHED_TOKENS,
        "cache_bytes": cache_per_token * CACHED_TOKENS,
        "prefill_seconds": float(noise[0] * (2 * parameters * PROMPT + scores) / FLOPS),
        "decode_seconds": float(noise[1] * ((parameters + cache_per_token * BATCH * CONTEXT) / BANDWIDTH + launches)),
    }


def by_us(problem: Problem, *, gap: float, limit: float) -> Side:
    start = time.perf_counter()
    solution = solve(problem, gap, time_limit=limit)
    return Side(solution.score, solution.bound, time.perf_counter() - start, solution.gap <= gap)


def by_plain_highs(problem: Problem, *, gap: float, limit: float) -> Side:
    candidates = [candidate for block in problem.blocks for candidate in block]
    scores = np.array([candidate.score for candidate in candidates])
    block = np.repeat(np.arange(len(problem.blocks)), [len(each) for each in problem.blocks])
    one_each = csr_array((np.ones(len(scores)), (block, np.arange(len(scores)))))
    rows = np.array(
        [[candidate.costs[name] / bound.upper for candidate in candidates] for name, bound in problem.limits.items()]
    )
    start = time.perf_counter()
    result = milp(
        scores,
        integrality=np.ones(len(scores)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(rows, -np.inf, 1)],
        options={"mip_rel_gap": gap, "time_limit": limit},
    )
    return Side(float(result.fun), float(result.mip_dual_bound), time.perf_counter() - start, result.status == 0)


def by_cbc(problem: Problem, *, gap: float, limit: float, raw: bool) -> Side:
    try:
        import pulp
    except ImportError:
        raise SystemExit("PuLP is not installed: pip install 'pulp[cbc]>=4'") from None
    program = pulp.LpProblem("puzzle", pulp.LpMinimize)
    variables = [
        [program.add_variable(f"x{number}_{index}", cat="Binary") for index in range(len(block))]
        for number, block in enumerate(problem.blocks)
    ]
    pairs = [
        (candidate, variable)
        for block, chosen in zip(problem.blocks, variables, strict=True)
        for candidate, variable in zip(block, chosen, strict=True)
    ]
    spread = sum(max(one.score for one in block) - min(one.score for one in block) for block in problem.blocks)
    scale = 1.0 if raw else 1e4 / spread
    program += pulp.lpSum(scale * candidate.score * variable for candidate, variable in pairs)
    for chosen in variables:
        program += pulp.lpSum(chosen) == 1
    for name, bound in problem.limits.items():
        unit = 1.0 if raw else bound.upper / 1e3
        row = pulp.lpSum(candidate.costs[name] / unit * variable for candidate, variable in pairs)
        program += row <= bound.upper / unit
    solver = pulp.COIN_CMD(msg=False, gapRel=gap, threads=1, timeLimit=limit)
    if not solver.available():
        raise SystemExit("PuLP does not find CBC: pip install 'pulp[cbc]>=4'")
    start = time.perf_counter()
    stats = program.solve(solver)
    seconds = time.perf_counter() - start
    if not stats.has_solution:
        return Side(math.inf, -math.inf, seconds, False)
    choice = [max(range(len(chosen)), key=lambda index: chosen[index].value()) for chosen in variables]
    finished = stats.status in (pulp.LpSolveStatus.Optimal, pulp.LpSolveStatus.GapLimit)
    # After it has finished, the bound in CBC's log may be its best solution; then only the gap is known.
    bound = -math.inf if finished or stats.best_bound is None else stats.best_bound / scale
    return Side(problem.score(choice), bound, seconds, finished)


def check(sides: dict[str, Side], gap: float) -> None:
    """Fail if the sides contradict each other."""
    # Solvers accept violations of rows up to 1e-6 of the scaled bound, which may change the score slightly.
    slack = 1e-6
    for name, side in sides.items():
        for other_name, other in sides.items():
            if math.isfinite(side.score) and side.score < other.bound - slack * abs(other.bound):
                raise SystemExit(f"{name}'s score {side.score} is below {other_name}'s bound {other.bound}")
            if side.finished and other.finished and abs(side.score - other.score) > (gap + slack) * abs(side.score):
                raise SystemExit(f"{name} and {other_name} differ by more than the gap: {side.score}, {other.score}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=126)
    parser.add_argument("--gap", type=float, default=1e-4)
    parser.add_argument("--limit", type=float, default=120.0, help="time limit in seconds per side and seed")
    parser.add_argument("--raw", action="store_true", help="give CBC the unscaled numbers")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    gap, limit = arguments.gap, arguments.limit
    rows: list[dict[str, Any]] = []
    variants = len(ATTENTION) * len(FFN_WIDTHS)
    print(f"SciPy {scipy.__version__}, {arguments.blocks} blocks x {variants}, gap {gap:g}, time limit {limit:g} s")
    print("seed   load   ours s  HiGHS s      CBC s   HiGHS/ours    CBC/ours   score ours        CBC's over ours")
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        problem = ultra_problem(seed, arguments.blocks)
        sides = {
            "ours": by_us(problem, gap=gap, limit=limit),
            "HiGHS": by_plain_highs(problem, gap=gap, limit=limit),
            "CBC": by_cbc(problem, gap=gap, limit=limit, raw=arguments.raw),
        }
        check(sides, gap)
        ours, highs, cbc = sides.values()
        load = os.getloadavg()[0]
        rows.append({"seed": seed, "load": load, **{name: vars(side) for name, side in sides.items()}})
        more = [" " if side.finished else ">" for side in (highs, cbc)]
        print(
            f"{seed:4d}  {load:5.2f}  {ours.seconds:7.2f} {more[0]}{highs.seconds:7.2f}  "
            f"{more[1]}{cbc.seconds:8.2f}  "
            f"{more[0]}{highs.seconds / ours.seconds:10.1f}x {more[1]}{cbc.seconds / ours.seconds:9.1f}x  "
            f"{ours.score:.7f}{'' if ours.finished else ' (not finished)'}  {cbc.score / ours.score - 1:+14.2e}",
            flush=True,
        )
    for name in ("HiGHS", "CBC"):
        ratio = statistics.median(row[name]["seconds"] / row["ours"]["seconds"] for row in rows)
        unfinished = sum(not row[name]["finished"] for row in rows)
        print(f"median {name}/ours: {ratio:.1f}x ({unfinished} of {len(rows)} stopped by the time limit)")
    if arguments.json:
        temporary = arguments.json.with_name(arguments.json.name + ".part")
        temporary.write_text(json.dumps(rows, indent=1) + "\n")
        temporary.replace(arguments.json)


if __name__ == "__main__":
    main()
