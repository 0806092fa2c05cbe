"""Rows of equal length that hold either one long sequence or several short ones, in a given ratio.

Nemotron 3 Nano's long-context phase mixes sequences of 512 k and 4 k tokens (paper section 2.5). Every row has the same
number of tokens, so the share of rows equals the share of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.job.settings import STRICT, Share, checked

Documents = tuple[float, float]
"""Part of a stream's documents: start and end, as fractions of its tokens in a shuffled order."""

ALL: Documents = (0.0, 1.0)


@dataclass(frozen=True)
class Reading:
    """How streams are read: sequence length, and part of the documents. Equal readings of a stream have the same order.

    Attributes:
        length: sequence length, in tokens.
        documents: part of every stream that is read, as (start, end) fractions of its tokens.
    """

    length: int
    documents: Documents = ALL


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class MixedLengths:
    """The `data.mixed_lengths` settings of a training config.

    Short sequences are read from the documents that hold the first `short_share` of every stream's tokens, long ones
    from the other documents.

    Attributes:
        short: length of the short sequences; must divide the row length (`megatron.seq_length`).
        short_share: share of the tokens in short sequences.
        rows_together: number of consecutive rows of the same kind; set to the data-parallel size, so that all ranks
            have the same work at the same time.
        document_boundaries: True if attention and Mamba also stop at the end of a document.
    """

    short: PositiveInt
    short_share: Share
    rows_together: PositiveInt = 1
    document_boundaries: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "MixedLengths | None":
        """Read the settings from a training config; return None if it has none.

        They are validated against the config's sequence length, micro-batch size and context parallelism.

        Raises:
            ValueError: a key is unknown or missing, or a value is invalid.
        """
        section = (config.get("data") or {}).get("mixed_lengths")
        if section is None:
            return None
        where = "data.mixed_lengths"
        settings = checked(cls, section, where=where, strict=True)
        megatron = config["megatron"]
        length = int(megatron["seq_length"])
        if length % settings.short or settings.short == length:
            raise ValueError(
                f"{where}.short={settings.short} must be smaller than megatron.seq_length={length} and divide it"
            )
        if int(megatron.get("micro_batch_size") or 1) != 1:
            raise ValueError(
                f"{where} requires megatron.micro_batch_size=1, not {megatron['micro_batch_size']}, since a row is a "
                "micro-batch"
            )
        parts = 2 * int(megatron.get("context_parallel_size") or 1)
        if parts > 2 and settings.document_boundaries:
            raise ValueError(
                f"{where}.document_boundaries cannot be combined with context_parallel_size={parts // 2}, since the "
                f"lengths of documents are not multiples of {parts}: set it to false"
            )
        if parts > 2 and settings.short % parts:
            raise ValueError(
                f"{where}.short={settings.short} must be a multiple of {parts} (2 x context_parallel_size)"
            )
        return settings

    @property
    def schedule(self) -> "RowSchedule":
        """Schedule that determines which rows are short."""
        # From the decimal digits, so that 0.1 is exactly 1/10.
        return RowSchedule(share=Fraction(repr(self.short_share)), together=self.rows_together)


def sequences_of(rows: int, seq_length: int, mixed: MixedLengths | None) -> dict[Reading, int]:
    """Return how many sequences the given number of rows contains, keyed by `Reading`.

    With `mixed`, there are two readings, long sequences first; otherwise one, of length `seq_length`.
    """
    if mixed is None:
        return {Reading(seq_length): rows}
    short, share = mixed.schedule.short_before(rows), mixed.short_share
    return {
        Reading(seq_length, (share, 1.0)): rows - short,
        Reading(mixed.short, (0.0, share)): short * (seq_length // mixed.short),
    }


@dataclass(frozen=True)
class RowSchedule:
    """Determines from a row's number whether it has short sequences, spreading such rows as evenly as possible.

    Among any n consecutive groups of rows, `share` x n have short sequences, to within one group.

    Attributes:
        share: share of the rows with short sequences.
        together: number of rows in a group; all rows in a group are of the same kind.
    """

    share: Fraction
    together: int = 1

    def is_short(self, row: int) -> bool:
        """Return whether this row has short sequences."""
        group = row // self.together
        return self._groups_before(group + 1) > self._groups_before(group)

    def short_before(self, row: int) -> int:
        """Return the number of rows with short sequences before this row."""
        group, inside = divmod(row, self.together)
        return self._groups_before(group) * self.together + (inside if self.is_short(row) else 0)

    def _groups_before(self, group: int) -> int:
        return group * self.share.numerator // self.share.denominator
