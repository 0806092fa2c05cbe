"""Analytic cost of a model, a block, a pipeline stage or a GPU: parameters, FLOPs and memory.

Parameter counts are exact for Megatron-Core's modules. FLOPs include matrix multiplications (two per
multiply-add), convolutions and the state-space scan; norms, activations and embedding look-ups are excluded.
Attention is counted only for the tokens that a causal query attends to, on average (S + 1) / 2 of S (the usual "half").
Activation memory is an estimate: the tensors that each block keeps for its backward pass, without dropout, with
tokens spread evenly over experts, and without allocator slack or most communication buffers.
"""

import math
from dataclasses import dataclass, fields, replace

from nemo_ext.architecture.activations import activation_bytes as activation_bytes
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.layout import Layout as Layout
from nemo_ext.architecture.layout import check_layout, stage_ranges
from nemo_ext.architecture.model import CONV_KERNEL, Architecture
from nemo_ext.architecture.precision import bytes_per_number, bytes_per_parameter
from nemo_ext.architecture.widths import (
    attention_widths,
    block_at,
    expert_width,
    first_width,
    has_bias,
    layers,
    mamba_widths,
    norm_parameters,
)

SCAN_CHUNK = 128
"""Number of tokens in a chunk of Mamba-2's SSD algorithm (`chunk_size` of Megatron's MambaMixer)."""

A100_UNITS_AND_HZ = 108 * 1.41e9
"""The A100's number of SMs times its clock in Hz, according to the data sheet."""
PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Mapping from device names to dense BF16 FLOP/s (NVIDIA data sheets); the first key that a name contains applies."""

TRAINING_FLOPS_FACTOR = 3
"""FLOPs of both passes relative to the forward pass: the backward pass has one product for the inputs' gradient and one
for the weights'."""


@dataclass(frozen=True)
class Parameters:
    """Parameter counts, by how Megatron distributes the parameters.

    Attributes:
        sharded: Number of parameters split over tensor-parallel ranks.
        replicated: Number of parameters copied to every tensor-parallel rank (norms, routers, linear replacements,
            biases after row-parallel layers).
        experts: Number of parameters split over expert-parallel and expert-tensor-parallel ranks.
        experts_replicated: Number of parameters split over expert-parallel ranks only (biases of experts' second
            layers).
        inactive: Number of all these parameters that a token does not use (experts it is not routed to).
    """

    sharded: int = 0
    replicated: int = 0
    experts: int = 0
    experts_replicated: int = 0
    inactive: int = 0

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + self.expert

    @property
    def dense(self) -> int:
        """Number of parameters outside the routed experts."""
        return self.sharded + self.replicated

    @property
    def expert(self) -> int:
        """Number of parameters of the routed experts."""
        return self.experts + self.experts_replicated

    @property
    def active(self) -> int:
        """Number of parameters that one token uses."""
        return self.total - self.inactive

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


def block_parameters(architecture: Architecture, layer: int) -> Parameters:
    """Count the parameters of the block with this 1-based number, including its norm.

    Raises:
        ValueError: The block's kind has no cost model (gated delta net, sparse attention, MLA).
    """
    block = block_at(architecture, layer)
    hidden = architecture.hidden_size
    norm = Parameters(replicated=norm_parameters(architecture, hidden))
    if block.is_linear:
        # Replicated on every rank, without bias (nemo_ext.megatron.layers.LinearReplacement).
        return norm + Parameters(replicated=hidden * hidden)
    if block.kind == "*":
        return norm + _attention_parameters(architecture, block)
    if block.kind == "-":
        return norm + _mlp_parameters(architecture, block)
    if block.kind == "M":
        inner, channels, projected = mamba_widths(block)
        # A_log, D and dt_bias have one number per head; the gated norm always has weights.
        own = (CONV_KERNEL + 1) * channels + 3 * block.size("heads") + inner
        return norm + Parameters(sharded=hidden * projected + own + inner * hidden)
    return norm + _moe_parameters(architecture, block)


