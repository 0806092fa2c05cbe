"""Rows of one length, made from Megatron datasets with two sequence lengths (see `data/packs/mixed_lengths.py`)."""

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
    """Dataset whose rows hold one sequence from the dataset `long`, or `per_row` sequences from `short`.

    `schedule` determines which of the `rows` rows are short. Like a pack, a row has `tokens`, `labels`, `loss_mask` and
    `position_ids`, all `[seq]`, and `cu_seqlens`. Row n depends only on n, so a resumed run continues with the same
    rows.
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
            raise IndexError(f"row {row} is not in this dataset; expected a row from 0 to {self.rows - 1}")
        before = self.schedule.short_before(row)
        if self.schedule.is_short(row):
            parts = [self.short[before * self.per_row + number] for number in range(self.per_row)]
        else:
            parts = [self.long[row - before]]
        return joined(parts)


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate samples of Megatron's GPTDataset into a row; `cu_seqlens` also has the samples' own bounds."""
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
    """Build a dataset of mixed rows for each split; None for a split without data.

    Args:
        settings: the two lengths and the schedule of the rows.
        samples: number of rows of each split.
        seq_length: tokens per row.
        build: function that builds Megatron's dataset for each split, called with the splits' numbers of sequences and
            with their length and part of the documents.
    """
    schedule, per_row = settings.schedule, seq_length // settings.short
    counts = [sequences_of(rows, seq_length, settings) for rows in samples]
    long, short = (build([split[reading] for split in counts], reading) for reading in counts[0])
    return [
        None if a is None or b is None else MixedRows(a, b, schedule=schedule, rows=rows, per_row=per_row)
        for a, b, rows in zip(long, short, samples, strict=True)
    ]
