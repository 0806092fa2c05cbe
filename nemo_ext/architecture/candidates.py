"""Parallel sizes that a search for a layout goes through: for training on the GPUs of a recipe, and for RL."""

from collections.abc import Iterable
from itertools import product

from nemo_ext.architecture.blocks import Block


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [1 << power for power in range(max(most, 1).bit_length())]


def parallel_sizes(
    tensor: Iterable[int], pipeline: Iterable[int], context: Iterable[int]
) -> list[tuple[int, int, int]]:
    """All TP, PP and CP; the fewest GPUs to one copy of the model first, then the fewest stages."""
    return sorted(product(tensor, pipeline, context), key=lambda one: (one[0] * one[1] * one[2], one[1], one[2]))


def expert_sizes(blocks: Iterable[Block], ranks: int, most: int) -> list[int]:
    """EP of at most `most` that divide the experts of every MoE block and so many ranks; [1] without such blocks."""
    counts = [block.size("experts") for block in blocks if block.kind == "E" and not block.is_linear]
    if not counts:
        return [1]
    return [size for size in range(1, most + 1) if not ranks % size and not any(n % size for n in counts)]