def _attention_parameters(architecture: Architecture, block: Block) -> Parameters:
    hidden, bias = architecture.hidden_size, int(architecture.bias)
    query, key, projected = attention_widths(architecture, block)
    qkv_bias = projected if architecture.bias or architecture.qkv_bias else 0
    counted = Parameters(sharded=hidden * projected + qkv_bias + query * hidden, replicated=bias * hidden)
    if architecture.qk_layernorm and architecture.qk_norm_scope == "head":
        counted += Parameters(replicated=2 * norm_parameters(architecture, block.size("head_dim")))
    elif architecture.qk_layernorm:
        counted += Parameters(sharded=norm_parameters(architecture, query) + norm_parameters(architecture, key))
    return counted


def _mlp_parameters(architecture: Architecture, block: Block) -> Parameters:
    ffn = block.size("ffn")
    hidden, bias, first = architecture.hidden_size, int(has_bias(architecture, block)), first_width(architecture, ffn)
    return Parameters(sharded=hidden * first + bias * first + ffn * hidden, replicated=bias * hidden)


def _moe_parameters(architecture: Architecture, block: Block) -> Parameters:
    hidden, bias = architecture.hidden_size, int(architecture.bias)
    experts, ffn, shared, latent = map(block.size, ("experts", "ffn", "shared", "latent"))
    width, first = expert_width(architecture, block), first_width(architecture, ffn)
    matrices, after = width * first + bias * first + ffn * width, bias * width
    # The router's expert bias is a buffer, not a parameter; it has an ordinary bias where linears have one.
    replicated = experts * (hidden + bias)
    if latent:
        replicated += 2 * hidden * latent + bias * (latent + hidden)
    if shared and architecture.moe_shared_expert_gate:
        replicated += hidden
    return Parameters(
        sharded=hidden * first_width(architecture, shared) + shared * hidden,
        replicated=replicated,
        experts=experts * matrices,
        experts_replicated=experts * after,
        inactive=(experts - block.size("topk")) * (matrices + after),
    )


def embedding_parameters(architecture: Architecture) -> Parameters:
    """Count the parameters of the token embedding, and of the learned position embedding if there is one."""
    hidden = architecture.hidden_size
    return Parameters(sharded=architecture.vocab_size * hidden, replicated=architecture.learned_positions * hidden)


def head_parameters(architecture: Architecture) -> Parameters:
    """Count the parameters of the final norm and the output layer; a tied output layer adds none."""
    hidden = architecture.hidden_size
    output = 0 if architecture.tied_embeddings else architecture.vocab_size * hidden
    return Parameters(sharded=output, replicated=norm_parameters(architecture, hidden))


def mtp_parameters(architecture: Architecture) -> Parameters:
    """Count the parameters of all depths of multi-token prediction, none of which a token uses in ordinary decoding.

    A depth has norms of the next token's embedding and of the hidden state, their joint projection, its blocks and a
    final norm. Depths share one set of weights if `mtp_use_repeated_layer` is set.
    """
    if not architecture.pattern.mtp:
        return Parameters()
    hidden, depth = architecture.hidden_size, architecture.depth
    counted = Parameters(sharded=2 * hidden * hidden, replicated=3 * norm_parameters(architecture, hidden))
    counted = sum((block_parameters(depth, layer) for layer in layers(depth)), counted)
    sets = 1 if architecture.mtp_repeated else architecture.pattern.depths
    return replace(sum([counted] * sets, Parameters()), inactive=sets * counted.total)


def parameters(architecture: Architecture) -> Parameters:
    """Count all parameters of the model, each once."""
    counted = embedding_parameters(architecture) + head_parameters(architecture) + mtp_parameters(architecture)
    return sum((block_parameters(architecture, layer) for layer in layers(architecture)), counted)


def total_params(architecture: Architecture) -> int:
    """Return the number of parameters of the model."""
    return parameters(architecture).total


