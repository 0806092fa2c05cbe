"""Choices from scores and costs."""

import csv
import json
from pathlib import Path

import pytest

from nemo_ext.architecture.model import Architecture
from nemo_ext.job.config import compose
from nemo_ext.puzzle.choice.choose import Costs, choose, draw_front, state_problem
from nemo_ext.puzzle.choice.search import Infeasible
from nemo_ext.puzzle.cost import Serving, block_costs, outside_costs, request_seconds
from nemo_ext.puzzle.score_file import Score
from nemo_ext.puzzle.settings import Search, Sweep
from nemo_ext.puzzle.variants import KEEP, Choices, Variant, variants

SERVING = Serving(batch=4, prompt=64, context=128)


@pytest.fixture
def found() -> list[list[Variant]]:
    architecture = Architecture.from_config(compose("train", ["model=domyn_small_tiny", "run_dir=unused"]))
    return variants(architecture, Choices(ffn_multiple=8))


@pytest.fixture
def costs(found: list[list[Variant]]) -> Costs:
    architecture = Architecture.from_config(compose("train", ["model=domyn_small_tiny", "run_dir=unused"]))
    rows = {
        (v.number + 1, v.name): (v.block, block_costs(architecture, v.block, SERVING)) for each in found for v in each
    }
    return Costs(outside_costs(architecture, SERVING), rows)


@pytest.fixture
def scores(found: list[list[Variant]]) -> list[Score]:
    return [
        Score(block=v.number + 1, variant=v.name, kl=0.1 * at, loss=3.0 + 0.1 * at, cosine=0.2 * at, tokens=10)
        for each in found
        for at, v in enumerate(each)
    ]


def test_costs_are_restored_from_their_file(costs: Costs, tmp_path: Path) -> None:
    costs.write(tmp_path / "costs.csv")
    assert Costs.read(tmp_path / "costs.csv") == costs


def total(costs: Costs, names: list[str], resource: str) -> float:
    return costs.outside[resource] + sum(costs.variants[n, name][1][resource] for n, name in enumerate(names, start=1))


def test_the_choice_satisfies_shares_of_the_whole_parent(costs: Costs, scores: list[Score], tmp_path: Path) -> None:
    chosen = Search(shares={"parameters": 0.6}, limits={"attention_blocks": 2}, pool=3, min_distance=2)
    problem = state_problem(scores, costs, chosen, SERVING)
    choose(problem, chosen, tmp_path)
    assert draw_front(problem, chosen, tmp_path, title="")

    written = json.loads((tmp_path / "choices.json").read_text())
    whole = total(costs, [KEEP] * 6, "parameters")
    assert written["resource"] == "parameters" and written["most"] == pytest.approx(0.6 * whole)
    picks = [each["variants"] for each in written["choices"]]
    assert len(picks) == 3 and [c["score"] for c in written["choices"]] == sorted(
        c["score"] for c in written["choices"]
    )
    for names in picks:
        assert total(costs, names, "parameters") <= 0.6 * whole
        assert total(costs, names, "attention_blocks") <= 2
    assert all(
        sum(a != b for a, b in zip(one, other, strict=True)) >= 2 for one in picks for other in picks if one != other
    )
    with (tmp_path / "pareto.csv").open() as file:
        front = [float(row["score"]) for row in csv.DictReader(file) if row["score"]]
    assert front == sorted(front, reverse=True) and front[-1] == pytest.approx(0.2)  # at most two attention blocks
    assert (tmp_path / "pareto.png").stat().st_size > 2_000


def test_a_throughput_limits_the_time_of_a_request(costs: Costs, scores: list[Score], tmp_path: Path) -> None:
    def seconds(names: list[str]) -> float:
        each = {r: total(costs, names, r) for r in ("prefill_seconds", "decode_seconds")}
        return request_seconds(each, new_tokens=SERVING.context - SERVING.prompt)

    wanted = 1.3 * SERVING.batch * 64 / seconds([KEEP] * 6)
    chosen = Search(limits={"throughput": wanted}, sweep=Sweep(resource=None))
    choose(state_problem(scores, costs, chosen, SERVING), chosen, tmp_path)

    (pick,) = json.loads((tmp_path / "choices.json").read_text())["choices"]
    assert SERVING.batch * 64 / seconds(pick["variants"]) >= wanted
    assert not draw_front(state_problem(scores, costs, chosen, SERVING), chosen, tmp_path, title="")
    assert not (tmp_path / "pareto.csv").exists()


def test_both_bounds_and_the_tighter_of_two_limits(costs: Costs, scores: list[Score]) -> None:
    chosen = Search(shares={"parameters": {"lower": 0.5, "upper": 0.9}}, limits={"parameters": 4e5})
    problem = state_problem(scores, costs, chosen, SERVING)
    limits = problem.limits["parameters"]
    assert limits.upper == 4e5 and problem.outside == costs.outside
    assert limits.lower == pytest.approx(0.5 * total(costs, [KEEP] * 6, "parameters"))


def test_scores_are_increases_over_the_parent(costs: Costs, scores: list[Score]) -> None:
    chosen = Search(metric="loss", shares={"parameters": 0.6})
    problem = state_problem(scores, costs, chosen, SERVING)
    assert [one.score for one in problem.blocks[0]][:3] == pytest.approx([0.0, 0.1, 0.2])


def test_an_infeasible_limit_is_explained(costs: Costs, scores: list[Score], tmp_path: Path) -> None:
    chosen = Search(shares={"parameters": 0.01})
    with pytest.raises(Infeasible, match=r"parameters <= .*nearest"):
        choose(state_problem(scores, costs, chosen, SERVING), chosen, tmp_path)
