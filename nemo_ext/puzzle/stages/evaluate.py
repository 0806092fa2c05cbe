"""Language model loss of a parent with some blocks replaced, on validation data."""

from collections.abc import Sequence
from functools import partial
from math import ceil
from statistics import fmean

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent, Replaced
from nemo_ext.puzzle.stages.measure import ROUNDS
from nemo_ext.puzzle.stages.score import token_log_probabilities

SECONDS = 0.2
"""Least time of each model in a round."""


def losses(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> list[float]:
    """Mean loss of every sequence in nats per token, of all ranks; in the same order for every model.

    Args:
        parent: the model.
        batches: this rank's tokens `[batch, seq]`; the next token is the label.
        replaced: replacement layers, None for a block that is left out.
    """
    joined: list[float] = data_parallel.joined(losses_of_rank(parent, batches, replaced)).tolist()
    return joined


def losses_of_rank(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> Tensor:
    """The same of this rank's sequences alone, `[sequences]`."""
    with torch.no_grad():
        found = [
            -token_log_probabilities(parent.logits(tokens, replaced)[:, :-1], tokens[:, 1:]).mean(1).cpu()
            for tokens in batches
        ]
    return torch.cat(found)


def loss(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> float:
    """Mean loss in nats per token, over all ranks; see `losses`."""
    return fmean(losses(parent, batches, replaced))


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