def active_params(architecture: Architecture, *, with_embedding: bool = False) -> int:
    """Count the parameters that one token uses: its routed experts, shared experts, routers and all dense parameters.

    Args:
        architecture: The model.
        with_embedding: Whether to count the input embedding. A tied embedding always counts, as it is also the
            output layer.
    """
    active = parameters(architecture).active
    if with_embedding:
        return active
    embedding = embedding_parameters(architecture)
    return active - (embedding.replicated if architecture.tied_embeddings else embedding.total)


def attended_tokens(seq_length: int, window: int = 0) -> float:
    """Return the mean number of tokens that a causal query attends to, including itself; `window` 0 means no window."""
    width = min(window or seq_length, seq_length)
    return width - width * (width - 1) / (2 * seq_length)


def block_forward_flops_per_token(architecture: Architecture, layer: int, *, seq_length: int | None = None) -> float:
    """Compute one block's forward FLOPs per token, averaged over a sequence.

    Args:
        architecture: The model.
        layer: 1-based block number.
        seq_length: Sequence length; the model's own by default.
    """
    block, hidden = block_at(architecture, layer), architecture.hidden_size
    length = architecture.sequence_length(seq_length)
    if block.is_linear:
        return 2 * hidden * hidden
    if block.kind == "*":
        query, _, projected = attention_widths(architecture, block)
        return 2 * hidden * (projected + query) + 4 * query * attended_tokens(length, block.size("window"))
    if block.kind == "-":
        return _mlp_flops(architecture, hidden, block.size("ffn"))
    if block.kind == "M":
        inner, channels, projected = mamba_widths(block)
        return 2 * hidden * (projected + inner) + 2 * CONV_KERNEL * channels + _scan_flops(block, length)
    routed = block.size("topk") * _mlp_flops(architecture, expert_width(architecture, block), block.size("ffn"))
    shared = _mlp_flops(architecture, hidden, block.size("shared"))
    gate = 2 * hidden if shared and architecture.moe_shared_expert_gate else 0
    return routed + shared + gate + 2 * hidden * block.size("experts") + 4 * hidden * block.size("latent")


def _mlp_flops(architecture: Architecture, width: int, ffn: int) -> float:
    return 2 * width * (first_width(architecture, ffn) + ffn)


def _scan_flops(block: Block, seq_length: int) -> float:
    """Compute the FLOPs of the SSD scan per token (Mamba-2, arXiv 2405.21060, section 6).

    Within a chunk, the scan is causal attention with keys B and queries C. Each chunk's state is computed from B and x,
    passed to the next chunk, and read with C.
    """
    whole, rest = divmod(seq_length, SCAN_CHUNK)
    pairs = whole * SCAN_CHUNK * attended_tokens(SCAN_CHUNK) + rest * attended_tokens(max(rest, 1))
    attended = pairs / seq_length
    inner, state = block.size("heads") * block.size("head_dim"), block.size("state")
    within = 2 * attended * (block.size("groups") * state + inner)
    return within + 4 * inner * state + 2 * inner * state / SCAN_CHUNK


def head_forward_flops_per_token(architecture: Architecture) -> float:
    """Compute the output layer's forward FLOPs per token."""
    return 2 * architecture.hidden_size * architecture.vocab_size


def forward_flops_per_token(architecture: Architecture, *, seq_length: int | None = None) -> float:
    """Compute the model's forward FLOPs per token at a sequence length, with the output layer and without MTP."""
    blocks = (block_forward_flops_per_token(architecture, n, seq_length=seq_length) for n in layers(architecture))
    return sum(blocks, head_forward_flops_per_token(architecture))


def mtp_forward_flops_per_token(architecture: Architecture, *, seq_length: int | None = None) -> float:
    """Compute the forward FLOPs per token of all depths of multi-token prediction, with the output layer of each."""
    pattern, hidden, depth = architecture.pattern, architecture.hidden_size, architecture.depth
    if not pattern.mtp:
        return 0
    blocks = (block_forward_flops_per_token(depth, n, seq_length=seq_length) for n in layers(depth))
    return pattern.depths * sum(blocks, 4 * hidden * hidden + head_forward_flops_per_token(architecture))


