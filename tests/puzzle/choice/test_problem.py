"""Search problems: validation, sums of resources, files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.puzzle.choice.problem import (
    Candidate,
    Limit,
    Problem,
    add_resource,
    seconds_at_throughput,
    write_problem,
)


def small() -> Problem:
    return Problem(
        blocks=[
            [
                Candidate("keep", 0.0, {"bytes": 3, "seconds": 0.5}),
                Candidate("no_op", 0.25, {"bytes": 0, "seconds": 0.0}),
            ],
            [
                Candidate("keep", 0.0, {"bytes": 3, "seconds": 0.5}),
                Candidate("half", -0.1, {"seconds": 0.3, "bytes": 1}),
            ],
        ],
        limits={"bytes": Limit(upper=4.5), "seconds": Limit(lower=0.1)},
        outside={"bytes": 1.0},
    )


def test_totals_and_names_of_a_choice() -> None:
    assert small().costs((1, 1)) == {"bytes": 2.0, "seconds": 0.3}
    assert small().score((1, 1)) == pytest.approx(0.15)
    assert small().names((1, 1)) == ("no_op", "half")


def test_a_resource_that_some_candidates_do_not_have_has_no_total() -> None:
    blocks = [[Candidate("a", 0.0, {"bytes": 1, "heads": 2}), Candidate("b", 0.0, {"bytes": 2})]]
    assert Problem(blocks).resources == ("bytes",)


@pytest.mark.parametrize(
    ("blocks", "limits", "message"),
    [
        ([], {}, "no blocks"),
        ([[Candidate("a", 0.0, {})], []], {}, "block 2 has no candidates"),
        (
            [[Candidate("a", 0.0, {}), Candidate("a", 1.0, {})]],
            {},
            "candidate 'a': candidates 1 and 2 have this name",
        ),
        ([[Candidate("a", math.nan, {})]], {}, "block 1, candidate 'a': score must be a finite number, not nan"),
        ([[Candidate("a", 0.0, {"bytes": math.inf})]], {}, "cost 'bytes' must be a finite number, not inf"),
        ([[Candidate("a", True, {})]], {}, "score must be a finite number, not True"),
        (
            [[Candidate("a", 0.0, {"memory_bytes": 1.0, "decode_seconds": 1.0})]],
            {"memory_byte": Limit(upper=1.0)},
            r"block 1, candidate 'a' has no cost 'memory_byte', which a limit needs.*did you mean 'memory_bytes'\?",
        ),
        ([[Candidate("a", 0.0, {"bytes": 1})]], {"bytes": Limit()}, "limit on 'bytes' has neither upper nor lower"),
        (
            [[Candidate("a", 0.0, {"bytes": 1})]],
            {"bytes": Limit(upper=1, lower=2)},
            "lower=2 must not be above upper=1",
        ),
        ([[Candidate("a", 0.0, {"bytes": 1})]], {"bytes": Limit(upper=math.nan)}, "upper must be a finite number"),
        ([[Candidate("a", 0.0, {"bytes": 1})]], {"bytes": Limit(upper=-math.inf)}, "upper must be a finite number"),
    ],
)
def test_invalid_problems_are_refused(blocks: Any, limits: dict[str, Limit], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(blocks, limits)


def test_a_weighted_sum_is_a_resource_like_others() -> None:
    problem = add_resource(small(), "latency", weights={"seconds": 10.0, "bytes": 1.0})
    assert problem.costs((0, 1))["latency"] == pytest.approx(8.0 + 4.0 + 1.0)  # blocks and outside
    with pytest.raises(ValueError, match="already have a cost 'latency'"):
        add_resource(problem, "latency", weights={"seconds": 1.0})
    with pytest.raises(ValueError, match=r"which the new resource 'x' needs.*did you mean 'seconds'"):
        add_resource(problem, "x", weights={"second": 1.0})


def test_a_throughput_is_a_limit_on_seconds() -> None:
    assert seconds_at_throughput(6400.0, batch=256, tokens=50) == 2.0
    with pytest.raises(ValueError, match="must all be positive"):
        seconds_at_throughput(0.0, batch=1, tokens=1)


def test_files_have_the_whole_problem(tmp_path: Path) -> None:
    stored = json.loads(write_problem(small(), tmp_path / "problem.json").read_text())
    blocks = [[Candidate(**candidate) for candidate in block] for block in stored["blocks"]]
    limits = {name: Limit(**limit) for name, limit in stored["limits"].items()}
    assert Problem(blocks=blocks, limits=limits, outside=stored["outside"]) == small()
    assert stored["limits"] == {"bytes": {"upper": 4.5}, "seconds": {"lower": 0.1}}
