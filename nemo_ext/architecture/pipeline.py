"""Cuts of a block sequence into pipeline stages of nearly equal cost.

Blocks differ in cost (Puzzle's most of all), and the embedding and the output layer add to the ends, so stages
with equal numbers of blocks are not balanced. `balance` minimizes the cost of the most costly stage over all
contiguous cuts, exactly, by dynamic programming. Among the optimal cuts it returns the most even one (minimum sum
of squared stage costs).

With several virtual stages, a rank runs stages rank, rank + PP, ... In this case, cuts are then moved one block at a
time, without exceeding the optimal stage cost, as long as that lowers the cost of the most costly rank. This is a local
search, so the resulting rank cost need not be optimal.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

from nemo_ext.architecture import cost as costs
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.widths import layers


@dataclass(frozen=True)
class BlockCosts:
    """Costs of a model's parts, all in the same unit (FLOPs, bytes or measured milliseconds).

    Attributes:
        blocks: Non-negative cost of each block.
        embedding: Cost of the embedding, added to the first stage.
        head: Cost of the output layer and the loss, added to the last stage.
    """

    blocks: tuple[float, ...]
    embedding: float = 0
    head: float = 0

    def __post_init__(self) -> None:
        if min((*self.blocks, self.embedding, self.head)) < 0:
            raise ValueError(
                f"pipeline costs must not be negative, got blocks={self.blocks}, embedding={self.embedding} and "
                f"head={self.head}"
            )

    def of_stages(self, cuts: tuple[int, ...]) -> tuple[float, ...]:
        """Compute the cost of each stage; a cut is the 0-based index of the first block of a stage after the first."""
        sums = [0.0, *accumulate(self.blocks)]
        edges = (0, *cuts, len(self.blocks))
        stages = [sums[last] - sums[first] for first, last in pairwise(edges)]
        stages[0] += self.embedding
        stages[-1] += self.head
        return tuple(stages)


def forward_flops(architecture: Architecture) -> BlockCosts:
    """Compute forward FLOPs per token at the model's sequence length (the embedding look-up is free)."""
    blocks = tuple(costs.block_forward_flops_per_token(architecture, n) for n in layers(architecture))
    head = costs.head_forward_flops_per_token(architecture) + costs.mtp_forward_flops_per_token(architecture)
    return BlockCosts(blocks, head=head)


def parameter_counts(architecture: Architecture) -> BlockCosts:
    """Count parameters, for pipelines limited by memory rather than time; a tied output layer counts as a copy."""
    blocks = tuple(float(costs.block_parameters(architecture, n).total) for n in layers(architecture))
    embedding = costs.embedding_parameters(architecture)
    head = costs.head_parameters(architecture).total + costs.mtp_parameters(architecture).total
    return BlockCosts(blocks, embedding.total, head + (embedding.sharded if architecture.tied_embeddings else 0))


def balance(
    architecture: Architecture,
    *,
    pipeline_parallel: int,
    virtual_stages: int = 1,
    cost: BlockCosts | Callable[[Architecture], BlockCosts] = forward_flops,
) -> Pattern:
    """Cut the model into pipeline_parallel x virtual_stages stages, minimizing the cost of the most costly stage.

    Args:
        architecture: The model; existing cuts are replaced.
        pipeline_parallel: Number of pipeline ranks.
        virtual_stages: Number of model chunks on each rank; stage s is on rank s % pipeline_parallel, as in Megatron.
        cost: Costs to balance: `forward_flops`, `parameter_counts`, or measured `BlockCosts`.

    Returns:
        The pattern with its cuts; every stage has at least one block.

    Raises:
        ValueError: There are fewer blocks than stages, or the number of costs is not the number of blocks.
    """
    if min(pipeline_parallel, virtual_stages) < 1:
        raise ValueError(f"expected at least one pipeline stage, got PP {pipeline_parallel} x {virtual_stages} virtual")
    stages, blocks = pipeline_parallel * virtual_stages, len(architecture.pattern.blocks)
    if blocks < stages:
        raise ValueError(
            f"{blocks} blocks cannot fill {stages} pipeline stages (PP {pipeline_parallel} x {virtual_stages} "
            "virtual): lower the number of stages"
        )
    known = cost(architecture) if callable(cost) else cost
    if len(known.blocks) != blocks:
        raise ValueError(f"cost has {len(known.blocks)} blocks, but the pattern has {blocks}: pass one cost per block")
    cuts = even_cuts(known, stages)
    if virtual_stages > 1:
        cuts = _level_ranks(known, cuts, pipeline_parallel)
    return replace(architecture.pattern, cuts=cuts)


def even_cuts(known: BlockCosts, stages: int) -> tuple[int, ...]:
    """Return the best cuts into `stages` stages: those with the smallest maximum cost and, of these, the most even.

    Each cut is the 0-based index of a stage's first block; `known` holds the costs of the blocks.
    """
    return _most_even(known, stages, _smallest_maximum(known, stages))


def rank_costs(stage_costs: tuple[float, ...], pipeline_parallel: int) -> tuple[float, ...]:
    """Compute the cost of each pipeline rank, which is the sum of its stages' costs."""
    return tuple(sum(stage_costs[rank::pipeline_parallel]) for rank in range(pipeline_parallel))


