"""Widths inside a block, from which its parameters, FLOPs and activations are computed."""

from nemo_ext.architecture.blocks import BIAS, LINEAR, VALUES, Block
from nemo_ext.architecture.model import Architecture


def layers(architecture: Architecture) -> range:
    """Return the 1-based numbers of all blocks."""
    return range(1, len(architecture.pattern.blocks) + 1)


def block_at(architecture: Architecture, layer: int) -> Block:
    """Return the resolved block with a 1-based number.

    Raises:
        ValueError: The block does not exist, or its kind has no cost model (gated delta net, sparse attention,
            MLA).
    """
    if not 1 <= layer <= len(architecture.sizes):
        raise ValueError(f"layer={layer}: expected a block number from 1 to {len(architecture.sizes)}")
    block = architecture.sizes[layer - 1]
    if LINEAR not in VALUES[block.kind]:
        raise ValueError(
            f"block {layer}: the cost model does not support {block.name} ({block.kind!r}) yet; replace the block"
        )
    return block


def norm_parameters(architecture: Architecture, width: int) -> int:
    """Count the parameters of one norm: LayerNorm has a weight and a bias, RMSNorm a weight, a non-affine norm none."""
    if not architecture.norm_affine:
        return 0
    return width * (2 if architecture.normalization == "LayerNorm" else 1)


def attention_widths(architecture: Architecture, block: Block) -> tuple[int, int, int]:
    """Return the widths of queries, of keys, and of the joint projection to queries, keys, values and gate."""
    query = block.size("heads") * block.size("head_dim")
    key = block.size("kv") * block.size("head_dim")
    return query, key, query + 2 * key + (query if architecture.attention_output_gate else 0)


def mamba_widths(block: Block) -> tuple[int, int, int]:
    """Return the widths of the inner stream x, the convolution (x, B, C) and in_proj's output (z, x, B, C, dt)."""
    inner = block.size("heads") * block.size("head_dim")
    channels = inner + 2 * block.size("groups") * block.size("state")
    return inner, channels, inner + channels + block.size("heads")


def first_width(architecture: Architecture, ffn: int) -> int:
    """Return the output width of an MLP's first linear layer; in a gated MLP, gate and up together."""
    return 2 * ffn if architecture.gated else ffn


def expert_width(architecture: Architecture, block: Block) -> int:
    """Return the input and output width of a MoE block's routed experts: its latent width, or the hidden size."""
    return block.size("latent") or architecture.hidden_size


def has_bias(architecture: Architecture, block: Block) -> bool:
    """Return whether an MLP block's linear layers have biases."""
    return architecture.bias or bool(block.get(BIAS))
