"""Costs of blocks, compared with the cost model of whole models."""

import pytest

from nemo_ext.architecture import cost
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.config import compose
from nemo_ext.puzzle.cost import RESOURCES, Serving, block_costs, expected_experts, outside_costs
from nemo_ext.puzzle.settings import settings
from nemo_ext.puzzle.variants import variants

FAMILIES = ["nemotron3_nano_30b", "domyn_small_10b", "llama_nemotron_super_49b", "olmo1_1b", "olmo3_7b"]


def architecture(model: str) -> Architecture:
    return Architecture.from_config(compose("describe", [f"model={model}"]))


@pytest.mark.parametrize("model", FAMILIES)
def test_blocks_and_the_part_outside_add_up_to_the_model(model: str) -> None:
    whole = architecture(model)
    serving = Serving(batch=3, context=4096, prompt=512)

    costs = [outside_costs(whole, serving), *(block_costs(whole, block, serving) for block in whole.sizes)]
    total = {resource: sum(each[resource] for each in costs) for resource in RESOURCES}

    assert total["parameters"] == cost.total_params(whole)
    assert total["active_parameters"] == cost.active_params(whole)
    assert total["weight_bytes"] == cost.weight_bytes(whole)
    per_sequence = cost.kv_cache_bytes(whole, 4096) + cost.state_bytes_per_sequence(whole)
    assert total["cache_bytes"] == 3 * per_sequence
    assert total["memory_bytes"] == total["weight_bytes"] + total["cache_bytes"]
    assert total["attention_blocks"] == sum(block.kind == "*" for block in whole.sizes)
    assert 0 < total["decode_seconds"] < total["prefill_seconds"]


def test_the_limits_for_super_are_the_published_child_s() -> None:
    chosen = settings(compose("puzzle", ["recipe=puzzle/nemotron3_super", "run_dir=unused", "data=mock"])["puzzle"])
    child = architecture("nemotron3_puzzle_75b")

    costs = [outside_costs(child, chosen.serving), *(block_costs(child, b, chosen.serving) for b in child.sizes)]
    for resource, limit in chosen.search.limits.items():
        total = sum(each[resource] for each in costs)
        assert total <= limit == pytest.approx(total, rel=1e-4)
    # Every block of the published child is a variant of its parent's.
    found = variants(architecture("nemotron3_super_120b"), chosen.variants)
    assert all(block in [v.block for v in each] for block, each in zip(child.sizes, found, strict=True))


def test_a_no_op_costs_nothing_and_a_linear_map_no_cache() -> None:
    whole = architecture("llama_nemotron_super_49b")
    linear = block_costs(whole, Block.from_values("*", linear=True), Serving())

    assert set(block_costs(whole, None, Serving()).values()) == {0.0}
    assert linear["parameters"] == whole.hidden_size**2 + whole.hidden_size
    assert linear["cache_bytes"] == linear["attention_blocks"] == 0


def test_squared_relu_experts_have_two_matrices() -> None:
    whole = architecture("nemotron3_nano_30b")
    block = next(block for block in whole.sizes if block.kind == "E")
    hidden, experts, ffn, shared = whole.hidden_size, 128, 1856, 3712

    counted = block_costs(whole, block, Serving())

    assert counted["parameters"] == 2 * hidden * (experts * ffn + shared) + experts * hidden + hidden
    assert counted["active_parameters"] == 2 * hidden * (6 * ffn + shared) + experts * hidden + hidden


def test_more_tokens_read_more_experts() -> None:
    block = Block.from_values("E", experts=128, topk=6, ffn=64, shared=64)

    assert expected_experts(block, 1) == pytest.approx(6)
    assert expected_experts(block, 2) == pytest.approx(12 - 36 / 128)
    assert expected_experts(block, 100_000) == pytest.approx(128)
    whole = architecture("nemotron3_nano_30b")
    routed = next(block for block in whole.sizes if block.kind == "E")
    one, many = (block_costs(whole, routed, Serving(batch=batch))["decode_seconds"] for batch in (1, 64))
    assert 5 < many / one < 64


def test_a_new_token_attends_to_all_of_the_context() -> None:
    whole = architecture("domyn_small_10b")
    block = next(block for block in whole.sizes if block.kind == "*")
    query, key = (block.size(name) * block.size("head_dim") for name in ("heads", "kv"))
    serving = Serving(batch=2, prompt=512, context=4096, flops=1e15, bandwidth=1e30)

    seconds = block_costs(whole, block, serving)["decode_seconds"]

    products = 2 * whole.hidden_size * (2 * query + 2 * key) + 4 * query * 4096
    assert seconds == pytest.approx(2 * products / 1e15, rel=1e-3)


def test_narrower_blocks_cost_less_in_every_resource() -> None:
    whole = architecture("domyn_small_10b")
    wide, narrow = (block_costs(whole, Block.from_values("-", ffn=width), Serving()) for width in (16384, 8192))

    for resource in ("parameters", "weight_bytes", "prefill_seconds", "decode_seconds"):
        assert narrow[resource] == pytest.approx(wide[resource] / 2, rel=0.01)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"flops": -1.0}, {"prompt": 4096, "context": 1024}])
def test_an_invalid_serving_scenario_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(wrong)):
        Serving(**wrong)
