"""Language model loss and speed of a parent with some blocks replaced, on validation data."""

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from time import perf_counter

import torch
from torch import Tensor

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent, Replaced
from nemo_ext.puzzle.stages.measure import ROUNDS
from nemo_ext.puzzle.stages.score import token_log_probabilities

SECONDS = 0.2
"""Minimum time per model and round."""


def losses(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> list[float]:
    """Compute the mean loss of every sequence of all ranks in nats per token, in the same order for every model.

    Args:
        batches: this rank's tokens `[batch, seq]`; the next token is the label.
        replaced: mapping from 0-based block numbers to replacement layers, or None for a removed block.
    """
    all_losses: list[float] = data_parallel.joined(losses_of_rank(parent, batches, replaced)).tolist()
    return all_losses


def losses_of_rank(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> Tensor:
    """Compute the mean losses of this rank's sequences only, `[sequences]`; arguments as in `losses`."""
    with torch.no_grad():
        parts = [
            -token_log_probabilities(parent.logits(tokens, replaced)[:, :-1], tokens[:, 1:]).mean(1).cpu()
            for tokens in batches
        ]
    return torch.cat(parts)


def loss(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> float:
    """Compute the mean loss in nats per token over all ranks; arguments as in `losses`."""
    return fmean(losses(parent, batches, replaced))


def forward_seconds(models: Sequence[Parent], tokens: Tensor) -> list[list[float]]:
    """Measure the forward passes of models over tokens `[batch, seq]`; return each model's seconds by round.

    The models alternate, so that a slowdown of the machine affects all; the first pass of each is not counted.
    """
    with torch.no_grad():
        for model in models:
            _pass_seconds(model, tokens, 1)
        # Equally often on every rank, as ranks may share a model.
        alone = [_pass_seconds(model, tokens, 1) for model in models]
        times = data_parallel.agreed(lambda: [ceil(SECONDS / seconds) for seconds in alone])
        rounds = [alone] if max(times) == 1 else []  # single passes that are long enough for a round
        while len(rounds) < ROUNDS:
            rounds.append([_pass_seconds(model, tokens, n) for model, n in zip(models, times, strict=True)])
    return [list(seconds) for seconds in zip(*rounds, strict=True)]


def _pass_seconds(model: Parent, tokens: Tensor, times: int) -> float:
    """Return the mean seconds of a forward pass over `times` passes, which torch's Timer would run two more for."""
    begin = _now(tokens)
    for _ in range(times):
        model.logits(tokens)
    return (_now(tokens) - begin) / times


def _now(tokens: Tensor) -> float:
    """Return the time in seconds once the tensor's device has finished its work."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return perf_counter()
