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
    read_problem,
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


def test_files_restore_equal_problems(tmp_path: Path) -> None:
    path = write_problem(small(), tmp_path / "problem.json")
    assert read_problem(path) == small()
    assert json.loads(path.read_text())["limits"] == {
        "bytes": {"upper": 4.5},
        "seconds": {"lower": 0.1},
    }


GOOD = '{"name": "a", "score": 0.5, "costs": {"bytes": 1}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a section with keys"),
        ("{", "Expecting property name"),
        ("{}", "the key 'blocks' is missing"),
        ('{"blocks": 3}', "blocks=3: input should be"),
        ('{"block": []}', "unknown key 'block'.*did you mean 'blocks'"),
        ('{"blocks": [3]}', r"blocks\.0=3"),
        (f'{{"blocks": [[{GOOD}], [3]]}}', r"blocks\.1\.0=3"),
        (GOOD.join(['{"blocks": [[', ']], "limits": {"bytes": {"max": 1}}}']), r"unknown key 'limits\.bytes\.max'"),
        (GOOD.join(['{"blocks": [[', ']], "limits": {"bytes": {"upper": "1"}}}']), r"limits\.bytes\.upper='1'"),
        ('{"blocks": [[{"name": "a", "costs": {}}]]}', r"the key 'blocks\.0\.0\.score' is missing"),
        ('{"blocks": [[{"name": "a", "score": NaN, "costs": {}}]]}', "NaN is not valid JSON"),
        ('{"blocks": [[{"name": "a", "score": 1e999, "costs": {}}]]}', "1e999 is too large"),
        ('{"blocks": [[{"name": "a", "score": 1, "score": 2, "costs": {}}]]}', "duplicate key"),
        ('{"blocks": [[{"name": "a", "score": "1", "costs": {}}]]}', r"blocks\.0\.0\.score='1'"),
        ('{"blocks": [[{"name": 1, "score": 1, "costs": {}}]]}', r"blocks\.0\.0\.name=1"),
    ],
)
def test_invalid_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_problem(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; expected a file"):
        read_problem(tmp_path / "none.json")
