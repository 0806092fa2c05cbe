"""Uniform width pruning, blocks dropped by score and from the end, random choices."""

from collections.abc import Sequence

import pytest

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.config import compose
from nemo_ext.puzzle.choice.baselines import at_random, greedy, uniform
from nemo_ext.puzzle.cost import Serving, block_costs
from nemo_ext.puzzle.variants import variants


@pytest.fixture
def architecture() -> Architecture:
    return Architecture.from_config(compose("train", ["model=nemotron3_nano_tiny", "run_dir=unused"]))


def cost_of(architecture: Architecture):
    def cost(blocks: Sequence[Block | None]) -> float:
        return sum(block_costs(architecture, block, Serving())["parameters"] for block in blocks)

    return cost


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_uniform_pruning_uses_the_limit_up(architecture: Architecture, share: float) -> None:
    cost = cost_of(architecture)
    most = share * cost(architecture.sizes)

    made = uniform(architecture.sizes, cost, most)

    blocks = [variant.block for variant in made]
    assert 0.97 * most < cost(blocks) <= most
    for old, new, variant in zip(architecture.sizes, blocks, made, strict=True):
        assert new is not None
        name = {"M": "heads", "*": "kv"}.get(old.kind, "ffn")
        if old.kind == "*":
            assert old.size("kv") % new.size("kv") == 0
        if old.kind in "E-":
            assert new.size(name) < old.size(name)
        assert variant.name == ("keep" if new == old else f"uniform_{name}{new.size(name)}")
        assert {**dict(new.values), name: 0} == {**dict(old.values), name: 0}
        if old.kind == "M":
            assert new.size("heads") % new.size("groups") == 0
    widths = {
        new.size("ffn") / old.size("ffn")
        for old, new in zip(architecture.sizes, blocks, strict=True)
        if old.kind == "E"
    }
    assert len(widths) == 1


def test_uniform_pruning_below_its_minimum_is_refused(architecture: Architecture) -> None:
    with pytest.raises(ValueError, match="uniform width pruning cannot reach 1,000"):
        uniform(architecture.sizes, cost_of(architecture), 1000)


def test_greedy_dropping_takes_the_lowest_scores_first(architecture: Architecture) -> None:
    cost, by_block = cost_of(architecture), variants(architecture)
    scores = {number: float((number * 5) % len(by_block)) for number in range(len(by_block))}
    most = 0.6 * cost(architecture.sizes)

    made = greedy(by_block, lambda variant: scores[variant.number], cost, most)

    dropped = {variant.number for variant in made if variant.block is None}
    kept = set(scores) - dropped
    assert max(scores[number] for number in dropped) < min(scores[number] for number in kept)
    assert cost([variant.block for variant in made]) <= most
    last = max(dropped, key=lambda number: scores[number])  # one fewer would not have been enough
    assert cost([by_block[v.number][0].block if v.number == last else v.block for v in made]) > most


def test_greedy_dropping_keeps_at_least_one_block(architecture: Architecture) -> None:
    with pytest.raises(ValueError, match="no block would remain"):
        greedy(variants(architecture), lambda variant: 0.0, cost_of(architecture), 1)


def test_greedy_dropping_keeps_blocks_that_save_nothing(architecture: Architecture) -> None:
    def attention(blocks: Sequence[Block | None]) -> float:
        return sum(block is not None and block.kind == "*" for block in blocks)

    found = variants(architecture)
    made = greedy(found, lambda variant: float(variant.number), attention, attention(architecture.sizes) - 1)
    assert [found[v.number][0].block.kind for v in made if v.block is None] == ["*"]
    kept = [[variant for variant in each if variant.name != "no_op"] for each in found]
    with pytest.raises(ValueError, match="dropping blocks cannot reach 0"):
        greedy(kept, lambda variant: 0.0, attention, 0)


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_random_choices_come_close_to_the_limit_and_differ(architecture: Architecture, share: float) -> None:
    cost, found = cost_of(architecture), variants(architecture)
    most = share * cost(architecture.sizes)

    made = [at_random(found, cost, most, seed) for seed in (1, 2, 1)]

    for choice in made:
        assert 0.9 * most < cost([variant.block for variant in choice]) <= most
        assert all(variant in each for variant, each in zip(choice, found, strict=True))
    assert made[0] == made[2] != made[1]
    with pytest.raises(ValueError, match="random choice cannot reach -1"):
        at_random(found, cost, -1, 1)


def test_depth_pruning_drops_the_last_blocks(architecture: Architecture) -> None:
    cost, found = cost_of(architecture), variants(architecture)
    most = 0.6 * cost(architecture.sizes)

    made = greedy(found, lambda variant: -variant.number, cost, most)

    left = [variant.block is not None for variant in made]
    kept = left.index(False)
    assert left == [True] * kept + [False] * (len(left) - kept)
    assert cost(architecture.sizes[:kept]) <= most < cost(architecture.sizes[: kept + 1])
