"""The language model loss of a parent with some blocks replaced, on validation data."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent, Replaced
from nemo_ext.puzzle.stages.measure import median_seconds


def loss(parent: Parent, batches: Sequence[Tensor], replaced: Replaced | None = None) -> float:
    """Mean loss in nats a token, over all ranks.

    Args:
        parent: the model.
        batches: this rank's tokens `[batch, seq]`; the next token is the label.
        replaced: other layers, None for a block that is left out.
    """
    total = torch.zeros(2, dtype=torch.double)
    with torch.no_grad():
        for tokens in batches:
            logits, labels = parent.logits(tokens, replaced)[:, :-1], tokens[:, 1:]
            total[0] += cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum").cpu()
            total[1] += labels.numel()
    summed = data_parallel.summed(total)
    return float(summed[0] / summed[1])


def forward_seconds(parent: Parent, tokens: Tensor) -> tuple[float, float]:
    """Median time of one forward pass over tokens `[batch, seq]`, and its interquartile range."""

    def forward() -> Tensor:
        with torch.no_grad():
            return parent.logits(tokens)

    forward()
    return median_seconds(forward, min_seconds=1.0)
