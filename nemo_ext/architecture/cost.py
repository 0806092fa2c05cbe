"""Analytic cost of a model: parameters, FLOPs, and the bytes of weights, training state, caches and
activations, for the whole model, a block, a pipeline stage or a GPU.

Parameter counts are exact for Megatron-Core's modules. FLOPs include matrix multiplications (two per
multiply-add), convolutions and the state-space scan; norms, activations and embedding look-ups are excluded.
A causal query is counted with the tokens it attends to, (S + 1) / 2 of S on average, which is the usual
"half". Activations are an estimate: the tensors each block keeps for its backward pass, without dropout,
with the tokens spread evenly over experts, and without communication buffers or allocator slack.
"""

import math
from dataclasses import dataclass, fields

from nemo_ext.architecture.activations import activation_bytes as activation_bytes
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.layout import Layout as Layout
from nemo_ext.architecture.layout import check_layout, stage_ranges
from nemo_ext.architecture.model import CONV_KERNEL, Architecture
from nemo_ext.architecture.precision import bytes_per_number, bytes_per_parameter
from nemo_ext.architecture.widths import (
    attention_widths,
    block_at,
    first_width,
    has_bias,
    layers,
    mamba_widths,
    norm_parameters,
)

SCAN_CHUNK = 128
"""Tokens in one chunk of Mamba-2's SSD algorithm (`chunk_size` of Megatron's MambaMixer)."""

A100_UNITS_AND_HZ = 108 * 1.41e9
"""Number of SMs times clock of the A100 in the data sheet."""
PEAK_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12}
"""Device name -> dense BF16 FLOP/s (NVIDIA data sheets); the first key contained in the name applies."""

TRAINING_FLOPS_FACTOR = 3
"""FLOPs of forward and backward pass relative to forward: backward has one product for the gradient of the inputs and
one for the gradient of the weights."""


@dataclass(frozen=True)
class Parameters:
    """Parameter counts by how Megatron distributes them.

    Attributes:
        sharded: Parameters split over tensor parallel ranks.
        replicated: Parameters copied on every tensor parallel rank (norms, routers, replaced linears,
            biases after row-parallel linears).
        experts: Parameters split over expert parallel and expert tensor parallel ranks.
        experts_replicated: Parameters split over expert parallel ranks only (biases of experts' second linears).
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
    """Parameters of the block with this 1-based number, its norm included.

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
    experts, ffn, shared = map(block.size, ("experts", "ffn", "shared"))
    latent = architecture.moe_latent_size
    width, first = latent or hidden, first_width(architecture, ffn)
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
    """Parameters of the token embedding, and of the learned position embedding if there is one."""
    hidden = architecture.hidden_size
    return Parameters(sharded=architecture.vocab_size * hidden, replicated=architecture.learned_positions * hidden)


def head_parameters(architecture: Architecture) -> Parameters:
    """Parameters of the final norm and the output layer; a tied output layer adds no parameters."""
    hidden = architecture.hidden_size
    output = 0 if architecture.tied_embeddings else architecture.vocab_size * hidden
    return Parameters(sharded=output, replicated=norm_parameters(architecture, hidden))


def parameters(architecture: Architecture) -> Parameters:
    """All parameters of the model, each counted once."""
    counted = embedding_parameters(architecture) + head_parameters(architecture)
    return sum((block_parameters(architecture, layer) for layer in layers(architecture)), counted)


def total_params(architecture: Architecture) -> int:
    """Number of parameters of the model."""
    return parameters(architecture).total


def active_params(architecture: Architecture, *, with_embedding: bool = False) -> int:
    """Number of parameters that one token uses: routed top-k and shared experts, routers, everything dense.

    Args:
        architecture: The model.
        with_embedding: Whether the input embedding counts. A tied embedding always does: it is the output
            layer.
    """
    active = parameters(architecture).active
    if with_embedding:
        return active
    embedding = embedding_parameters(architecture)
    return active - (embedding.replicated if architecture.tied_embeddings else embedding.total)