def train_flops_per_token(
    architecture: Architecture, *, seq_length: int | None = None, frozen: bool = False, mtp_only: bool = False
) -> float:
    """Compute training FLOPs per token: three times the forward pass with MTP, without recomputation.

    A run that trains no weights (`frozen`) has only the forward pass, and so has the main model with `mtp_only`.
    """
    main = forward_flops_per_token(architecture, seq_length=seq_length)
    mtp = mtp_forward_flops_per_token(architecture, seq_length=seq_length)
    return (1 if frozen or mtp_only else TRAINING_FLOPS_FACTOR) * main + (1 if frozen else TRAINING_FLOPS_FACTOR) * mtp


def peak_of(device: str, units: int | None = None, clock: float | None = None) -> float | None:
    """Return the peak dense BF16 FLOP/s of a GPU, such as `NVIDIA A100-SXM-64GB`; None if the GPU is unknown.

    Args:
        device: device name.
        units: number of SMs that the driver reports.
        clock: maximum SM clock in Hz. An A100's peak is scaled by both numbers if they are given, as Leonardo's A100
            has 124 SMs instead of the data sheet's 108; they have no effect for other GPUs.
    """
    flops = next((flops for known, flops in PEAK_FLOPS.items() if known in device), None)
    if flops is None or units is None or clock is None or "A100" not in device:
        return flops
    return flops * units * clock / A100_UNITS_AND_HZ


def six_n(architecture: Architecture, *, frozen: bool = False) -> int:
    """Compute training FLOPs per token as papers do: 6 per active parameter, including the embedding.

    Without a term for attention scores, the count is far below `train_flops_per_token` for long sequences. A run that
    trains no weights (`frozen`) has 2 FLOPs per active parameter.
    """
    return (2 if frozen else 6) * active_params(architecture, with_embedding=True)


def weight_bytes(architecture: Architecture, precision: str = "bf16") -> int:
    """Compute the bytes of all weights in one precision (real FP8 checkpoints keep some weights in a wider one)."""
    return total_params(architecture) * bytes_per_number(precision)


def training_state_bytes(architecture: Architecture, *, precision: str = "bf16") -> int:
    """Compute the bytes of weights, gradients and Adam state on a single GPU that holds the whole model."""
    return sum(bytes_per_parameter(precision)) * total_params(architecture)


def kv_bytes_per_token(architecture: Architecture, *, precision: str = "bf16") -> int:
    """Compute the bytes that each token adds to the key-value cache as long as no attention window is full."""
    return kv_cache_bytes(architecture, 1, precision=precision)


def kv_cache_bytes(architecture: Architecture, tokens: int, *, precision: str = "bf16") -> int:
    """Compute the bytes of one sequence's key-value cache; a windowed block keeps only the tokens in its window."""
    numbers = 0
    for layer in layers(architecture):
        block = block_at(architecture, layer)
        if block.kind == "*" and not block.is_linear:
            kept = min(tokens, block.size("window") or tokens)
            numbers += kept * 2 * block.size("kv") * block.size("head_dim")
    return numbers * bytes_per_number(precision)


