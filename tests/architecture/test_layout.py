"""Distribution of a model over GPUs: nothing is lost or counted twice."""

from collections.abc import Callable
from typing import Any

import pytest

from nemo_ext.architecture import cost
from nemo_ext.architecture.layout import Layout, NotEstimated, check_layout, stage_ranges
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import parse

ArchitectureOf = Callable[..., Architecture]
ConfigOf = Callable[[str], dict[str, dict[str, Any]]]

LAYOUTS = [
    Layout(),
    Layout(tensor_parallel=2),
    Layout(data_parallel=4, expert_parallel=4),
    Layout(tensor_parallel=2, data_parallel=2, expert_parallel=2, expert_tensor_parallel=1),
    Layout(tensor_parallel=4, context_parallel=2, expert_parallel=2, expert_tensor_parallel=2),
    Layout(tensor_parallel=2, pipeline_parallel=2, data_parallel=2, expert_parallel=4, expert_tensor_parallel=1),
    Layout(tensor_parallel=2, pipeline_parallel=2, virtual_stages=2, expert_parallel=2, expert_tensor_parallel=1),
]
CUTS = {1: "ME*-M*{kv=2}E{experts=4}-{ffn=48}", 2: "ME*|-M*{kv=2}E{experts=4}-{ffn=48}"}
CUTS[4] = "ME|*-|M*{kv=2}|E{experts=4}-{ffn=48}"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shards_add_up_to_the_model(layout: Layout, tied: bool, bias: bool, architecture_of: ArchitectureOf) -> None:
    model = architecture_of(
        "tiny_hybrid",
        model={"pattern": CUTS[layout.pipeline_parallel * layout.virtual_stages]},
        num_query_groups=4,
        untie_embeddings_and_output_weights=not tied,
        disable_bias_linear=not bias,
    )
    counted = cost.parameters(model)
    tensor, experts = layout.tensor_parallel, layout.expert_parallel * layout.expert_tensor
    # One replica of the dense part is TP GPUs a stage, one of the experts EP x ETP GPUs: what is replicated
    # within those is held that often, and a tied output layer away from the embedding is a second copy.
    copies = (tensor - 1) * counted.replicated
    expert_copies = (layout.expert_tensor - 1) * counted.experts_replicated
    second = model.vocab_size * model.hidden_size if tied and layout.pipeline_parallel > 1 else 0

    gpus = cost.per_gpu(model, layout)
    stages = cost.per_stage(model, layout)
    expert_held = sum(
        stage.parameters.experts // experts + stage.parameters.experts_replicated // layout.expert_parallel
        for stage in stages
    )
    dense_held = sum(gpu.parameters for gpu in gpus) - expert_held

    assert len(gpus) == layout.pipeline_parallel
    assert tensor * dense_held == counted.dense + copies + second
    assert experts * expert_held == counted.expert + expert_copies
    assert sum(stage.parameters.total for stage in stages) == counted.total + second


def test_stages_hold_the_ends_and_all_flops(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": "M|E*|-|-"})
    layout = Layout(pipeline_parallel=2, virtual_stages=2)
    stages = cost.per_stage(model, layout)
    assert [(stage.rank, list(stage.layers)) for stage in stages] == [(0, [1]), (1, [2, 3]), (0, [4]), (1, [5])]
    first = cost.block_parameters(model, 1) + cost.embedding_parameters(model)
    last = cost.block_parameters(model, 5) + cost.head_parameters(model)
    assert (stages[0].parameters, stages[3].parameters) == (first, last)
    flops = sum(stage.forward_flops_per_token for stage in stages)
    assert flops == pytest.approx(cost.forward_flops_per_token(model))


def test_bytes_of_one_gpu(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": "E"})
    layout = Layout(tensor_parallel=2, data_parallel=4, expert_parallel=4, expert_tensor_parallel=1)
    # Dense: half of embedding, output layer and shared expert; norms and router whole. Experts: 2 of 8.
    dense = (2 * 256 * 32 + 2 * 32 * 40) // 2 + 2 * 32 + 8 * 32
    experts = 2 * 2 * 32 * 24
    whole = cost.per_gpu(model, layout)[0]
    assert whole.parameters == dense + experts
    assert (whole.weight_bytes, whole.gradient_bytes) == (2 * (dense + experts), 4 * (dense + experts))
    assert whole.optimizer_bytes == 12 * (dense + experts)
    # The optimizer's shards: 4 data parallel ranks for dense, 8 GPUs / 4 for experts.
    shared = cost.per_gpu(model, Layout(**{**vars(layout), "distributed_optimizer": True}))[0]
    assert shared.optimizer_bytes == 12 * dense // 4 + 12 * experts // 2
    assert shared.total_bytes == sum(
        (shared.weight_bytes, shared.gradient_bytes, shared.optimizer_bytes, shared.activation_bytes)
    )


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({}, 4),
        ({"bf16": True}, 4),
        ({"bf16": True, "main_grads_dtype": "bf16"}, 2),
        ({"bf16": True, "grad_reduce_in_bf16": True, "accumulate_allreduce_grads_in_fp32": True}, 2),
        ({"fp16": True}, 2),
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 4),
    ],
)
def test_gradients_have_the_type_of_megatron_s_buffers(
    flags: dict[str, Any], size: int, architecture_of: ArchitectureOf
) -> None:
    layout = Layout.from_config({"model": {}, "megatron": flags})
    gpu = cost.per_gpu(architecture_of("tiny_hybrid"), layout)[0]
    assert gpu.gradient_bytes == size * gpu.parameters