def attended_tokens(seq_length: int, window: int = 0) -> float:
    """Mean number of tokens a causal query attends to, itself included; `window` 0 is full attention."""
    width = min(window or seq_length, seq_length)
    return width - width * (width - 1) / (2 * seq_length)


def block_forward_flops_per_token(architecture: Architecture, layer: int, *, seq_length: int | None = None) -> float:
    """Forward FLOPs of one block per token, averaged over a sequence.

    Args:
        architecture: The model.
        layer: 1-based block number.
        seq_length: Tokens in a sequence; the model's own by default.
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
    latent = architecture.moe_latent_size
    routed = block.size("topk") * _mlp_flops(architecture, latent or hidden, block.size("ffn"))
    shared = _mlp_flops(architecture, hidden, block.size("shared"))
    gate = 2 * hidden if shared and architecture.moe_shared_expert_gate else 0
    return routed + shared + gate + 2 * hidden * block.size("experts") + 4 * hidden * (latent or 0)


def _mlp_flops(architecture: Architecture, width: int, ffn: int) -> float:
    return 2 * width * (first_width(architecture, ffn) + ffn)


def _scan_flops(block: Block, seq_length: int) -> float:
    """FLOPs of the SSD scan per token (Mamba-2, arXiv 2405.21060, section 6).

    Within a chunk it is causal attention with keys B and queries C; each chunk's state is computed from B and x,
    passed to the next chunk, and read out by C.
    """
    whole, rest = divmod(seq_length, SCAN_CHUNK)
    pairs = whole * SCAN_CHUNK * attended_tokens(SCAN_CHUNK) + rest * attended_tokens(max(rest, 1))
    attended = pairs / seq_length
    inner, state = block.size("heads") * block.size("head_dim"), block.size("state")
    within = 2 * attended * (block.size("groups") * state + inner)
    return within + 4 * inner * state + 2 * inner * state / SCAN_CHUNK


def head_forward_flops_per_token(architecture: Architecture) -> float:
    """Forward FLOPs of the output layer per token."""
    return 2 * architecture.hidden_size * architecture.vocab_size


def forward_flops_per_token(architecture: Architecture, *, seq_length: int | None = None) -> float:
    """Forward FLOPs of the whole model per token, output layer included, at a sequence length."""
    blocks = (block_forward_flops_per_token(architecture, n, seq_length=seq_length) for n in layers(architecture))
    return sum(blocks, head_forward_flops_per_token(architecture))


def train_flops_per_token(architecture: Architecture, *, seq_length: int | None = None, frozen: bool = False) -> float:
    """Forward and backward FLOPs per token: three times the forward pass, recomputation not counted.

    A run without trained weights (`frozen`) has only the forward pass.
    """
    return (1 if frozen else TRAINING_FLOPS_FACTOR) * forward_flops_per_token(architecture, seq_length=seq_length)


def peak_of(device: str, units: int | None = None, clock: float | None = None) -> float | None:
    """Dense BF16 FLOP/s of a GPU by its name, such as `NVIDIA A100-SXM-64GB`; None for an unknown GPU.

    Args:
        device: device name.
        units: number of SMs reported by the driver: Leonardo's A100 has 124, the data sheet's 108.
        clock: maximum SM clock in Hz.
    """
    flops = next((flops for known, flops in PEAK_FLOPS.items() if known in device), None)
    if flops is None or units is None or clock is None or "A100" not in device:
        return flops
    return flops * units * clock / A100_UNITS_AND_HZ


def six_n(architecture: Architecture, *, frozen: bool = False) -> int:
    """Training FLOPs per token as papers count them: 6 per active parameter, the embedding included.

    It has no term for attention scores, so at long sequences it is far below `train_flops_per_token`. A run without
    trained weights (`frozen`) has 2 per active parameter.
    """
    return (2 if frozen else 6) * active_params(architecture, with_embedding=True)


def weight_bytes(architecture: Architecture, precision: str = "bf16") -> int:
    """Bytes of all weights held in one precision (real FP8 checkpoints keep some weights wider)."""
    return total_params(architecture) * bytes_per_number(precision)


def training_state_bytes(architecture: Architecture, *, precision: str = "bf16") -> int:
    """Bytes of weights, gradients and Adam state on one GPU that holds the whole model."""
    return sum(bytes_per_parameter(precision)) * total_params(architecture)


def kv_bytes_per_token(architecture: Architecture, *, precision: str = "bf16") -> int:
    """Bytes that each token adds to the key-value cache while no attention window is full."""
    return kv_cache_bytes(architecture, 1, precision=precision)


def kv_cache_bytes(architecture: Architecture, tokens: int, *, precision: str = "bf16") -> int:
    """Bytes of one sequence's key-value cache; a windowed block keeps only the tokens in its window."""
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
    """Bytes of the Mamba blocks' recurrent state for one sequence, independent of its length.

    The convolution keeps kernel - 1 columns (Megatron's inference allocates `kernel`), the scan keeps heads x
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
    """Cost of one pipeline stage; `layers` holds 1-based block numbers, `parameters` counts the whole stage."""

    stage: int
    rank: int
    layers: range
    parameters: Parameters
    forward_flops_per_token: float


@dataclass(frozen=True, kw_only=True)
class GpuCost:
    """Cost of one GPU of a pipeline rank, equal for all of its GPUs; TP x CP GPUs share the rank's FLOPs."""

    rank: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    forward_flops_per_token: float

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, gradients, optimizer state and activations together."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes


def per_stage(architecture: Architecture, layout: Layout, *, seq_length: int | None = None) -> tuple[StageCost, ...]:
    """Cost of each pipeline stage, the embedding with the first and the output layer with the last.

    A tied output layer with pipeline parallelism is a second copy of the embedding, and counted as one.
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
            flops += head_forward_flops_per_token(architecture)
            if architecture.tied_embeddings and layout.pipeline_parallel > 1:
                counted += Parameters(sharded=architecture.vocab_size * architecture.hidden_size)
        rank = stage % layout.pipeline_parallel
        cost = StageCost(stage=stage, rank=rank, layers=numbers, parameters=counted, forward_flops_per_token=flops)
        stages.append(cost)
    return tuple(stages)


def per_gpu(architecture: Architecture, layout: Layout, *, seq_length: int | None = None) -> tuple[GpuCost, ...]:
    """Cost of one GPU on each pipeline rank.

    Raises:
        ValueError: The layout does not divide a block; the message has its number.
    """
    check_layout(architecture, layout)
    stages = per_stage(architecture, layout, seq_length=seq_length)
    weight, gradient, optimizer = bytes_per_parameter(layout.precision)
    if layout.frozen:
        gradient, optimizer = 0, 0
    dense_shards, expert_shards = layout.optimizer_shards
    gpus = []
    for rank in range(layout.pipeline_parallel):
        mine = [stage for stage in stages if stage.rank == rank]
        counted = sum((stage.parameters for stage in mine), Parameters())
        dense = counted.sharded // layout.tensor_parallel + counted.replicated
        expert = counted.experts // (layout.expert_parallel * layout.expert_tensor)
        expert += counted.experts_replicated // layout.expert_parallel
        flops = sum(stage.forward_flops_per_token for stage in mine)
        gpus.append(
            GpuCost(
                rank=rank,
                parameters=dense + expert,
                weight_bytes=weight * (dense + expert),
                gradient_bytes=gradient * (dense + expert),
                optimizer_bytes=math.ceil(optimizer * dense / dense_shards + optimizer * expert / expert_shards),
                activation_bytes=activation_bytes(architecture, layout, rank=rank, seq_length=seq_length),
                forward_flops_per_token=flops / (layout.tensor_parallel * layout.context_parallel),
            )
        )
    return tuple(gpus)
