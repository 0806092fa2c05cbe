"""Activation estimates: by hand for one block, and how recomputation and schedules change them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from nemo_ext.architecture.activations import activation_bytes, block_activation_bytes
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture

ArchitectureOf = Callable[..., Architecture]
PLAIN = Layout()


@pytest.mark.parametrize(
    ("pattern", "numbers", "extra_bytes"),
    [
        # block input and norm output 32 each, in every case
        ("-", 64 + 64 + 64, 0),
        ("*", 64 + 32 + 2 * 16 + 32, 4 * 4),  # queries 32, keys and values 16 each, output 32; log-sum-exp of 4 heads
        ("M", 64 + 264 + 3 * 64, 0),  # z, x, B, C, dt; the scan's output before and after gating, the norm's
        (
            "E",
            64 + 2 * (3 * 24 + 32) + 2 * 40,
            8 * 8,
        ),  # two experts, whose activations are also kept times their probabilities; shared 40; fp32 logits and those
        ("*{linear}", 64, 0),
    ],
)
def test_a_block_by_hand(pattern: str, numbers: int, extra_bytes: int, architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": pattern})
    assert block_activation_bytes(model, 1, PLAIN) == 64 * (2 * numbers + extra_bytes)
    twice = replace(PLAIN, micro_batch_size=2)
    assert block_activation_bytes(model, 1, twice) == 2 * block_activation_bytes(model, 1, PLAIN)


@pytest.mark.parametrize("pattern", ["-", "*", "M"])
def test_tensor_parallel_splits_everything_with_sequence_parallel(
    pattern: str, architecture_of: ArchitectureOf
) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": pattern})
    whole = block_activation_bytes(model, 1, PLAIN)
    split = Layout(tensor_parallel=2, sequence_parallel=True)
    assert block_activation_bytes(model, 1, split) == whole / 2
    assert whole / 2 < block_activation_bytes(model, 1, Layout(tensor_parallel=2)) < whole
    assert block_activation_bytes(model, 1, Layout(context_parallel=2)) == whole / 2


def test_core_attn_drops_the_score_matrix_of_unfused_attention(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": "*"})
    unfused = Layout(fused_attention=False)
    scores = 64 * 2 * 2 * 4 * 64  # per token: two copies, bf16, 4 heads, 64 keys
    log_sum_exp = 64 * 16
    assert block_activation_bytes(model, 1, unfused) == block_activation_bytes(model, 1, PLAIN) - log_sum_exp + scores
    selective = replace(unfused, recompute="selective")
    assert block_activation_bytes(model, 1, selective) == block_activation_bytes(model, 1, PLAIN) - log_sum_exp


@pytest.mark.parametrize(
    ("pattern", "module"),
    [("-", "mlp"), ("-", "layernorm"), ("E", "moe_act"), ("E", "shared_experts"), ("E", "moe"), ("*", "core_attn")],
)
def test_selective_recomputation_drops_the_named_activations(
    pattern: str, module: str, architecture_of: ArchitectureOf
) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": pattern})
    selective = Layout(recompute="selective", recompute_modules=(module,))
    assert block_activation_bytes(model, 1, selective) < block_activation_bytes(model, 1, PLAIN)


@pytest.mark.parametrize("scope", ["head", "width"])
def test_activations_of_qk_norms(scope: str, architecture_of: ArchitectureOf) -> None:
    """The norms keep the whole projection, which queries and keys are views of."""
    without = architecture_of("tiny_hybrid", model={"pattern": "*"})
    normed = replace(without, qk_layernorm=True, qk_norm_scope=scope)
    more = block_activation_bytes(normed, 1, PLAIN) - block_activation_bytes(without, 1, PLAIN)
    assert more == 64 * 2 * 64


def test_the_gathered_input_of_a_trained_output_layer_stays(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": "-*|-*"})
    for recompute in ("none", "full"):
        whole = Layout(pipeline_parallel=2, recompute=recompute)
        split = replace(whole, tensor_parallel=2, sequence_parallel=True)
        more = [2 * activation_bytes(model, split, rank=n) - activation_bytes(model, whole, rank=n) for n in (0, 1)]
        assert more == [0, 2 * 64 * 2 * 32]
    frozen = Layout(frozen=True)
    split = replace(frozen, tensor_parallel=2, sequence_parallel=True)
    assert 2 * activation_bytes(model.with_pattern("-*"), split) == activation_bytes(model.with_pattern("-*"), frozen)


def test_rope_keeps_angles_and_unless_fused_their_cosines_and_sines(architecture_of: ArchitectureOf) -> None:
    rope = {"position_embedding_type": "rope", "rotary_percent": 0.5}
    plain, model = (architecture_of("tiny_hybrid", model={"pattern": "**"}, **flags) for flags in ({}, rope))
    unfused = Layout.from_config({"model": {"backend": "local"}, "megatron": {"bf16": True}})
    assert not Layout.from_config({"model": {}, "megatron": {"position_embedding_type": "yarn"}}).fused_rope
    angles = 64 * 4  # half of the head dimension 8

    for layout, share in (
        (unfused, 1),
        (replace(unfused, tensor_parallel=2, micro_batch_size=2), 1),
        (replace(unfused, context_parallel=2), 2),
    ):
        more = block_activation_bytes(model, 1, layout) - block_activation_bytes(plain, 1, layout)
        assert more == 4 * 2 * angles / share
    assert block_activation_bytes(model, 1, PLAIN) == block_activation_bytes(plain, 1, PLAIN)
    assert activation_bytes(model, PLAIN) - activation_bytes(plain, PLAIN) == 4 * angles
    scaled = architecture_of("tiny_hybrid", model={"pattern": "**"}, use_rope_scaling=True, **rope)
    assert activation_bytes(scaled, PLAIN) - activation_bytes(plain, PLAIN) == 2 * 4 * angles


def test_full_recomputation_keeps_block_inputs_and_one_block(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": "M-*-"})
    head = activation_bytes(model, PLAIN) - sum(block_activation_bytes(model, n, PLAIN) for n in (1, 2, 3, 4))
    assert head == 64 * (2 * 2 * 32 + (2 + 4) * 256)  # logits, and again in fp32
    block_input = 64 * 2 * 32
    full = activation_bytes(model, Layout(recompute="full"))
    assert full == 4 * block_input + max(block_activation_bytes(model, 1, PLAIN), head)  # one after the other
    pairs = activation_bytes(model, Layout(recompute="full", recompute_num_layers=2))
    first_pair = sum(block_activation_bytes(model, n, PLAIN) for n in (1, 2))
    assert pairs == 2 * block_input + max(first_pair, head)
    first_of_two = activation_bytes(model.with_pattern("M-|*-"), Layout(recompute="full", pipeline_parallel=2))
    assert first_of_two == 2 * 2 * block_input + block_activation_bytes(model, 1, PLAIN)


def test_full_recomputation_keeps_the_inputs_and_logits_of_prediction_depths(architecture_of: ArchitectureOf) -> None:
    plain = architecture_of("tiny_hybrid", model={"pattern": "M-*-"})
    model = plain.with_pattern("M-*-/*-/*-")
    block_input, head = 64 * 2 * 32, 64 * (2 * 2 * 32 + (2 + 4) * 256)
    depth = sum(block_activation_bytes(plain, n, PLAIN) for n in (3, 4)) + 6 * block_input

    assert activation_bytes(model, PLAIN) == activation_bytes(plain, PLAIN) + 2 * (head + depth)
    assert activation_bytes(model, Layout(recompute="full")) == 4 * block_input + 3 * head + 2 * 2 * block_input


def test_micro_batches_in_flight(architecture_of: ArchitectureOf) -> None:
    model = architecture_of("tiny_hybrid", model={"pattern": "-|-|-|-"})
    one = block_activation_bytes(model, 1, PLAIN)
    plain = Layout(pipeline_parallel=4)
    assert [activation_bytes(model, plain, rank=rank) / one for rank in (0, 1, 2)] == [4, 3, 2]
    assert activation_bytes(model, replace(plain, micro_batches=1)) == one
    # Interleaved, on rank r: (4 - r - 1) x 2 + (2 - 1) x 4 + 1 chunks, as Megatron's schedule warms up.
    eight = model.with_pattern("-|-|-|-|-|-|-|-")
    interleaved = Layout(pipeline_parallel=4, virtual_stages=2)
    assert [activation_bytes(eight, interleaved, rank=rank) / one for rank in (0, 1, 2)] == [11, 9, 7]


def test_chunks_take_turns_of_pipeline_parallel_micro_batches(architecture_of: ArchitectureOf) -> None:
    # Rank 0 runs blocks 1 and 3: of its 5 chunks in flight, 2 are the first, 2 the second, 1 the first again.
    model = architecture_of("tiny_hybrid", model={"pattern": "M|-|-|-"})
    mamba, mlp = (block_activation_bytes(model, layer, PLAIN) for layer in (1, 3))
    assert activation_bytes(model, Layout(pipeline_parallel=2, virtual_stages=2)) == 3 * mamba + 2 * mlp
