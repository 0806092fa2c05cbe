"""Near duplicates: workers make MinHash sketches, and one pass over all sketches decides.

A sketch is rensa's R-MinHash of the sample's word n-grams, over contents, reasoning, tool calls and tool results.
System messages must be equal rather than similar, since one shared by a whole source would make its samples alike.
Slots are grouped into bands. Two samples that share a band value are compared by the low byte of every slot (Li and
König, b-Bit Minwise Hashing, 2010). 1 M sketches of 128 slots take 212 MB. Sketches made by different versions of rensa
cannot be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.sft.filters.base import Texts
from nemo_ext.data.text.minhash import sketches
from nemo_ext.data.text.words import ngram_hashes
from nemo_ext.job.seeds import digest
from nemo_ext.job.settings import STRICT

_COMPARED = 64

Samples = npt.NDArray[np.int64]


@plain_dataclass(frozen=True)
class Sketches:
    """MinHash sketches of samples, one row per sample.

    Attributes:
        bands: [samples, bands] uint32; samples that share a band value may be near duplicates; 0 for samples without
            words.
        slots: [samples, slots] uint8, low byte of each MinHash value.
    """

    bands: npt.NDArray[np.uint32]
    slots: npt.NDArray[np.uint8]

    @staticmethod
    def joined(parts: "Sequence[Sketches]") -> "Sketches":
        """Concatenate sketches, in order."""
        return Sketches(np.concatenate([part.bands for part in parts]), np.concatenate([part.slots for part in parts]))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NearDuplicates:
    """Filter of near duplicates by estimated Jaccard similarity of word n-grams. All numbers are (choice).

    Attributes:
        threshold: minimum similarity of near duplicates.
        ngram: number of words in an n-gram; a shorter text counts as one n-gram.
        slots: number of MinHash slots; the estimate's error is about sqrt(threshold * (1 - threshold) / slots).
        rows: number of slots per band. Fewer rows find more pairs just above the threshold, at the cost of more
            comparisons.
        prompts: True to compare only user messages (and system messages for equality), so that different answers to
            the same prompt also count as duplicates.
        seed: seed of the hash functions.
    """

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    ngram: PositiveInt = 5
    slots: Annotated[int, Field(ge=16)] = 128
    rows: PositiveInt = 6
    prompts: bool = False
    seed: NonNegativeInt = 1234

    def __post_init__(self) -> None:
        if self.rows > self.slots:
            raise ValueError(f"near_duplicates.rows={self.rows} must be at most near_duplicates.slots={self.slots}")

    @property
    def bands(self) -> int:
        """Number of bands in a sketch."""
        return self.slots // self.rows

    def sketch(self, samples: Sequence[Texts]) -> Sketches:
        """Compute the sketches of samples; fastest with a few hundred samples per call."""
        grams = [self._grams(texts) for texts in samples]
        bands, slots = sketches(grams, slots=self.slots, rows=self.rows, seed=self.seed)
        short = (bands >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
        short[[not len(row) for row in grams]] = 0
        return Sketches(short, slots)

    def _grams(self, texts: Texts) -> npt.NDArray[np.uint64]:
        chosen = [index for index, text in enumerate(texts.spoken) if text.role == "user" or not self.prompts]
        short = [words for index in chosen if 0 < len(words := texts.words.hashes_of(index)) < self.ngram]
        grams, _ = texts.words.ngrams(self.ngram, texts=chosen)
        whole = np.concatenate([grams, *(ngram_hashes(words, len(words)) for words in short)])
        first = texts.sample.messages[0] if texts.sample.messages else None
        if first is None or first.role != "system":
            return whole
        return whole ^ np.uint64(digest(0, first.content))

    def duplicate_of(self, sketches: Sketches) -> Samples:
        """Return the earlier kept sample that each sample is a near duplicate of, or -1, [samples].

        Samples are visited in order, and one is dropped if a kept sample shares a band value with it and is similar
        enough. Only the first 64 kept samples per band value are compared, which bounds the work if very many samples
        share a value by chance.
        """
        # One in 256 slots with different hashes has an equal low byte by chance.
        least = self.threshold + (1 - self.threshold) / 256
        originals = np.full(len(sketches.bands), -1, dtype=np.int64)
        starts, groups = _groups(sketches.bands)
        first_kept = np.full(int(groups.max(initial=-1)) + 1, -1, dtype=np.int32)
        more_kept: dict[int, list[int]] = {}
        slots = sketches.slots
        for sample in np.flatnonzero(np.diff(starts)).tolist():
            shared = groups[starts[sample] : starts[sample + 1]]
            first = first_kept[shared]
            with_kept = shared[first >= 0].tolist()
            candidates = set(first[first >= 0].tolist())
            for group in with_kept:
                candidates.update(more_kept.get(group, ()))
            if candidates:
                others = sorted(candidates)
                similar = (slots[others] == slots[sample]).mean(axis=1)
                best = int(similar.argmax())
                if similar[best] >= least:
                    originals[sample] = others[best]
                    continue
            first_kept[shared[first < 0]] = sample
            for group in with_kept:
                if len(more := more_kept.setdefault(group, [])) < _COMPARED - 1:
                    more.append(sample)
        return originals


def first_of_each(ids: npt.NDArray[np.uint64]) -> Samples:
    """Return for each sample the index of the first sample with the same id (a 64-bit digest), [samples]."""
    _, first, number = np.unique(ids, return_index=True, return_inverse=True)
    found: Samples = first[number]
    return found


def _groups(bands: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Group samples that share a band value; return (starts, groups).

    Sample i is in the groups numbered `groups[starts[i] : starts[i + 1]]`, possibly none.
    """
    members, numbers = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    first = 0
    for band in range(bands.shape[1]):
        column = np.ascontiguousarray(bands[:, band])
        order = np.argsort(column, kind="stable").astype(np.int32)
        values = column[order]
        same = values[1:] == values[:-1]
        same &= values[1:] != 0
        shared = np.concatenate([same, [False]]) | np.concatenate([[False], same])
        new = np.concatenate([[True], ~same])[: len(values)][shared[: len(values)]]
        members.append(order[shared[: len(values)]])
        numbers.append((first - 1 + np.cumsum(new)).astype(np.int32))
        first += int(new.sum())
    sample, group = np.concatenate(members), np.concatenate(numbers)
    del members, numbers
    starts = np.concatenate([[0], np.cumsum(np.bincount(sample, minlength=len(bands)))])
    return starts, group[np.argsort(sample, kind="stable")]
