"""Estimated memory of the activations kept for the backward pass.

The estimate counts the tensors that each block saves. It assumes no dropout and an even spread of tokens over experts,
and excludes allocator slack and communication buffers other than the output layer's.
"""

from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.layout import Layout, stage_ranges
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision import BYTES
from nemo_ext.architecture.widths import attention_widths, block_at, expert_width, first_width, mamba_widths
from nemo_ext.architecture.widths import layers as numbers_of


def activation_bytes(
    architecture: Architecture, layout: Layout, *, rank: int = 0, seq_length: int | None = None
) -> int:
    """Estimate the peak bytes of activations kept on one GPU of a pipeline rank.

    The estimate is the bytes kept per block (`block_activation_bytes`) times the micro-batches in flight: PP - rank
    with 1F1B, and (PP - rank - 1) * 2 + (virtual stages - 1) * PP + 1 model chunks with Megatron's interleaved
    schedule. Full recomputation keeps only each group's input, plus one group's activations while it is recomputed.
    The last stage adds the inputs of the output layer and of the final norm, and the logits: in the training
    precision, in fp32, and with z-loss also their gradient. These are freed before recomputation starts. Each depth
    of multi-token prediction adds the same amount for its own loss, plus the activations of its blocks and the inputs
    and outputs of its projection; with full recomputation it keeps only its two inputs, and one depth at a time is
    recomputed. A frozen stage (with `mtp_only`, only the first) keeps nothing; its peak is that of its largest block.
    Two buffers are never freed: with sequence parallelism, the gathered input of a trained output layer; and RoPE's
    angles in fp32, in a table for each model chunk or each attention block (`Architecture.rotary_per_block`).

    Args:
        architecture: The model.
        layout: Parallel layout.
        rank: Pipeline rank.
        seq_length: Sequence length; the model's own by default.
    """
    stages = stage_ranges(architecture.pattern, layout)
    pipeline, chunks = layout.pipeline_parallel, layout.virtual_stages
    in_flight = pipeline - rank
    if chunks > 1:
        in_flight = (pipeline - rank - 1) * 2 + (chunks - 1) * pipeline + 1
    if layout.micro_batches is not None:
        in_flight = min(in_flight, layout.micro_batches * chunks)
    kept: list[float] = []
    working = 0.0
    tokens = architecture.sequence_length(seq_length) * layout.micro_batch_size / layout.context_parallel
    residual = tokens * architecture.hidden_size * BYTES[layout.precision] / _sequence_split(layout)
    for chunk in range(chunks):
        layers = stages[chunk * pipeline + rank]
        blocks = [block_activation_bytes(architecture, n, layout, seq_length=seq_length) for n in layers]
        # A received activation requires its gradient, so later stages of a frozen main model keep what leads to it.
        if layout.frozen or (layout.mtp_only and chunk == rank == 0):
            kept.append(0.0)
            working = max([working, *blocks])
        elif layout.recompute == "full":
            group = layout.recompute_num_layers
            kept.append(residual * -(-len(blocks) // group))
            working = max([working, *(sum(blocks[i : i + group]) for i in range(0, len(blocks), group))])
        else:
            kept.append(sum(blocks))
    # Chunks take turns, PP micro-batches each (Megatron's interleaved schedule).
    total = sum(kept[(forward // pipeline) % chunks] for forward in range(in_flight))
    per_block = architecture.rotary_per_block
    numbers = [n for stage in stages[rank::pipeline] for n in stage] if per_block else numbers_of(architecture)
    attention = [block for block in (block_at(architecture, n) for n in numbers) if block.kind == "*"]
    angles = [4 * _rotated(architecture, block, layout, seq_length) for block in attention]
    total += sum(angles if per_block else chunks * angles[:1])
    head = 0.0
    if rank == pipeline - 1:
        size = BYTES[layout.precision]
        copies = 4 + (size if size < 4 else 0) + (size if layout.z_loss else 0)
        logits = tokens * copies * architecture.vocab_size / layout.tensor_parallel
        head = 2 * residual + logits
        if _sequence_split(layout) > 1 and not (layout.frozen or layout.mtp_only):
            total += residual * layout.tensor_parallel
        if architecture.pattern.mtp and not layout.frozen:
            depth = architecture.depth
            blocks = [block_activation_bytes(depth, n, layout, seq_length=seq_length) for n in numbers_of(depth)]
            within = sum(blocks) + 6 * residual
            if layout.recompute == "full":
                head += architecture.pattern.depths * (head + 2 * residual)
                working = max(working, within + architecture.pattern.depths * 2 * residual)
            else:
                head += architecture.pattern.depths * (head + within)
    return round(total + max(head, working))


def block_activation_bytes(
    architecture: Architecture, layer: int, layout: Layout, *, seq_length: int | None = None
) -> float:
    """Estimate the bytes that one GPU keeps per micro-batch for one block's backward pass, without full recomputation.

    The terms per token, counted in numbers of the training precision (h hidden, q = heads x head_dim, k = kv x
    head_dim), are:

    - every block: its input h; the norm's output h [layernorm]
    - attention: queries, keys and values q + 2k; the output projection's input q; with QK norms their input, a view
      of all q + 2k; per head the log-sum-exp, or two copies of the scores if attention is not fused [core_attn]; if
      RoPE is not fused, per position and not per token, cosines and sines for queries and for keys
    - MLP: outputs of the first linear and of the activation [mlp]
    - MoE: router logits and probabilities in fp32 per expert [moe]; per selected expert its input, its first
      linear's output [moe] and the activation's [moe_act, moe]; without a gate also the activation's output times
      the probability, which a gated expert computes in the same kernel [moe_act, moe]; the shared expert as an MLP
      [shared_experts, moe]
    - Mamba-2: in_proj's output, with at least one group of B and C on each of the TP x CP ranks; the scan's output
      before and after gating; the norm's output; the fused kernel recomputes the convolution and the states
    - linear: no further tensors

    A name in brackets is the entry in Megatron's recompute_modules that removes the term. Block input, norm output
    and router are split over tensor-parallel ranks only with sequence parallelism, RoPE's terms never, others always.

    Args:
        architecture: The model.
        layer: 1-based block number.
        layout: Parallel layout.
        seq_length: Sequence length; the model's own by default.
    """
    block, size = block_at(architecture, layer), BYTES[layout.precision]
    length, hidden = architecture.sequence_length(seq_length), architecture.hidden_size
    recomputed = layout.recompute_modules if layout.recompute == "selective" else ()

    def unless(module: str, numbers: float) -> float:
        return 0.0 if module in recomputed else numbers

    along_sequence = size * (hidden + unless("layernorm", hidden))
    sharded = rotation = 0.0
    if block.is_linear:
        pass
    elif block.kind == "*":
        query, _, projected = attention_widths(architecture, block)
        sharded = size * (projected + query)
        if architecture.qk_layernorm:
            sharded += size * projected
        per_head = 4 if layout.fused_attention else 2 * size * length
        core = per_head * block.size("heads")
        sharded += unless("core_attn", core)
        rotation = 0 if layout.fused_rope else 4 * size * _rotated(architecture, block, layout, seq_length)
    elif block.kind == "-":
        ffn = block.size("ffn")
        sharded = unless("mlp", size * (first_width(architecture, ffn) + ffn))
    elif block.kind == "M":
        inner, _, projected = mamba_widths(block)
        ranks, groups = layout.tensor_parallel * layout.context_parallel, block.size("groups")
        copied = 2 * block.size("state") * (max(groups, ranks) - groups)
        sharded = size * (projected + copied + 3 * inner)
    else:
        ffn, shared, width = block.size("ffn"), block.size("shared"), expert_width(architecture, block)
        along_sequence += unless("moe", 8 * block.size("experts"))
        activated = ffn if architecture.gated else 2 * ffn
        routed = first_width(architecture, ffn) + unless("moe_act", activated) + width * layout.expert_tensor
        sharded = unless("moe", size * block.size("topk") * routed)
        if not {"moe", "shared_experts"} & set(recomputed):
            sharded += size * (first_width(architecture, shared) + shared)
    tokens = length * layout.micro_batch_size / layout.context_parallel
    return tokens * (along_sequence / _sequence_split(layout) + sharded / layout.tensor_parallel) + rotation


def _rotated(architecture: Architecture, block: Block, layout: Layout, seq_length: int | None) -> float:
    """Return the number of RoPE angles of an attention block: of one head, for each position of a sequence."""
    width = 0 if block.is_linear else architecture.rotary * block.size("head_dim")
    return width * architecture.sequence_length(seq_length) / layout.context_parallel


def _sequence_split(layout: Layout) -> int:
    return layout.tensor_parallel if layout.sequence_parallel else 1
