"""Baselines at the same cost as a search: uniform widths, dropping blocks by score or from the end, random choices."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from random import Random

from nemo_ext.architecture.blocks import Block
from nemo_ext.puzzle.variants import KEEP, NO_OP, Variant

WIDTHS = {"M": "heads", "*": "kv", "E": "ffn", "-": "ffn"}
"""Mapping from kinds of blocks to the size that is narrowed."""

SHARES = 1000
"""Number of steps between 0 and 1 in the search for the uniform fraction."""


class CannotReach(ValueError):
    """Raised if a baseline cannot meet the cost limit."""


def uniform(blocks: Sequence[Block], cost: Callable[[Sequence[Block | None]], float], limit: float) -> list[Variant]:
    """Narrow every block to the same fraction of its width, the largest that meets a cost limit.

    Applies to FFNs, experts, Mamba-2 heads (nearest multiple of their groups) and KV heads (nearest divisor of the
    parent's number, so that they can be pooled). FFNs and experts use up what this rounding leaves of the limit. Linear
    blocks are unchanged.

    Args:
        blocks: the parent's blocks with all values filled in.
        cost: function that returns the cost of a sequence of blocks; it must not decrease with the fraction.
        limit: upper limit on the cost.

    Returns:
        One variant per block.

    Raises:
        CannotReach: even the narrowest widths cost more than the limit.
    """
    every = range(1, SHARES + 1)
    heads = bisect_right(every, limit, key=lambda step: cost(_narrowed(blocks, heads=step, kv=step, ffn=step)))
    if not heads:
        raise CannotReach(
            f"uniform width pruning cannot reach {limit:,.0f}: parts without a width to prune already cost more"
        )
    ffn = bisect_right(every, limit, key=lambda step: cost(_narrowed(blocks, heads=heads, kv=heads, ffn=step)))
    return [
        Variant(number, KEEP if new == old else f"uniform_{WIDTHS[new.kind]}{new.size(WIDTHS[new.kind])}", new)
        for number, (old, new) in enumerate(zip(blocks, _narrowed(blocks, heads=heads, kv=heads, ffn=ffn), strict=True))
    ]


def _narrowed(blocks: Sequence[Block], **steps: int) -> list[Block]:
    return [_narrow(block, steps) for block in blocks]


def _narrow(block: Block, steps: Mapping[str, int]) -> Block:
    if block.is_linear:
        return block
    name = WIDTHS[block.kind]
    whole = block.size(name)
    possible = {
        "heads": lambda: range(block.size("groups"), whole + 1, block.size("groups")),
        "kv": lambda: [heads for heads in range(1, whole + 1) if whole % heads == 0],
        "ffn": lambda: range(max(1, whole * steps[name] // SHARES), whole * steps[name] // SHARES + 2),
    }[name]()
    width = min(possible, key=lambda size: (abs(size * SHARES - whole * steps[name]), -size))
    return Block(block.kind, tuple({**dict(block.values), name: width}.items()))


def greedy(
    by_block: Sequence[Sequence[Variant]],
    score: Callable[[Variant], float],
    cost: Callable[[Sequence[Block | None]], float],
    limit: float,
) -> list[Variant]:
    """Drop blocks one by one, in ascending order of their no-op's score, until a cost limit is met.

    Blocks that do not contribute to the cost are kept.

    Args:
        by_block: variants of each block, from `variants`, including no-ops.
        score: function that returns a variant's score; lower is better.
        cost: function that returns the cost of a sequence of blocks, None for a dropped one.
        limit: upper limit on the cost.

    Returns:
        One variant per block: the no-op if the block is dropped, otherwise the unchanged block.

    Raises:
        CannotReach: the limit is not met even without all removable blocks, or no block would remain.
    """
    no_ops = [variant for each in by_block for variant in each if variant.name == NO_OP]
    choice = [each[0] for each in by_block]
    spent = cost([each.block for each in choice])
    for variant in sorted(no_ops, key=score):
        if spent <= limit:
            break
        without = [*choice[: variant.number], variant, *choice[variant.number + 1 :]]
        if (less := cost([each.block for each in without])) < spent:
            choice, spent = without, less
    if spent > limit or not any(variant.block for variant in choice):
        raise CannotReach(f"dropping blocks cannot reach {limit:,.0f}: no block would remain")
    return choice


def at_random(
    by_block: Sequence[Sequence[Variant]],
    cost: Callable[[Sequence[Block | None]], float],
    limit: float,
    seed: int,
) -> list[Variant]:
    """Choose random variants, adjusted to come close to a cost limit without exceeding it.

    Random blocks get a random cheaper variant until the limit is met. Then, in random order, each block gets the
    costliest variant that still fits.

    Args:
        by_block: variants of each block, from `variants`.
        cost: function that returns the cost of a sequence of blocks, None for a no-op.
        limit: upper limit on the cost.

    Returns:
        One variant per block.

    Raises:
        CannotReach: the limit is not met even by the cheapest variants, or no block would remain.
    """
    random = Random(f"random choice {seed}")
    choice = [random.choice(each) for each in by_block]

    def with_(variant: Variant) -> float:
        return cost([v.block for v in (*choice[: variant.number], variant, *choice[variant.number + 1 :])])

    spent = cost([each.block for each in choice])
    while spent > limit:
        cheaper = [(v, less) for each in by_block for v in each if (less := with_(v)) < spent]
        if not cheaper:
            raise CannotReach(f"random choice cannot reach {limit:,.0f}: the cheapest variants cost {spent:,.0f}")
        variant, spent = random.choice(cheaper)
        choice[variant.number] = variant
    for each in random.sample(list(by_block), len(by_block)):
        variant, more = max(((v, with_(v)) for v in each), key=lambda pair: (pair[1] <= limit, min(pair[1], limit)))
        if spent < more <= limit:
            choice[variant.number], spent = variant, more
    if not any(variant.block for variant in choice):
        raise CannotReach(f"random choice cannot reach {limit:,.0f}: no block would remain")
    return choice