@pytest.mark.parametrize("flag", ["use_megatron_fsdp", "use_torch_fsdp2"])
def test_fsdp_is_not_estimated(flag: str, architecture_of: ArchitectureOf) -> None:
    layout = Layout.from_config({"model": {}, "megatron": {"bf16": True, flag: True}})
    with pytest.raises(NotEstimated, match=rf"megatron\.{flag}=true: .* not estimated with FSDP; set it to false"):
        cost.per_gpu(architecture_of("tiny_hybrid"), layout)


def test_a_pattern_without_cuts_is_split_evenly_as_megatron_does() -> None:
    assert stage_ranges(parse("MEM*"), Layout(pipeline_parallel=2)) == (range(1, 3), range(3, 5))
    assert stage_ranges(parse("MEM*"), Layout()) == (range(1, 5),)
    assert stage_ranges(parse("|MEM*"), Layout(pipeline_parallel=2)) == (range(1, 1), range(1, 5))


@pytest.mark.parametrize(
    ("text", "layout", "message"),
    [
        ("MEM", Layout(pipeline_parallel=2), "3 blocks without cuts cannot be split evenly"),
        ("ME|M|*", Layout(pipeline_parallel=2), "the pattern has 3 stages, but the layout needs 2"),
        ("MEM*", Layout(pipeline_parallel=2, virtual_stages=2), "write 3 cuts `.` into the pattern"),
        ("M|E", Layout(), "the pattern has 2 stages, but the layout needs 1"),
    ],
)
def test_stages_that_do_not_fit(text: str, layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_ranges(parse(text), layout)


@pytest.mark.parametrize(
    ("pattern", "layout", "message"),
    [
        ("M*{heads=6,kv=2}", Layout(tensor_parallel=4), r"block 2 \(\*\{heads=6,kv=2\}\): heads=6 must be a multiple"),
        ("M{groups=2}", Layout(tensor_parallel=4), "groups=2 must be a multiple of tensor_parallel=4"),
        ("M{heads=8,groups=2}", Layout(tensor_parallel=2, context_parallel=8), "heads=8 must be .* 2 x 8"),
        ("M{heads=12,groups=6}", Layout(context_parallel=4), "context_parallel=4 must divide .* = 6 / 1"),
        ("-{ffn=50}", Layout(tensor_parallel=4), "ffn=50 must be a multiple of tensor_parallel=4"),
        ("E{experts=6}", Layout(data_parallel=4, expert_parallel=4), "experts=6 must be a multiple of expert_parallel"),
        ("*{heads=12,kv=3}", Layout(tensor_parallel=2), "kv=3 must be a multiple of tensor_parallel=2"),
    ],
)
def test_layouts_that_megatron_would_refuse(
    pattern: str, layout: Layout, message: str, architecture_of: ArchitectureOf
) -> None:
    with pytest.raises(ValueError, match=message):
        check_layout(architecture_of("tiny_hybrid", model={"pattern": pattern}), layout)


def test_fewer_kv_heads_than_ranks_are_allowed(architecture_of: ArchitectureOf) -> None:
    check_layout(architecture_of("tiny_hybrid", model={"pattern": "*{kv=1}"}), Layout(tensor_parallel=4))


def test_layout_of_a_configuration(config_of: ConfigOf) -> None:
    config = config_of("tiny_hybrid")
    config["model"]["pattern"] = "ME|*-|M*|E-"
    config["megatron"] |= {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "bf16": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp", "moe_act"],
    }
    assert Layout.from_config(config, world_size=32) == Layout(
        tensor_parallel=2,
        pipeline_parallel=2,
        virtual_stages=2,
        expert_parallel=4,
        expert_tensor_parallel=1,
        data_parallel=8,
        micro_batch_size=2,
        micro_batches=4,
        sequence_parallel=True,
        distributed_optimizer=True,
        recompute="selective",
        recompute_modules=("mlp", "moe_act"),
    )
    # Without a number of GPUs, the fewest that hold the experts.
    assert Layout.from_config(config).data_parallel == 2
    with pytest.raises(ValueError, match="30 GPUs are not divisible by TP x PP x CP = 4"):
        Layout.from_config(config, world_size=30)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1"),
        ({"expert_parallel": 3, "data_parallel": 4}, "must divide tensor x context x data parallel = 4"),
        ({"precision": "fp8"}, "precision must be bf16, fp16 or fp32"),
        ({"recompute": "some"}, "recompute_granularity: expected selective, full or none"),
        ({"recompute_modules": ("attention",)}, "unknown .*attention"),
    ],
)
def test_invalid_layouts_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**values)


def test_sizes_of_one_are_omitted() -> None:
    assert Layout().describe() == "DP1"
    assert (
        Layout(tensor_parallel=2, context_parallel=4, data_parallel=8, expert_parallel=2).describe()
        == "TP2 CP4 EP2 DP8"
    )
