"""Step times: calculated by hand, and whether they rise or fall with the settings."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.architecture import cost
from nemo_ext.architecture.candidates import expert_sizes, parallel_sizes, powers
from nemo_ext.architecture.gpus import GPUS, Attention, Gpu, Link, read_gpu
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.pipeline import balance
from nemo_ext.architecture.step_time import StepTime, TimeModel

LENGTH, BATCH = 4096, 16
PRODUCTS, FORWARD, BACKWARD = 6e14, 5e14, 4e14
NODE = Link(gather=3e11, all_to_all=2e11, latency=1e-5)
BETWEEN = Link(gather=4e10, all_to_all=3e10, latency=2e-5)
GPU = replace(
    GPUS["H100-80GB"],
    matmul={"bf16": {1: PRODUCTS}, "fp8": {1: 2 * PRODUCTS}},
    grouped={"bf16": {1: PRODUCTS / 2}},
    attention=Attention(forward=FORWARD, backward=BACKWARD),
    scan=3e13,
    memory=3e12,
    node=NODE,
    between=BETWEEN,
    sustained=1.0,
)


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


OVERLAPS = ("overlap_reduce", "overlap_gather", "overlap_tensor")


def step(
    architecture: Architecture = DENSE, *, gpu: Gpu = GPU, per_node: int = 8, cuts: str | None = None, **sizes: Any
) -> StepTime:
    overlaps = {key: sizes.pop(key) for key in OVERLAPS if key in sizes}
    given = {key: sizes.pop(key) for key in ("low", "flex") if key in sizes}
    layout = Layout(**{"distributed_optimizer": True, **sizes})
    pattern = architecture.pattern if cuts is None else parse(cuts)
    return TimeModel(architecture, gpu, gpus_per_node=per_node, **given).step(layout, pattern, batch=BATCH, **overlaps)


def scores(tokens: float) -> float:
    """Forward FLOPs of attention scores of the eight attention blocks."""
    return 8 * 4 * 4096 * cost.attended_tokens(LENGTH) * tokens


def test_products_and_attention_take_their_flops_at_the_gpu_s_rates() -> None:
    core = scores(LENGTH * BATCH)
    products = cost.forward_flops_per_token(DENSE) * LENGTH * BATCH - core
    backward = 2.5 * core / BACKWARD

    assert step().compute == pytest.approx(3 * products / PRODUCTS + core / FORWARD + backward)
    head = cost.head_forward_flops_per_token(DENSE) * LENGTH * BATCH
    assert step(recompute="full").compute == pytest.approx(
        (4 * products) / PRODUCTS + 2 * core / FORWARD + backward, rel=head / (4 * products)
    )
    assert step(recompute="selective", recompute_modules=("core_attn",)).compute == pytest.approx(
        3 * products / PRODUCTS + 2 * core / FORWARD + backward
    )
    assert step(data_parallel=4, tensor_parallel=4).compute == pytest.approx(step().compute / 16)


def test_a_product_has_the_rate_of_its_smallest_size() -> None:
    rates = {"bf16": {1024: 1e14, 4096: 3e14}}
    gpu = replace(GPU, matmul=rates, grouped=rates, sustained=0.5)

    assert gpu.product(True, "bf16", 8192, 4096, 5000) == 3e14, "experts' rates are not reduced"
    assert gpu.product(False, "bf16", 8192, 4096, 5000) == 1.5e14
    assert gpu.product(True, "bf16", 2048, 4096) == pytest.approx(2e14), "halfway over the logarithm"
    assert gpu.product(True, "bf16", 512, 4096) == pytest.approx(0.5e14), "proportional below the table"
    assert step(gpu=gpu, tensor_parallel=4).compute > step(gpu=gpu).compute / 4 * 1.2, "shards are smaller"
    with pytest.raises(ValueError, match="no matmul rates in fp8; use precision=bf16"):
        gpu.product(False, "fp8", 4096)


def test_blocks_in_fp8_have_its_rate() -> None:
    core = scores(LENGTH * BATCH)
    attention = core / FORWARD + 2.5 * core / BACKWARD
    blocks = {number: 1.0 for number in range(16)}
    head = 3 * cost.head_forward_flops_per_token(DENSE) * LENGTH * BATCH / PRODUCTS

    in_fp8 = step(low=blocks).compute - attention - head
    assert in_fp8 == pytest.approx((step().compute - attention - head) / 2)


def test_frozen_weights_have_fewer_passes_and_no_gradients() -> None:
    main, both = model("(*-)x8"), model("(*-)x8/*-", mtp_num_layers=1)
    core = scores(1)
    whole, mtp = (cost.forward_flops_per_token(main) - core, cost.mtp_forward_flops_per_token(both))
    unit = LENGTH * BATCH / PRODUCTS
    attention = LENGTH * BATCH * core / FORWARD

    frozen = step(frozen=True)
    assert frozen.compute == pytest.approx(whole * unit + attention)
    assert frozen.memory == pytest.approx(step().memory / 2)
    assert step(data_parallel=8, frozen=True).data == frozen.optimizer == 0

    healing = step(both, mtp_only=True)
    assert healing.compute == pytest.approx((whole + 3 * mtp) * unit + attention)
    assert healing.optimizer == pytest.approx(
        step(both).optimizer
        * cost.mtp_parameters(both).total
        / (cost.total_params(main) + cost.mtp_parameters(both).total)
    )
    # Gradients pass through the frozen blocks of a later stage.
    last = 2 * (whole + cost.head_forward_flops_per_token(both)) / 2 * unit
    later = (attention + 2.5 * attention * FORWARD / BACKWARD) / 2
    staged = step(both, cuts="(*-)x4|(*-)x4/*-", pipeline_parallel=2, mtp_only=True)
    assert staged.compute == pytest.approx(last + later + 3 * mtp * unit)


def test_products_of_few_tokens_wait_for_weights() -> None:
    short = model("(*-)x8", seq_length=16)
    time = TimeModel(short, GPU, gpus_per_node=8).step(Layout(), short.pattern, batch=1)
    moved = (2 * 2 + 2 * 4) * cost.total_params(short)

    assert time.compute == pytest.approx(moved / GPU.memory, rel=1e-3)


def test_the_scan_has_its_own_rate() -> None:
    hybrid = model("M*x2", mamba_num_heads=64, mamba_head_dim=64, mamba_state_dim=128, mamba_num_groups=8)
    slow = step(hybrid, gpu=replace(GPU, scan=GPU.scan / 2)).compute - step(hybrid).compute
    inner, projected = 4096, 2 * 4096 + 2 * 8 * 128 + 64
    of_block = cost.block_forward_flops_per_token(hybrid, 1, seq_length=LENGTH)
    scan = of_block - 2 * 4096 * (projected + inner)

    assert slow == pytest.approx(3 * scan * LENGTH * BATCH / GPU.scan)


def test_tensor_parallelism_by_hand_and_beyond_a_node() -> None:
    wide, pairs = LENGTH * 4096 * 2, 16 + 0.5
    expected = BATCH * 4 * pairs * (wide * 3 / 4 / NODE.gather + NODE.latency)

    assert step(tensor_parallel=4).tensor == pytest.approx(expected)
    assert step(tensor_parallel=4, per_node=2).tensor > 3 * expected
    assert step(tensor_parallel=1).tensor == 0
    hidden = step(tensor_parallel=4, overlap_tensor=True).tensor
    assert hidden == pytest.approx(expected / 4), "all but the first of four chunks"


@pytest.mark.parametrize(
    ("architecture", "modules", "pairs"),
    [(DENSE, "mlp", 8), (model("(*E)x8", moe_shared_expert_intermediate_size=1024), "moe", 8)],
)
def test_recomputed_mlps_repeat_their_messages(architecture: Architecture, modules: str, pairs: int) -> None:
    sizes: dict[str, Any] = {"tensor_parallel": 4, "sequence_parallel": True}
    again = step(architecture, recompute="selective", recompute_modules=(modules,), **sizes).tensor
    message = LENGTH * 4096 * 2 * 3 / 4 / NODE.gather + NODE.latency

    assert again - step(architecture, **sizes).tensor == pytest.approx(BATCH * 2 * pairs * message)
    core = step(architecture, recompute="selective", recompute_modules=("core_attn",), **sizes)
    assert core.tensor == step(architecture, **sizes).tensor
    assert step(architecture, recompute="full", **sizes).tensor == pytest.approx(
        1.5 * step(architecture, **sizes).tensor
    )


def test_full_recomputation_moves_the_bytes_of_a_forward_pass_again() -> None:
    loss = 2 * (2 + 4) * LENGTH * BATCH * 32768 / GPU.memory
    whole, again = (step(recompute=how).memory - loss for how in ("none", "full"))

    assert again == pytest.approx(1.5 * whole)


def test_a_part_of_a_mesh_reaches_a_part_of_its_rate() -> None:
    mesh = replace(GPU, node=replace(NODE, mesh=True))

    assert step(gpu=mesh, per_node=4, tensor_parallel=4).tensor == step(per_node=4, tensor_parallel=4).tensor
    whole, pair = (step(gpu=gpu, per_node=4, tensor_parallel=2).tensor for gpu in (GPU, mesh))
    assert 2.5 * whole < pair < 3 * whole, "latency is the same"


def test_a_pipeline_waits_for_its_slowest_rank() -> None:
    halves = step(cuts="(*-)x4|(*-)x4", pipeline_parallel=2)
    busy = halves.total - halves.bubble - halves.data - halves.optimizer

    first, last = (cost.forward_flops_per_token(DENSE) - 2 * 4096 * 32768) / 2, 2 * 4096 * 32768
    assert halves.bubble == pytest.approx(busy / BATCH * first / (first + last)), "the last rank waits for the first"
    interleaved = step(cuts="(*-)x2|(*-)x2|(*-)x2|(*-)x2", pipeline_parallel=2, virtual_stages=2)
    assert 0.4 * halves.bubble < interleaved.bubble < 0.9 * halves.bubble
    unequal = step(cuts="(*-)x3|(*-)x1|(*-)x1|(*-)x3", pipeline_parallel=2, virtual_stages=2)
    assert unequal.bubble > interleaved.bubble
    assert interleaved.pipeline == pytest.approx(2 * halves.pipeline)
    assert step(cuts="(*-)x2|(*-)x6", pipeline_parallel=2).compute > halves.compute


@pytest.mark.parametrize("count", [64, 512])
def test_the_bubble_is_not_negative_before_the_schedule_settles(count: int) -> None:
    sizes = {"num_attention_heads": 64, "num_query_groups": 4, "kv_channels": 128, "moe_ffn_hidden_size": 1536}
    qwen = model("(*E)x94", num_experts=128, moe_router_topk=8, padded_vocab_size=151936, **sizes)
    pattern = balance(qwen, pipeline_parallel=8, virtual_stages=4)
    times = TimeModel(qwen, GPU, gpus_per_node=8)

    assert times.step(Layout(pipeline_parallel=8, virtual_stages=4), pattern, batch=count).bubble > 0


def test_overlapped_gradients_take_less_time() -> None:
    bare = step(data_parallel=16, per_node=1)
    parameters = cost.total_params(DENSE)

    assert bare.data == pytest.approx(6 * parameters * 15 / 16 / BETWEEN.gather)
    less = [
        step(data_parallel=16, per_node=1, overlap_reduce=reduce, overlap_gather=gather).data
        for reduce, gather in ((False, False), (True, False), (True, True))
    ]
    assert all(later < earlier for earlier, later in pairwise(less))
    assert step(data_parallel=16, per_node=8).data < bare.data / 7  # eight adapters
    assert step(data_parallel=16, per_node=1, fp32_gradients=False).data == pytest.approx(bare.data * 4 / 6)
    assert step(data_parallel=16, distributed_optimizer=False).optimizer == pytest.approx(
        16 * step(data_parallel=16).optimizer
    )


def test_experts_on_other_nodes_cost_more() -> None:
    near, far = (step(EXPERTS, data_parallel=16, expert_parallel=size) for size in (8, 16))

    assert 0 == step(EXPERTS, data_parallel=16).expert < near.expert < far.expert / 3
    assert far.data < near.data


def test_the_flex_dispatcher_sends_a_token_once_to_each_node() -> None:
    many = model("(*E)x8", num_experts=64, moe_router_topk=8)
    plain, flex = (step(many, data_parallel=16, expert_parallel=16, flex=flex).expert for flex in (False, True))
    copies, once = 8 * 8 / 16, 1 - (1 / 2) ** 8
    start = 8 * BATCH / 16 * 4 * BETWEEN.latency

    assert (flex - start) / (plain - start) == pytest.approx(once / copies)
    near = [step(many, data_parallel=8, expert_parallel=8, flex=flex).expert for flex in (False, True)]
    assert near[1] < near[0]


def test_recomputed_experts_are_sent_again() -> None:
    sizes: dict[str, Any] = {"data_parallel": 8, "expert_parallel": 8}
    again = step(EXPERTS, recompute="selective", recompute_modules=("moe",), **sizes)

    assert again.expert == pytest.approx(1.5 * step(EXPERTS, **sizes).expert)
    assert again.compute > step(EXPERTS, **sizes).compute


def test_a_ring_overlaps_with_attention() -> None:
    hidden = step(context_parallel=2, data_parallel=8)
    slow = TimeModel(DENSE, replace(GPU, node=replace(NODE, gather=1e9)), gpus_per_node=8)
    shown = slow.step(Layout(context_parallel=2, data_parallel=8), DENSE.pattern, batch=BATCH)

    assert hidden.context == 0 < shown.context


def test_steps_without_a_prediction() -> None:
    with pytest.raises(ValueError, match="global_batch_size=16 is not divisible by micro-batch x DP = 3 x 4; change"):
        step(micro_batch_size=3, data_parallel=4)
    with pytest.raises(ValueError, match=r"step time in FP32 cannot be predicted, .*; set megatron\.bf16=true"):
        step(precision="fp32")


def test_sizes_to_try() -> None:
    assert powers(6) == [1, 2, 4]
    assert parallel_sizes([1, 2], [1, 2], [1])[:3] == [(1, 1, 1), (2, 1, 1), (1, 2, 1)]
    assert expert_sizes(EXPERTS.sizes, 24, 64) == [1, 2, 4, 8]
    assert expert_sizes(DENSE.sizes, 24, 64) == [1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("scan: 3.18e+13", "scan: 0"), "mine.yaml.scan=0"),
        (("scan: 3.18e+13", "scans: 1"), "mine.yaml: unknown key 'scans'"),
        (("latency: 1.0e-5", "latency: -1"), "latency"),
        (("memory_gib: 80", "- memory"), "mine.yaml is not valid YAML"),
        (("4096: 6.6e+14", "4096: 6.6e+17"), "mine.yaml.*matmul.bf16 has 6.6e.17 FLOP/s, more than 1.2 times"),
        (("memory: 2.88e+12", "memory: 2.88e+14"), "mine.yaml.*memory=2.88e.14 exceeds bandwidth"),
        (("between: {gather: 4.25e+10", "between: {gather: 42.5"), r"mine.yaml.*between.gather=42.5: expected more"),
        (("scan: 3.18e+13", "scan: true"), "mine.yaml.scan.*expected a number, got true"),
        (("estimates: [sustained", "estimates: [sustainedd"), "mine.yaml.*'sustainedd', which is not a rate: did you"),
    ],
)
def test_invalid_files_of_rates(change: tuple[str, str], why: str) -> None:
    text = Path("hydra_conf/rates/H100-80GB.yaml").read_text()
    assert change[0] in text
    with pytest.raises(ValueError, match=why):
        read_gpu(text.replace(*change), "mine.yaml")


def test_every_estimate_is_a_rate() -> None:
    for name, gpu in GPUS.items():
        for estimate in gpu.estimates:
            part, _, rate = estimate.partition(".")
            assert getattr(getattr(gpu, part), rate) if rate else getattr(gpu, part), f"{name}: {estimate}"
        assert max(gpu.matmul["bf16"].values()) < 1.2 * gpu.flops and gpu.memory < gpu.bandwidth