def state_bytes_per_sequence(
    architecture: Architecture, *, conv_precision: str = "bf16", ssm_precision: str = "fp32"
) -> int:
    """Compute the bytes of the Mamba blocks' recurrent state for one sequence, which its length does not affect.

    The convolution keeps kernel - 1 columns (Megatron's inference allocates `kernel`), and the scan keeps heads x
    head_dim x state numbers.
    """
    total = 0
    for layer in layers(architecture):
        block = block_at(architecture, layer)
        if block.kind == "M" and not block.is_linear:
            inner, channels, _ = mamba_widths(block)
            total += (CONV_KERNEL - 1) * channels * bytes_per_number(conv_precision)
            total += inner * block.size("state") * bytes_per_number(ssm_precision)
    return total


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Cost of one pipeline stage, before it is divided among tensor-parallel and context-parallel ranks.

    Attributes:
        stage: 0-based number of the stage.
        rank: pipeline rank that runs it.
        layers: 1-based numbers of its blocks.
        parameters: parameter counts.
        forward_flops_per_token: forward FLOPs per token.
    """

    stage: int
    rank: int
    layers: range
    parameters: Parameters
    forward_flops_per_token: float


@dataclass(frozen=True, kw_only=True)
class GpuCost:
    """Cost of each GPU on one pipeline rank: its memory, and its share of the FLOPs, divided by TP x CP."""

    rank: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    forward_flops_per_token: float

    @property
    def total_bytes(self) -> int:
        """Total bytes of weights, gradients, optimizer state and activations."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def per_stage(architecture: Architecture, layout: Layout, *, seq_length: int | None = None) -> tuple[StageCost, ...]:
    """Compute the cost of each pipeline stage; the first includes the embedding, the last the output layer and MTP.

    With pipeline parallelism, a tied output layer is a second copy of the embedding, and is counted as such; so is the
    embedding that MTP reads on the last stage.
    """
    stages = []
    ranges = stage_ranges(architecture.pattern, layout)
    for stage, numbers in enumerate(ranges):
        counted = sum((block_parameters(architecture, layer) for layer in numbers), Parameters())
        flops = sum(block_forward_flops_per_token(architecture, n, seq_length=seq_length) for n in numbers)
        if stage == 0:
            counted += embedding_parameters(architecture)
        if stage == len(ranges) - 1:
            counted += head_parameters(architecture)
            counted += mtp_parameters(architecture)
            flops += head_forward_flops_per_token(architecture)
            flops += mtp_forward_flops_per_token(architecture, seq_length=seq_length)
            if layout.pipeline_parallel > 1 and architecture.pattern.mtp:
                counted += embedding_parameters(architecture)
            elif layout.pipeline_parallel > 1 and architecture.tied_embeddings:
                counted += Parameters(sharded=architecture.vocab_size * architecture.hidden_size)
        rank = stage % layout.pipeline_parallel
        cost = StageCost(stage=stage, rank=rank, layers=numbers, parameters=counted, forward_flops_per_token=flops)
        stages.append(cost)
    return tuple(stages)


def _on_gpu(counted: Parameters, layout: Layout) -> tuple[int, int]:
    """Return the number of parameters that one GPU holds outside routed experts, and in routed experts."""
    dense = counted.sharded // layout.tensor_parallel + counted.replicated
    expert = counted.experts // (layout.expert_parallel * layout.expert_tensor)
    return dense, expert + counted.experts_replicated // layout.expert_parallel


def per_gpu(architecture: Architecture, layout: Layout, *, seq_length: int | None = None) -> tuple[GpuCost, ...]:
    """Compute the cost of one GPU on each pipeline rank.

    Raises:
        ValueError: A parallel size does not divide a block's size; the message gives the block's number.
    """
    check_layout(architecture, layout)
    stages = per_stage(architecture, layout, seq_length=seq_length)
    weight, gradient, optimizer = layout.bytes_per_parameter
    dense_shards, expert_shards = layout.optimizer_shards
    gpus = []
    for rank in range(layout.pipeline_parallel):
        mine = [stage for stage in stages if stage.rank == rank]
        counted = trained = sum((stage.parameters for stage in mine), Parameters())
        if layout.frozen or layout.mtp_only:
            last = layout.mtp_only and rank == layout.pipeline_parallel - 1
            trained = mtp_parameters(architecture) if last else Parameters()
        dense, expert = _on_gpu(counted, layout)
        trained_dense, trained_expert = _on_gpu(trained, layout)
        flops = sum(stage.forward_flops_per_token for stage in mine)
        gpus.append(
            GpuCost(
                rank=rank,
                parameters=dense + expert,
                weight_bytes=weight * (dense + expert),
                gradient_bytes=gradient * (trained_dense + trained_expert),
                optimizer_bytes=math.ceil(
                    optimizer * trained_dense / dense_shards + optimizer * trained_expert / expert_shards
                ),
                activation_bytes=activation_bytes(architecture, layout, rank=rank, seq_length=seq_length),
                forward_flops_per_token=flops / (layout.tensor_parallel * layout.context_parallel),
            )
        )
    return tuple(gpus)
