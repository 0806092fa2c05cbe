"""Rows of one length from Megatron's datasets of two sequence lengths over a blend (`data/packs/mixed_lengths.py`)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.datasets.utils import Split
from torch import Tensor
from torch.utils.data import Dataset

from nemo_ext.data.packs.mixed_lengths import MixedLengths, Reading, RowSchedule, sequences_of
from nemo_ext.megatron.packed import BOUNDS

SEQUENCE = ("tokens", "labels", "loss_mask", "position_ids")


class MixedRows(Dataset):
    """Dataset of rows with one sequence of the long dataset, or `per_row` of the short one, of the same split.

    A row has `tokens`, `labels`, `loss_mask`, `position_ids` `[seq]` and `cu_seqlens`, like a pack. Row n depends only
    on n, so a run resumes on the same row.
    """

    def __init__(self, long: Dataset, short: Dataset, *, schedule: RowSchedule, rows: int, per_row: int) -> None:
        self.long, self.short = long, short
        self.schedule, self.rows, self.per_row = schedule, rows, per_row
        self.split: Split = getattr(long, "split", None) or long.index_split  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        row = int(row)
        if not 0 <= row < self.rows:
            raise IndexError(row)
        before = self.schedule.short_before(row)
        if self.schedule.is_short(row):
            parts = [self.short[before * self.per_row + number] for number in range(self.per_row)]
        else:
            parts = [self.long[row - before]]
        return joined(parts)


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenates sequences of Megatron's GPTDataset, with the bounds between and inside them."""
    bounds = [torch.zeros(1, dtype=torch.int32)]
    end = 0
    for part in parts:
        length = len(part["tokens"])
        inside = torch.unique_consecutive(part[BOUNDS]) if BOUNDS in part else torch.tensor([0, length])
        bounds.append(inside[1:].to(torch.int32) + end)
        end += length
    row = {name: torch.cat([part[name] for part in parts]) for name in SEQUENCE}
    return {**row, BOUNDS: torch.cat(bounds)}


def mixed_rows(
    settings: MixedLengths,
    samples: Sequence[int],
    *,
    seq_length: int,
    build: Callable[[Sequence[int], Reading], Sequence[Any]],
) -> list[MixedRows | None]:
    """Build the mixed rows of each split, `samples` rows of `seq_length` tokens.

    `build` maps (sequences of each split, how they are read) to Megatron's datasets, None for a split without data.
    """
    schedule, per_row = settings.schedule, seq_length // settings.short
    counts = [sequences_of(rows, seq_length, settings) for rows in samples]
    long, short = (build([split[reading] for split in counts], reading) for reading in counts[0])
    return [
        None if a is None or b is None else MixedRows(a, b, schedule=schedule, rows=rows, per_row=per_row)
        for a, b, rows in zip(long, short, samples, strict=True)
    ]
