"""Rows of one length, some of one long sequence and the others of many short ones, at a given token ratio.

Nemotron 3 Nano's long-context phase mixes sequences of 512 k and 4 k tokens (paper section 2.5). Every row has the same
number of tokens, so the share of rows is the share of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.job.settings import STRICT, Share, checked

Documents = tuple[float, float]
"""Part of a stream's documents: start and end, as shares of its tokens in a shuffled order."""

ALL: Documents = (0.0, 1.0)


@dataclass(frozen=True)
class Reading:
    """A way to read streams: two readings of the same documents at the same length have the same order.

    Attributes:
        length: length of the sequences, in tokens.
        documents: part of every stream that the sequences come from.
    """

    length: int
    documents: Documents = ALL


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class MixedLengths:
    """Settings `data.mixed_lengths` of a training config.

    Long and short sequences come from different documents: short ones from `short_share` of every stream's tokens.

    Attributes:
        short: length of the short sequences; divides the row's length (`megatron.seq_length`).
        short_share: share of the tokens that is in short sequences.
        rows_together: number of consecutive rows of one kind. With the data-parallel size here, ranks that work at the
            same time have the same work.
        document_boundaries: True if attention and Mamba also stop at the end of a document.
    """

    short: PositiveInt
    short_share: Share
    rows_together: PositiveInt = 1
    document_boundaries: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "MixedLengths | None":
        """Read the settings of a training config, checked against its sequence length and layout; None without them.

        Raises:
            ValueError: an unknown or missing key, or a value that does not fit.
        """
        given = (config.get("data") or {}).get("mixed_lengths")
        if given is None:
            return None
        where = "data.mixed_lengths"
        settings = checked(cls, given, where=where, strict=True)
        megatron = config["megatron"]
        length = int(megatron["seq_length"])
        if length % settings.short or settings.short == length:
            raise ValueError(
                f"{where}.short={settings.short} must divide megatron.seq_length={length} into several sequences"
            )
        if int(megatron.get("micro_batch_size") or 1) != 1:
            raise ValueError(f"{where}: set megatron.micro_batch_size=1, a row is a micro-batch")
        parts = 2 * int(megatron.get("context_parallel_size") or 1)
        if parts > 2 and settings.document_boundaries:
            raise ValueError(
                f"{where}.document_boundaries with context_parallel_size={parts // 2}: documents are not multiples of "
                f"{parts} tokens; set it to false"
            )
        if parts > 2 and settings.short % parts:
            raise ValueError(f"{where}.short={settings.short} must be a multiple of 2 x context_parallel_size={parts}")
        return settings

    @property
    def schedule(self) -> "RowSchedule":
        """Schedule of the short rows."""
        # The decimal digits as written: 0.1 is a tenth.
        return RowSchedule(share=Fraction(repr(self.short_share)), together=self.rows_together)


def sequences_of(rows: int, seq_length: int, mixed: MixedLengths | None) -> dict[Reading, int]:
    """Number of sequences per reading in `rows` rows of `seq_length` tokens; with `mixed`, the long, then the short."""
    if mixed is None:
        return {Reading(seq_length): rows}
    short, share = mixed.schedule.short_before(rows), mixed.short_share
    return {
        Reading(seq_length, (share, 1.0)): rows - short,
        Reading(mixed.short, (0.0, share)): short * (seq_length // mixed.short),
    }


@dataclass(frozen=True)
class RowSchedule:
    """Schedule of the rows that hold short sequences: spread as evenly as possible, from the row's number alone.

    Any stretch of n groups of rows has `share` x n short ones, within one group.

    Attributes:
        share: share of the rows that are short.
        together: number of rows in a group; all of a group are of one kind.
    """

    share: Fraction
    together: int = 1

    def is_short(self, row: int) -> bool:
        """True if this row holds short sequences."""
        group = row // self.together
        return self._groups_before(group + 1) > self._groups_before(group)

    def short_before(self, row: int) -> int:
        """Number of the rows before this one that hold short sequences."""
        group, inside = divmod(row, self.together)
        return self._groups_before(group) * self.together + (inside if self.is_short(row) else 0)

    def _groups_before(self, group: int) -> int:
        return group * self.share.numerator // self.share.denominator
