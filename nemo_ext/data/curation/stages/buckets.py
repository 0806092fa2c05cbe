"""Quality buckets of documents, each with a repetition rate: the quality-aware up-sampling of Dolma 3."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Barrier, Features, Mark, Values, Verdicts
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.documents import document_digest
from nemo_ext.data.text.user_files import value_at
from nemo_ext.job.settings import STRICT, Share

BUCKET = "bucket"
"""Document key for the bucket number; bucket 0 is the worst."""
_POWERS = np.linspace(2.0, 0.01, 20)
_STEEPEST = 64.0
_POINTS = 512
_BYTES_A_DOCUMENT = 120
"""Memory in bytes per document while a part is decided."""
_SAMPLE = 256
"""Number of sampled documents per part, from which the bounds of the parts are estimated."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Buckets(Barrier):
    """Assigns documents by score to buckets of equal size in bytes, each with a repetition rate.

    A bucket's rate is C (x - a)^p e^(l (x - a)), where x is the share of worse data; below x = a it is 0
    (allenai/dolma3, mixes/6T-1025). p is the largest for which the mean rate is `rate` and no rate exceeds `most`.

    Attributes:
        key: document key that holds the score, such as a classifier's.
        buckets: number of buckets.
        within: document key for groups, such as topics, that are divided into buckets separately; null for a single
            group.
        rate: mean rate, i.e. desired bytes divided by available bytes; null for a rate of 1 everywhere.
        most: maximum rate of a bucket.
        throwaway: share of the worst data, whose rate is 0; a in the formula.
    """

    kind: ClassVar[str] = "buckets"
    verdict_of_values: ClassVar[bool] = False
    key: str = "quality"
    buckets: Annotated[int, Field(ge=2, le=255)] = 20
    within: str | None = None
    rate: Annotated[float, Field(gt=0)] | None = None
    most: Annotated[float, Field(gt=0)] = 7.0
    throwaway: Annotated[Share, Field(lt=1)] = 0.4

    def check(self) -> None:
        _ = self.rates

    @cached_property
    def rates(self) -> list[float]:
        """Rate of each bucket, from the worst to the best.

        Raises:
            ValueError: no curve has this mean and maximum rate.
        """
        if self.rate is None:
            return [1.0] * self.buckets
        x = (np.arange(self.buckets * _POINTS) + 0.5) / (self.buckets * _POINTS) - self.throwaway
        for power in _POWERS:
            low, high = 0.0, _STEEPEST
            if self._curve(x, power, low)[-1] > self.most:
                continue
            for _ in range(50):  # bisection for the steepest curve that stays below the maximum rate
                steep = (low + high) / 2
                low, high = (steep, high) if self._curve(x, power, steep)[-1] <= self.most else (low, steep)
            return [float(rate) for rate in self._curve(x, power, low)]
        least = self.rate / (1 - self.throwaway)
        raise ValueError(
            f"most={self.most:g} is too low for rate={self.rate:g} and throwaway={self.throwaway:g}, which require at "
            f"least {least:.2f}: raise most"
        )

    def _curve(self, x: npt.NDArray[np.float64], power: float, steep: float) -> npt.NDArray[np.float64]:
        above = np.maximum(x, 0)
        curve = np.where(x > 0, above**power * np.exp(steep * (above - above[-1])), 0.0)
        scaled: npt.NDArray[np.float64] = curve * float(self.rate or 1) / curve.mean()
        return scaled.reshape(self.buckets, _POINTS).mean(axis=1)

    def features(self, document: Document) -> Values:
        score = value_at(document.metadata, self.key)
        try:
            is_valid = not isinstance(score, bool) and isinstance(score, int | float) and math.isfinite(score)
        except OverflowError:
            is_valid = False
        if not is_valid:
            raise ValueError(
                f"buckets: document {document.id} has {self.key}={score!r}, but a number is required: before "
                f"this stage, add a stage that stores a score under {self.key!r}"
            )
        group = "" if self.within is None else str(value_at(document.metadata, self.within))
        digest = int.from_bytes(document_digest(group.encode(errors="replace"))[:8])
        values = np.array([0, len(document.text.encode()), digest], dtype=np.uint64)
        values[0] = np.array(float(score)).view(np.uint64)
        return values

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        totals, documents = _totals(units)
        parts = max(1, -(-documents * _BYTES_A_DOCUMENT // memory))
        ends = [*_ends(units, documents, parts), None]
        before: dict[int, float] = {}  # by group, bytes with lower scores than this part
        start: tuple[int, ...] | None = None
        for end in ends:
            chosen = (_between(rows, start, end) for rows in _rows(units))
            rows = np.concatenate([np.empty((0, 4), np.uint64), *chosen])
            order = np.lexsort((rows[:, 3], rows[:, 1], rows[:, 0]))  # by group, score and place in the input
            buckets = np.empty(len(rows), np.uint8)
            for here in np.split(order, np.flatnonzero(np.diff(rows[order, 0])) + 1 if len(rows) else []):
                if len(here):
                    group, sizes = int(rows[here[0], 0]), rows[here, 2].astype(np.float64)
                    middle = before.get(group, 0.0) + np.cumsum(sizes) - sizes / 2
                    before[group] = before.get(group, 0.0) + float(sizes.sum())
                    share = middle / totals[group]
                    buckets[here] = np.minimum(share * self.buckets, self.buckets - 1).astype(np.uint8)
            first = np.cumsum([0, *(unit.documents for unit in units)])
            numbers = np.searchsorted(first, rows[:, 3], side="right") - 1
            for number in np.unique(numbers):
                here = np.flatnonzero(numbers == number)
                mark(int(number), rows[here, 3].astype(np.int64) - first[number], buckets[here])
            start = end

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        bucket = int(verdicts[0])
        document.metadata[BUCKET] = bucket
        if self.rates[bucket] > 0:
            return None
        return Drop("worst", f"{self.key} {value_at(document.metadata, self.key)}, bucket {bucket}")


def _rows(units: Sequence[Features]) -> Iterator[Values]:
    """Yield [documents, 4] blocks: group, score as an integer of the same order, bytes, and index in the input."""
    first = 0
    for unit in units:
        for block in unit.blocks(3):
            bits = (block[:, 0].view(np.float64) + 0.0).view(np.uint64)  # turns -0.0 into 0.0
            key = np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))
            places = np.arange(first, first + len(block), dtype=np.uint64)
            first += len(block)
            yield np.stack([block[:, 2], key, block[:, 1], places], axis=1)


