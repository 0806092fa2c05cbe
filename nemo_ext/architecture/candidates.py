"""Candidate parallel sizes for a layout search, for training on a recipe's GPUs and for RL."""

from collections.abc import Iterable
from itertools import product

from nemo_ext.architecture.blocks import Block


def powers(most: int) -> list[int]:
    """Return the powers of two up to and including `most`."""
    return [1 << power for power in range(max(most, 1).bit_length())]


def parallel_sizes(
    tensor: Iterable[int], pipeline: Iterable[int], context: Iterable[int]
) -> list[tuple[int, int, int]]:
    """Return all combinations (TP, PP, CP) of the given sizes, sorted by GPUs per model replica, then by PP and CP."""
    return sorted(product(tensor, pipeline, context), key=lambda size: (size[0] * size[1] * size[2], size[1], size[2]))


def expert_sizes(blocks: Iterable[Block], ranks: int, most: int) -> list[int]:
    """Return the EP sizes up to `most` that divide `ranks` and every MoE block's experts; [1] without MoE blocks."""
    counts = [block.size("experts") for block in blocks if block.kind == "E" and not block.is_linear]
    if not counts:
        return [1]
    return [size for size in range(1, most + 1) if not ranks % size and not any(n % size for n in counts)]