def idle_share(stage_costs: Sequence[float], layout: Layout) -> float | None:
    """Compute the share of a step in which ranks are idle, by simulating Megatron's 1F1B schedule, interleaved or not.

    A micro-batch has 2 x stages tasks in a row: forward through all stages, then backward, which takes twice as long.
    A task starts when its rank is free and the previous task has ended; sending takes no time. With equal stages, the
    share is (PP - 1) / (virtual stages x micro-batches + PP - 1) (arXiv 2104.04473, section 2.2).

    Args:
        stage_costs: Cost of each stage's forward pass for a micro-batch.
        layout: Layout with PP, virtual stages and micro-batches.

    Returns:
        Share from 0 to 1; None without `micro_batches`, or if an interleaved schedule's micro-batches are not a
        multiple of PP.
    """
    ranks, batches = layout.pipeline_parallel, layout.micro_batches
    if batches is None or (layout.virtual_stages > 1 and batches % ranks):
        return None
    lengths = [*stage_costs, *(2 * cost for cost in reversed(stage_costs))]
    ended = {(-1, batch): 0.0 for batch in range(batches)}
    free, orders = [0.0] * ranks, [_order(layout, batches, rank) for rank in range(ranks)]
    while any(orders):
        for rank, order in enumerate(orders):
            while order and (before := (order[0][0] - 1, order[0][1])) in ended:
                task, batch = order.popleft()
                free[rank] = ended[task, batch] = max(free[rank], ended[before]) + lengths[task]
    return 1 - batches * sum(lengths) / (ranks * max(free))


def _order(layout: Layout, batches: int, rank: int) -> deque[tuple[int, int]]:
    """Return the order in which Megatron's schedule runs the tasks of a pipeline rank.

    Args:
        layout: layout with PP and virtual stages.
        batches: number of micro-batches.
        rank: pipeline rank.

    Returns:
        Pairs of task and micro-batch, both from 0. Tasks 0 to stages - 1 are the forward passes of the stages; the
        tasks after them are the backward passes, from the last stage to the first.
    """
    ranks, chunks = layout.pipeline_parallel, layout.virtual_stages
    table = [
        (chunk * ranks, batch)
        for first in range(0, batches, ranks)
        for chunk in range(chunks)
        for batch in range(first, min(first + ranks, batches))
    ]
    forward = [(first + rank, batch) for first, batch in table]
    backward = [((chunks + 1) * ranks - 1 - rank + first, batch) for first, batch in table]
    after = ranks - 1 - rank
    warm_up = min(after if chunks == 1 else 2 * after + (chunks - 1) * ranks, len(table))
    pairs = chain.from_iterable(zip(forward[warm_up:], backward, strict=False))
    return deque([*forward[:warm_up], *pairs, *backward[len(table) - warm_up :]])


def _ends(known: BlockCosts) -> list[float]:
    """Return the cumulative costs: item i is the cost of the embedding and the first i blocks; item 0 is 0.

    The last item includes the head.
    """
    sums = [0.0, *(known.embedding + total for total in accumulate(known.blocks))]
    sums[-1] += known.head
    return sums


def _smallest_maximum(known: BlockCosts, stages: int) -> float:
    """Return the lowest possible cost of the most costly stage, in O(stages x blocks x log blocks).

    Dynamic programming over the stages, for every number of leading blocks. The later the last stage starts, the
    cheaper it is and the more costly are the stages before it, so bisection finds the best start.
    """
    sums, blocks = _ends(known), len(known.blocks)
    best = list(sums)
    for stage in range(2, stages + 1):
        previous, best = best, [float("inf")] * (blocks + 1)
        for end in range(stage, blocks + 1):
            low, high = stage - 1, end - 1
            while low < high:
                middle = (low + high) // 2
                if previous[middle] < sums[end] - sums[middle]:
                    low = middle + 1
                else:
                    high = middle
            tried = range(max(stage - 1, low - 1), low + 1)
            best[end] = min(max(previous[i], sums[end] - sums[i]) for i in tried)
    return best[blocks]


def _most_even(known: BlockCosts, stages: int, limit: float) -> tuple[int, ...]:
    """Of the cuts into stages that cost at most `limit` each, return those with the smallest sum of squared costs.

    Each cut is the 0-based index of a stage's first block.
    """
    sums, blocks = _ends(known), len(known.blocks)
    best = [float("inf")] * (blocks + 1)
    best[0] = 0.0
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        previous, best, chosen = best, [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage, blocks + 1):
            for start in range(end - 1, stage - 2, -1):
                size = sums[end] - sums[start]
                if size > limit:
                    break
                if previous[start] + size * size < best[end]:
                    best[end], chosen[end] = previous[start] + size * size, start
        starts.append(chosen)
    assert best[blocks] < float("inf"), "some cut attains the limit"
    cuts, end = [], blocks
    for chosen in reversed(starts[1:]):
        end = chosen[end]
        cuts.append(end)
    return tuple(reversed(cuts))


def _level_ranks(known: BlockCosts, cuts: tuple[int, ...], pipeline_parallel: int) -> tuple[int, ...]:
    def judged(candidate: tuple[int, ...]) -> tuple[float, float]:
        stages = known.of_stages(candidate)
        return max(rank_costs(stages, pipeline_parallel)), sum(stage * stage for stage in stages)

    limit, score = max(known.of_stages(cuts)), judged(cuts)
    while True:
        moves = [(*cuts[:i], cuts[i] + step, *cuts[i + 1 :]) for i in range(len(cuts)) for step in (-1, 1)]
        filled = [
            move for move in moves if all(first < last for first, last in pairwise((0, *move, len(known.blocks))))
        ]
        allowed = [move for move in filled if max(known.of_stages(move)) <= limit]
        best = min(allowed, key=judged, default=cuts)
        if judged(best) >= score:
            return cuts
        cuts, score = best, judged(best)