def _totals(units: Sequence[Features]) -> tuple[dict[int, float], int]:
    """Return the bytes keyed by group, and the total number of documents."""
    totals, documents = dict[int, float](), 0
    for rows in _rows(units):
        groups, inverse = np.unique(rows[:, 0], return_inverse=True)
        for group, size in zip(groups.tolist(), np.bincount(inverse, weights=rows[:, 2].astype(float)), strict=True):
            totals[group] = totals.get(group, 0.0) + float(size)
        documents += len(rows)
    return totals, documents


def _ends(units: Sequence[Features], documents: int, parts: int) -> list[tuple[int, ...]]:
    """Return `parts` - 1 bounds (group, score, index) between parts of roughly equal size, estimated from a sample."""
    if parts == 1:
        return []
    step = max(1, documents // (_SAMPLE * parts))
    sample = np.concatenate([rows[rows[:, 3] % np.uint64(step) == 0][:, [0, 1, 3]] for rows in _rows(units)])
    sample = sample[np.lexsort((sample[:, 2], sample[:, 1], sample[:, 0]))]
    return [tuple(map(int, sample[len(sample) * part // parts])) for part in range(1, parts)]


def _between(rows: Values, start: tuple[int, ...] | None, end: tuple[int, ...] | None) -> Values:
    """Return the rows whose (group, score, index) is at least `start` and less than `end`; None for no bound."""
    inside = np.ones(len(rows), bool)
    if start is not None:
        inside &= ~_below(rows, start)
    if end is not None:
        inside &= _below(rows, end)
    return rows[inside]


def _below(rows: Values, end: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    group, score, place = map(np.uint64, end)
    same = rows[:, 0] == group
    below: npt.NDArray[np.bool_] = (rows[:, 0] < group) | (
        same & ((rows[:, 1] < score) | ((rows[:, 1] == score) & (rows[:, 3] < place)))
    )
    return below
