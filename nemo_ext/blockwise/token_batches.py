"""Reproducible token batches from a config's data blend, for calibration, distillation and evaluation."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_ext.blockwise import data_parallel


class TokenBatches:
    """Batches of sequences from one split of a config's blend.

    Args:
        config: training config with data arguments (`nemo_ext.data.training.with_data`).
        split: name of the split, `train` or `valid`.
        sequences: number of sequences; a smaller data set is repeated.
    """

    def __init__(
        self, config: Mapping[str, Any], split: Literal["train", "valid"], sequences: int, device: torch.device
    ) -> None:
        from nemo_ext.megatron.arguments import command_line, parse_arguments
        from nemo_ext.megatron.forward_step import build_datasets

        arguments = parse_arguments(command_line(config), world_size=data_parallel.count())
        samples = {"train": [sequences, 0, 0], "valid": [0, sequences, 0]}[split]
        train, valid, _ = build_datasets(arguments, samples)
        self.dataset = train if split == "train" else valid
        self.sequences, self.device = sequences, device

    def batch(self, first: int, size: int) -> Tensor:
        """Return tokens `[size, seq]` from sequence `first` on, starting over at the end of the data."""
        rows = [torch.as_tensor(self.dataset[(first + n) % len(self.dataset)]["tokens"]) for n in range(size)]
        return torch.stack(rows).long().to(self.device)

    def batches(self, size: int) -> list[Tensor]:
        """Return this rank's share of all batches of `size` sequences; the last batch overall may be smaller.

        Raises:
            ValueError: there are fewer batches than ranks.
        """
        starts = range(0, self.sequences, size)
        if len(starts) < data_parallel.count():
            raise ValueError(
                f"{self.sequences} sequences in batches of {size} are too few for {data_parallel.count()} ranks: raise "
                "the number of sequences, or use fewer ranks"
            )
        return [self.batch(first, min(size, self.sequences - first)) for first in data_parallel.share(starts)]

    def stream(self, step: int, size: int) -> Iterator[Tensor]:
        """Yield this rank's rows of consecutive batches of `size` sequences, starting with the batch of step `step`.

        Raises:
            ValueError: `size` is not a multiple of the number of ranks.
        """
        ranks = data_parallel.count()
        if size % ranks:
            raise ValueError(
                f"batches of {size} sequences cannot be split evenly over {ranks} ranks: set the batch size to a "
                f"multiple of {ranks}"
            )
        rows = size // ranks
        while True:
            yield self.batch(step * size + data_parallel.number() * rows, rows)
            step += 1
