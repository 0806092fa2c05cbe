"""Buckets of documents by quality, and how often each is repeated: the quality-aware up-sampling of Dolma 3."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
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
"""Key of a document that holds its bucket, from the worst, 0."""
_POWERS = np.linspace(2.0, 0.01, 20)
_STEEPEST = 64.0
_POINTS = 512


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Buckets(Barrier):
    """Buckets of equal size by a document's score, and a rate of repetition of each.

    The rate is 0 below a share of the data, and above it grows as C (x - a)^p e^(l (x - a)) with the share x of data
    that is worse (allenai/dolma3, mixes/6T-1025): p as large as lets the best bucket's stay below `most`, and the mean
    be `rate`.

    Attributes:
        key: key of the document's score, such as a classifier's.
        buckets: number of buckets.
        within: key of the groups that are divided each by itself, such as a topic; null for none.
        rate: bytes that are wanted, over bytes that there are; null to repeat nothing and drop nothing.
        most: largest rate of a bucket.
        throwaway: share of the worst data whose rate is 0.
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
        self.rates()

    def rates(self) -> list[float]:
        """Rate of each bucket, from the worst.

        Raises:
            ValueError: no curve has this mean and largest rate.
        """
        return _rates(self)

    def _rates(self) -> list[float]:
        if self.rate is None:
            return [1.0] * self.buckets
        x = (np.arange(self.buckets * _POINTS) + 0.5) / (self.buckets * _POINTS) - self.throwaway
        for power in _POWERS:
            low, high = 0.0, _STEEPEST
            if self._curve(x, power, low)[-1] > self.most:
                continue
            for _ in range(50):  # the steepest that stays below the largest rate
                steep = (low + high) / 2
                low, high = (steep, high) if self._curve(x, power, steep)[-1] <= self.most else (low, steep)
            return [float(rate) for rate in self._curve(x, power, low)]
        least = self.rate / (1 - self.throwaway)
        raise ValueError(
            f"buckets: most={self.most:g} is too little for rate={self.rate:g} of which throwaway={self.throwaway:g} "
            f"is left out: {least:.2f} if all else were alike; raise most"
        )

    def _curve(self, x: npt.NDArray[np.float64], power: float, steep: float) -> npt.NDArray[np.float64]:
        above = np.maximum(x, 0)
        curve = np.where(x > 0, above**power * np.exp(steep * (above - above[-1])), 0.0)
        scaled: npt.NDArray[np.float64] = curve * float(self.rate or 1) / curve.mean()
        return scaled.reshape(self.buckets, _POINTS).mean(axis=1)

    def noting(self) -> Callable[[Document], Values]:
        def note(document: Document) -> Values:
            score = value_at(document.metadata, self.key)
            try:
                sound = not isinstance(score, bool) and isinstance(score, int | float) and math.isfinite(score)
            except OverflowError:
                sound = False
            if not sound:
                raise ValueError(
                    f"buckets: {document.id}: {self.key!r} is {score!r}: a stage before must score documents"
                )
            group = "" if self.within is None else str(value_at(document.metadata, self.within))
            digest = int.from_bytes(document_digest(group.encode(errors="replace"))[:8])
            noted = np.array([0, len(document.text.encode()), digest], dtype=np.uint64)
            noted[0] = np.array(float(score)).view(np.uint64)
            return noted

        return note

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        rows = [np.empty((0, 3), np.uint64), *(block for unit in units for block in unit.blocks(3))]
        scores = np.concatenate([block[:, 0] for block in rows]).view(np.float64)
        sizes = np.concatenate([block[:, 1] for block in rows]).astype(np.float64)
        groups = np.concatenate([block[:, 2] for block in rows])
        del rows
        found = np.zeros(len(scores), dtype=np.uint8)
        for group in np.unique(groups):
            mine = np.flatnonzero(groups == group)
            order = mine[np.argsort(scores[mine], kind="stable")]
            middle = np.cumsum(sizes[order]) - sizes[order] / 2
            share = middle / sizes[order].sum()
            found[order] = np.minimum(share * self.buckets, self.buckets - 1).astype(np.uint8)
        first = 0
        for number, unit in enumerate(units):
            mark(number, slice(None), found[first : first + unit.documents])
            first += unit.documents

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        bucket = int(verdicts[0])
        document.metadata[BUCKET] = bucket
        if self.rates()[bucket] > 0:
            return None
        return Drop("worst", f"{self.key} {value_at(document.metadata, self.key)}, bucket {bucket}")


@lru_cache(maxsize=8)
def _rates(settings: Buckets) -> list[float]:
    return settings._rates()
