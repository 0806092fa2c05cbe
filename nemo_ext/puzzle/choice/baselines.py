"""What a search has to beat at the same cost: uniform width pruning, and dropping the blocks that score lowest."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from nemo_ext.architecture.blocks import Block
from nemo_ext.puzzle.variants import KEEP, NO_OP, Variant

WIDTHS = {"M": "heads", "*": "kv", "E": "ffn", "-": "ffn"}
"""What is narrowed of each kind of block."""

SHARES = 1000
"""Steps in which the uniform share is looked for."""


class CannotReach(ValueError):
    """A way of pruning that has nothing left to take away before the cost is kept to."""


def uniform(blocks: Sequence[Block], cost: Callable[[Sequence[Block | None]], float], most: float) -> list[Variant]:
    """Every block narrowed to one share of its width, the largest that keeps to a cost.

    FFNs, experts, Mamba-2 heads (the nearest multiple of their groups) and KV heads (the nearest divisor of the
    parent's, which can be pooled); what those steps leave over goes to FFNs and experts. Linear-replaced blocks stay.

    Args:
        blocks: of the parent, with all values.
        cost: of a sequence of blocks, None for one left out; never falls with the share.
        most: that it may be.

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
    """Blocks left out one after the other, the one whose absence scores lowest first, until a cost is kept to.

    Blocks that cost nothing of what is counted stay.

    Args:
        found: of `variants`, each with a no-op.
        score: of a variant; lower is better.
        cost: of a sequence of blocks.
        most: that it may be.

    Raises:
        CannotReach: the cost is not kept to when all may have gone, or nothing is left.
    """
    choice = [each[0] for each in found]
    spent = cost([each.block for each in choice])
    no_ops = [variant for each in found for variant in each if variant.name == NO_OP]
    for variant in sorted(no_ops, key=score):
        if spent <= most:
            break
        without = [*choice[: variant.number], variant, *choice[variant.number + 1 :]]
        if (less := cost([each.block for each in without])) < spent:
            choice, spent = without, less
    if spent > most or not any(variant.block for variant in choice):
        raise CannotReach(f"dropping blocks cannot reach {most:,.0f}: nothing would be left")
    return choice
