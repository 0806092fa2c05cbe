"""Language model loss of a parent with some blocks replaced, on validation data."""

from collections.abc import Sequence
from functools import partial
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.benchmark import Timer

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent, Replaced
from nemo_ext.puzzle.stages.measure import ROUNDS

SECONDS = 0.2
"""Least time of each model in a round."""


def loss(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> float:
    """Mean loss in nats per token, over all ranks.

    Args:
        parent: the model.
        batches: this rank's tokens `[batch, seq]`; the next token is the label.
        replaced: replacement layers, None for a block that is left out.
    """
    total = torch.zeros(2, dtype=torch.double)
    with torch.no_grad():
        for tokens in batches:
            logits, labels = parent.logits(tokens, replaced)[:, :-1], tokens[:, 1:]
            total[0] += cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").cpu()
            total[1] += labels.numel()
    summed = data_parallel.summed(total)
    return float(summed[0] / summed[1])


def forward_seconds(parent: Parent, other: Parent, tokens: Tensor) -> tuple[list[float], list[float]]:
    """Seconds per forward pass over tokens `[batch, seq]` of two models, one value each per round.

    They take turns, so that a slowdown of the machine affects both; the first pass of each is not counted.
    """
    runs = [partial(model.logits, tokens) for model in (parent, other)]
    timers = [Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()) for run in runs]
    with torch.no_grad():
        for run in runs:
            run()
        # As often on every rank, since ranks may run a model together.
        alone = [timer.timeit(1).mean for timer in timers]
        times = data_parallel.agreed(lambda: [ceil(SECONDS / seconds) for seconds in alone])
        rounds = [[timer.timeit(n).mean for timer, n in zip(timers, times, strict=True)] for _ in range(ROUNDS)]
    first, second = zip(*rounds, strict=True)
    return list(first), list(second)
