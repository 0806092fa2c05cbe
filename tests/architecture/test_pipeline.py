"""Balancing: optimal compared with brute force, deterministic, and refused for impossible settings."""

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_ext.architecture import cost
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern, format, parse
from nemo_ext.architecture.pipeline import (
    BlockCosts,
    balance,
    even_cuts,
    forward_flops,
    idle_share,
    parameter_counts,
    rank_costs,
)

ArchitectureOf = Callable[..., Architecture]


def model(blocks: int) -> Architecture:
    return Architecture(
        pattern=Pattern((Block("-"),) * blocks),
        hidden_size=8,
        vocab_size=128,
        defaults=(Block.from_values("-", ffn=8),),
        seq_length=4,
    )


def all_cuts(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return list(combinations(range(1, blocks), stages - 1))


@st.composite
def problems(draw: st.DrawFn) -> tuple[BlockCosts, int]:
    whole = st.integers(0, 30)
    costs = draw(st.lists(whole, min_size=1, max_size=9))
    known = BlockCosts(tuple(map(float, costs)), embedding=draw(whole), head=draw(whole))
    return known, draw(st.integers(1, len(costs)))


@given(problems())
@example((BlockCosts((3, 9, 6, 5)), 3))  # the least sum of squares is another cut
@example((BlockCosts((6, 8, 5, 3, 9)), 3))
def test_no_cut_has_a_cheaper_longest_stage(problem: tuple[BlockCosts, int]) -> None:
    known, stages = problem
    pattern = balance(model(len(known.blocks)), pipeline_parallel=stages, cost=known)
    best = min(max(known.of_stages(cuts)) for cuts in all_cuts(len(known.blocks), stages))
    assert len(pattern.stages) == stages
    assert all(first < last for first, last in pattern.stages)
    assert max(known.of_stages(pattern.cuts)) == best


@given(problems())
def test_the_most_even_of_the_best_cuts_is_chosen(problem: tuple[BlockCosts, int]) -> None:
    known, stages = problem

    def judged(cuts: tuple[int, ...]) -> tuple[float, float]:
        costs = known.of_stages(cuts)
        return max(costs), sum(stage * stage for stage in costs)

    assert judged(even_cuts(known, stages)) == min(map(judged, all_cuts(len(known.blocks), stages)))


@given(problems(), st.integers(1, 4), st.integers(2, 3))
def test_virtual_stages_keep_the_best_stage_and_only_improve_ranks(
    problem: tuple[BlockCosts, int], pipeline_parallel: int, virtual_stages: int
) -> None:
    known, _ = problem
    stages = pipeline_parallel * virtual_stages
    if stages > len(known.blocks):
        return
    cuts = balance(
        model(len(known.blocks)), pipeline_parallel=pipeline_parallel, virtual_stages=virtual_stages, cost=known
    ).cuts
    plain = even_cuts(known, stages)
    assert max(known.of_stages(cuts)) == max(known.of_stages(plain))
    longest = [max(rank_costs(known.of_stages(each), pipeline_parallel)) for each in (cuts, plain)]
    assert longest[0] <= longest[1]


def test_a_rank_runs_every_pipeline_parallel_th_stage() -> None:
    assert rank_costs((1, 2, 3, 10, 20, 30), 3) == (11, 22, 33)


def test_moving_a_cut_levels_the_ranks() -> None:
    # Stages 5 5 6 4 are the most even, with ranks 11 and 9; 4 6 6 4 has the same longest stage and ranks 10.
    known = BlockCosts((4, 1, 5, 2, 4, 4))
    assert known.of_stages(even_cuts(known, 4)) == (5, 5, 6, 4)
    cuts = balance(model(6), pipeline_parallel=2, virtual_stages=2, cost=known).cuts
    assert known.of_stages(cuts) == (4, 6, 6, 4)


def test_the_ends_count(architecture_of: ArchitectureOf) -> None:
    # 16 equal layers, an output layer worth several: the last stage must get fewer blocks.
    olmo = architecture_of("olmo1_1b")
    pattern = balance(olmo, pipeline_parallel=4)
    sizes = [last - first for first, last in pattern.stages]
    assert sizes[-1] < min(sizes[:-1])
    assert sum(sizes) == 32
    heavy_embedding = BlockCosts((1.0,) * 8, embedding=3)
    assert balance(model(8), pipeline_parallel=2, cost=heavy_embedding).cuts in {(2,), (3,)}


def test_balanced_stages_of_nemotron(architecture_of: ArchitectureOf) -> None:
    nano = architecture_of("nemotron3_nano")
    cut = nano.with_pattern(balance(nano, pipeline_parallel=4))
    stages = [stage.forward_flops_per_token for stage in cost.per_stage(cut, Layout(pipeline_parallel=4))]
    assert max(stages) / (sum(stages) / 4) < 1.07
    assert stages == pytest.approx(forward_flops(nano).of_stages(cut.pattern.cuts))
    assert parse(format(cut.pattern)) == cut.pattern


def test_cuts_are_replaced_and_the_result_repeats(architecture_of: ArchitectureOf) -> None:
    nano = architecture_of("nemotron3_nano")
    first = balance(nano, pipeline_parallel=2)
    assert balance(nano.with_pattern(first), pipeline_parallel=2) == first
    assert balance(nano.with_pattern(first), pipeline_parallel=1).cuts == ()


def test_parameters_as_cost_count_a_tied_output_layer_twice(architecture_of: ArchitectureOf) -> None:
    tied, untied = (
        parameter_counts(architecture_of("olmo1_1b", untie_embeddings_and_output_weights=flag))
        for flag in (False, True)
    )
    assert tied.head == untied.head == 50304 * 2048
    assert tied.embedding == 50304 * 2048
    assert sum(untied.blocks) + untied.embedding + untied.head == cost.total_params(
        architecture_of("olmo1_1b", untie_embeddings_and_output_weights=True)
    )


@pytest.mark.parametrize(("ranks", "chunks", "batches"), [(1, 1, 3), (4, 1, 8), (4, 1, 2), (2, 3, 2), (4, 4, 16)])
def test_equal_stages_idle_by_the_formula(ranks: int, chunks: int, batches: int) -> None:
    layout = Layout(pipeline_parallel=ranks, virtual_stages=chunks, micro_batches=batches)

    assert idle_share([2.0] * ranks * chunks, layout) == pytest.approx((ranks - 1) / (chunks * batches + ranks - 1))


def test_ranks_idle_for_the_slowest_stage() -> None:
    # Rank 1 waits for 1, works for 2 x (2 + 4), then rank 0's last backward pass takes 2: 15 in all.
    assert idle_share([1, 2], Layout(pipeline_parallel=2, micro_batches=2)) == pytest.approx(1 - 18 / 30)
    # Of many micro-batches, the ramps vanish: the mean by the largest, of stages or of ranks with all their stages.
    assert idle_share([1, 2], Layout(pipeline_parallel=2, micro_batches=1000)) == pytest.approx(1 / 4, abs=0.001)
    level = Layout(pipeline_parallel=2, virtual_stages=2, micro_batches=1000)
    assert idle_share([1, 2, 2, 1], level) == pytest.approx(0, abs=0.002)


def test_an_unknown_schedule_has_no_idle_share() -> None:
    assert idle_share([1, 1], Layout(pipeline_parallel=2)) is None
    assert idle_share([1] * 4, Layout(pipeline_parallel=2, virtual_stages=2, micro_batches=3)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pipeline_parallel": 4}, r"3 blocks cannot fill 4 pipeline stages \(PP 4 x 1 virtual\)"),
        ({"pipeline_parallel": 2, "virtual_stages": 2}, r"cannot fill 4 pipeline stages \(PP 2 x 2 virtual\)"),
        ({"pipeline_parallel": 0}, "expected at least one pipeline stage"),
        ({"pipeline_parallel": 1, "cost": BlockCosts((1.0,))}, "cost has 1 blocks, but the pattern has 3"),
    ],
)
def test_models_that_cannot_be_balanced(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(model(3), **arguments)  # type: ignore[arg-type]


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        BlockCosts((1.0, -1.0))
