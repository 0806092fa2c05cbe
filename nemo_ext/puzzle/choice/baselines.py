"""Baselines for a search at the same cost: uniform widths, blocks dropped by score or from the end, random choices."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from random import Random

from nemo_ext.architecture.blocks import Block
from nemo_ext.puzzle.variants import KEEP, NO_OP, Variant

WIDTHS = {"M": "heads", "*": "kv", "E": "ffn", "-": "ffn"}
"""Kind of block -> the size that is narrowed."""

SHARES = 1000
"""Number of steps in the search for the uniform share."""


class CannotReach(ValueError):
    """The pruning method runs out of things to remove before the cost limit is met."""


def uniform(blocks: Sequence[Block], cost: Callable[[Sequence[Block | None]], float], most: float) -> list[Variant]:
    """Narrow every block to one share of its width, the largest share within a cost limit.

    Applies to FFNs, experts, Mamba-2 heads (nearest multiple of their groups) and KV heads (nearest divisor of the
    parent's, so that they can be pooled); FFNs and experts take what that rounding leaves over. Linear blocks stay.

    Args:
        blocks: the parent's blocks with all values.
        cost: cost of a sequence of blocks, None for one left out; never falls as the share grows.
        most: upper limit on the cost.

    Raises:
        CannotReach: even the narrowest widths cost more.
    """
    every = range(1, SHARES + 1)
    heads = bisect_right(every, most, key=lambda step: cost(_narrowed(blocks, heads=step, kv=step, ffn=step)))
    if not heads:
        raise CannotReach(f"uniform width pruning cannot reach {most:,.0f}: what has no width costs more")
    ffn = bisect_right(every, most, key=lambda step: cost(_narrowed(blocks, heads=heads, kv=heads, ffn=step)))
    return [
        Variant(number, KEEP if new == old else f"uniform_{_width(new)}", new)
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


def _width(block: Block) -> str:
    return f"{WIDTHS[block.kind]}{block.size(WIDTHS[block.kind])}"


def greedy(
    found: Sequence[Sequence[Variant]],
    score: Callable[[Variant], float],
    cost: Callable[[Sequence[Block | None]], float],
    most: float,
) -> list[Variant]:
    """Drop blocks one by one, the one with the lowest score first, until a cost limit is met.

    Blocks that contribute nothing to the cost stay.

    Args:
        found: variants of each block, from `variants`, each with a no-op.
        score: score of a variant; lower is better.
        cost: cost of a sequence of blocks.
        most: upper limit on the cost.

    Raises:
        CannotReach: the limit is not met even when all blocks that may go are gone, or no block is left.
    """
    no_ops = [variant for each in found for variant in each if variant.name == NO_OP]
    return _dropped(found, sorted(no_ops, key=score), cost, most)


def last(
    found: Sequence[Sequence[Variant]], cost: Callable[[Sequence[Block | None]], float], most: float
) -> list[Variant]:
    """Drop blocks from the end, the last one first, until a cost limit is met (depth pruning); otherwise as `greedy`.

    Raises:
        CannotReach: see `greedy`.
    """
    no_ops = [variant for each in found for variant in each if variant.name == NO_OP]
    return _dropped(found, no_ops[::-1], cost, most)


def _dropped(
    found: Sequence[Sequence[Variant]],
    no_ops: Sequence[Variant],
    cost: Callable[[Sequence[Block | None]], float],
    most: float,
) -> list[Variant]:
    choice = [each[0] for each in found]
    spent = cost([each.block for each in choice])
    for variant in no_ops:
        if spent <= most:
            break
        without = [*choice[: variant.number], variant, *choice[variant.number + 1 :]]
        if (less := cost([each.block for each in without])) < spent:
            choice, spent = without, less
    if spent > most or not any(variant.block for variant in choice):
        raise CannotReach(f"dropping blocks cannot reach {most:,.0f}: nothing would be left")
    return choice


def at_random(
    found: Sequence[Sequence[Variant]],
    cost: Callable[[Sequence[Block | None]], float],
    most: float,
    seed: int,
) -> list[Variant]:
    """A random variant of every block, and then others where needed to come as close to a cost limit as they can.

    Blocks in random order get a random cheaper variant until the limit is met, and then the costliest that still fits.

    Raises:
        CannotReach: the limit is not met even by the cheapest variants, or no block is left.
    """
    random = Random(f"random choice {seed}")
    choice = [random.choice(each) for each in found]

    def with_(variant: Variant) -> float:
        return cost([v.block for v in (*choice[: variant.number], variant, *choice[variant.number + 1 :])])

    spent = cost([each.block for each in choice])
    while spent > most:
        cheaper = [(v, less) for each in found for v in each if (less := with_(v)) < spent]
        if not cheaper:
            raise CannotReach(f"random choice cannot reach {most:,.0f}: the cheapest variants cost {spent:,.0f}")
        variant, spent = random.choice(cheaper)
        choice[variant.number] = variant
    for each in random.sample(list(found), len(found)):
        variant, more = max(((v, with_(v)) for v in each), key=lambda pair: (pair[1] <= most, min(pair[1], most)))
        if spent < more <= most:
            choice[variant.number], spent = variant, more
    if not any(variant.block for variant in choice):
        raise CannotReach(f"random choice cannot reach {most:,.0f}: nothing would be left")
    return choice
