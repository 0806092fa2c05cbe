"""Step times: calculated by hand, and whether they rise or fall with the settings."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from nemo_ext.architecture import cost
from nemo_ext.architecture.candidates import expert_sizes, parallel_sizes, powers
from nemo_ext.architecture.gpus import GPUS
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.roofline import BANDWIDTH, COMPUTE, LATENCY, LINKS, Roofline, StepTime

LENGTH, BATCH = 4096, 16
GPU = GPUS["H100-80GB"]


def model(pattern: str, **flags: Any) -> Architecture:
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "group_query_attention": True, "num_query_groups": 8}
    moe = {"num_experts": 16, "moe_router_topk": 2, "moe_ffn_hidden_size": 1024, "ffn_hidden_size": 14336}
    own = {"swiglu": True, "disable_bias_linear": True, "normalization": "RMSNorm", "seq_length": LENGTH}
    rest = {"padded_vocab_size": 32768, "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"}
    return Architecture.from_config(
        {"model": {"pattern": pattern}, "megatron": {**sizes, **moe, **own, **rest, **flags}}
    )


DENSE = model("(*-)x8")
EXPERTS = model("(*E)x8")


def step(architecture: Architecture = DENSE, *, per_node: int = 8, cuts: str | None = None, **sizes: Any) -> StepTime:
    overlaps = {key: sizes.pop(key) for key in ("overlap_reduce", "overlap_gather") if key in sizes}
    layout = Layout(**{"distributed_optimizer": True, **sizes})
    pattern = architecture.pattern if cuts is None else parse(cuts)
    return Roofline(architecture, GPU, gpus_per_node=per_node).step(layout, pattern, batch=BATCH, **overlaps)


def test_products_take_flops_at_the_reached_share_of_the_peak() -> None:
    whole = cost.forward_flops_per_token(DENSE) * LENGTH * BATCH
    scores = 8 * 4 * 4096 * cost.attended_tokens(LENGTH) * LENGTH * BATCH  # of the attention blocks
    reached = COMPUTE * GPU.flops

    assert step().compute == pytest.approx((3 * whole + scores / 2) / reached)
    assert step(recompute="full").compute == pytest.approx((4 * whole + scores / 2) / reached)
    assert step(recompute="selective", recompute_modules=("core_attn",)).compute == pytest.approx(
        (3 * whole + 1.5 * scores) / reached
    )
    assert step(data_parallel=4, tensor_parallel=4).compute == pytest.approx(step().compute / 16)


def test_frozen_weights_have_fewer_passes_and_no_gradients() -> None:
    main, both = model("(*-)x8"), model("(*-)x8/*-", mtp_num_layers=1)
    whole, mtp = (cost.forward_flops_per_token(main), cost.mtp_forward_flops_per_token(both))
    scores = 4 * 4096 * cost.attended_tokens(LENGTH)  # of an attention block
    unit = LENGTH * BATCH / (COMPUTE * GPU.flops)

    frozen = step(frozen=True)
    assert frozen.compute == pytest.approx(whole * unit)
    assert frozen.memory == pytest.approx(step().memory / 2)
    assert step(data_parallel=8, frozen=True).data == frozen.optimizer == 0

    healing = step(both, mtp_only=True)
    assert healing.compute == pytest.approx((whole + 3 * mtp) * unit)
    assert healing.optimizer == pytest.approx(
        step(both).optimizer
        * cost.mtp_parameters(both).total
        / (cost.total_params(main) + cost.mtp_parameters(both).total)
    )
    # Gradients pass through the frozen blocks of a later stage.
    last = 2 * (whole / 2 + cost.head_forward_flops_per_token(both) / 2) + 2 * scores
    staged = step(both, cuts="(*-)x4|(*-)x4/*-", pipeline_parallel=2, mtp_only=True)
    assert staged.compute == pytest.approx((last + 3 * mtp) * unit)


def test_products_of_few_tokens_wait_for_weights() -> None:
    short = model("(*-)x8", seq_length=16)
    time = Roofline(short, GPU, gpus_per_node=8).step(Layout(), short.pattern, batch=1)
    moved = (2 * 2 + 2 * 4) * cost.total_params(short)

    assert time.compute == pytest.approx(moved / (BANDWIDTH * GPU.bandwidth))


def test_tensor_parallelism_by_hand_and_beyond_a_node() -> None:
    wide, pairs = LENGTH * 4096 * 2, 16 + 0.5
    expected = BATCH * 4 * pairs * (wide * 3 / 4 / (LINKS * GPU.nvlink) + LATENCY)

    assert step(tensor_parallel=4).tensor == pytest.approx(expected)
    assert step(tensor_parallel=4, per_node=2).tensor > 3 * expected
    assert step(tensor_parallel=1).tensor == 0


def test_a_pipeline_waits_for_its_slowest_rank() -> None:
    halves = step(cuts="(*-)x4|(*-)x4", pipeline_parallel=2)
    busy = halves.total - halves.bubble - halves.data - halves.optimizer

    assert halves.bubble == pytest.approx(busy / BATCH)
    interleaved = step(cuts="(*-)x2|(*-)x2|(*-)x2|(*-)x2", pipeline_parallel=2, virtual_stages=2)
    assert interleaved.bubble == pytest.approx(halves.bubble / 2, rel=0.05)
    assert interleaved.pipeline == pytest.approx(2 * halves.pipeline)
    assert step(cuts="(*-)x2|(*-)x6", pipeline_parallel=2).compute > halves.compute


def test_overlapped_gradients_take_less_time() -> None:
    bare = step(data_parallel=16, per_node=1)
    parameters = cost.total_params(DENSE)

    assert bare.data == pytest.approx(6 * parameters * 15 / 16 / (LINKS * GPU.network))
    less = [
        step(data_parallel=16, per_node=1, overlap_reduce=reduce, overlap_gather=gather).data
        for reduce, gather in ((False, False), (True, False), (True, True))
    ]
    assert all(later < earlier for earlier, later in pairwise(less))
    assert step(data_parallel=16, per_node=8).data < bare.data / 7  # eight adapters
    assert step(data_parallel=16, distributed_optimizer=False).optimizer == pytest.approx(
        16 * step(data_parallel=16).optimizer
    )


def test_experts_on_other_nodes_cost_more() -> None:
    near, far = (step(EXPERTS, data_parallel=16, expert_parallel=size) for size in (8, 16))

    assert 0 == step(EXPERTS, data_parallel=16).expert < near.expert < far.expert / 3
    assert far.data < near.data


def test_a_ring_overlaps_with_attention() -> None:
    hidden = step(context_parallel=2, data_parallel=8)
    slow = Roofline(DENSE, replace(GPU, nvlink=1e9), gpus_per_node=8)
    shown = slow.step(Layout(context_parallel=2, data_parallel=8), DENSE.pattern, batch=BATCH)

    assert hidden.context == 0 < shown.context


def test_sizes_to_try() -> None:
    assert powers(6) == [1, 2, 4]
    assert parallel_sizes([1, 2], [1, 2], [1])[:3] == [(1, 1, 1), (2, 1, 1), (1, 2, 1)]
    assert expert_sizes(EXPERTS.sizes, 24, 64) == [1, 2, 4, 8]
    assert expert_sizes(DENSE.sizes, 24, 64) == [1]
