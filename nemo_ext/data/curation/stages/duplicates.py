"""Deduplication: exact by URL, text, paragraph or long run of words, and approximate by MinHash.

64-bit hashes of every document are recorded on disk. Sorting them finds repeated ones, in as many parts of the hash
range as memory requires; the first document in input order is kept. Dolma uses a Bloom filter for paragraphs
instead, which needs less space but has false positives and depends on the order in which processes reach it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.stage import Barrier, Features, Mark, Values, Verdicts, shown, url_of
from nemo_ext.data.sft.filters.base import Drop
from nemo_ext.data.text.documents import document_digest
from nemo_ext.data.text.minhash import sketches
from nemo_ext.data.text.words import Words, ngram_hashes, span_hashes, words_of
from nemo_ext.job.settings import STRICT, Share

_NONE = np.empty(0, dtype=np.uint64)
_NO_LINKS = np.empty((0, 2), dtype=np.int64)
_BYTES_A_VALUE = 40
"""Memory in bytes per value while sorting."""
_PIECE = 1 << 22
"""Number of a document's bytes that are searched for passages at a time."""


def _digest(data: bytes) -> int:
    return int.from_bytes(document_digest(data)[:8])


class _Repeats(Barrier):
    """Base class of barriers whose verdicts mark values that equal an earlier one, in the order of the units."""

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        firsts = np.cumsum([0, *(unit.number for unit in units)])
        for keys, numbers in _parts(units, memory):
            order = np.argsort(keys, kind="stable")
            sorted_keys = keys[order]
            repeated = np.sort(numbers[order[1:][sorted_keys[1:] == sorted_keys[:-1]]])
            edges = np.searchsorted(repeated, firsts)
            for unit in np.flatnonzero(np.diff(edges)).tolist():
                mark(unit, repeated[edges[unit] : edges[unit + 1]] - firsts[unit], 1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SameUrl(_Repeats):
    """Drops documents whose URL equals an earlier document's; documents without a URL are kept."""

    kind: ClassVar[str] = "same_url"

    def features(self, document: Document) -> Values:
        url = url_of(document)
        return _NONE if url is None else np.array([_digest(url.encode(errors="replace"))], dtype=np.uint64)

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        return Drop("same-url", str(url_of(document))) if verdicts.any() else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SameText(_Repeats):
    """Drops documents whose text equals an earlier document's.

    Attributes:
        exactly: True to compare bytes, False to compare lower-case words without punctuation.
    """

    kind: ClassVar[str] = "same_text"
    exactly: bool = True

    def features(self, document: Document) -> Values:
        # A text without words is compared byte by byte.
        text = document.text if self.exactly else " ".join(words_of(document.text)) or document.text
        return np.array([_digest(text.encode())], dtype=np.uint64)

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        return Drop("same-text", shown(document.text)) if verdicts.any() else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SameParagraphs(_Repeats):
    """Removes paragraphs (non-blank lines) that occurred before, in the same document or an earlier one.

    Attributes:
        least: minimum number of characters in a paragraph; shorter ones are always kept.
        most: maximum share of a document's characters that may be removed; beyond that, the document is dropped.
    """

    kind: ClassVar[str] = "same_paragraphs"
    least: NonNegativeInt = 13
    most: Share = 1.0

    def features(self, document: Document) -> Values:
        return np.array([_digest(line.encode()) for _, line in self._paragraphs(document)], dtype=np.uint64)

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        if not verdicts.any():
            return None
        pairs = zip(self._paragraphs(document), verdicts, strict=True)
        repeats = {number for (number, _), repeated in pairs if repeated}
        lines = document.text.split("\n")
        removed = sum(len(lines[number]) for number in repeats)
        rest = "\n".join(line for number, line in enumerate(lines) if number not in repeats)
        if removed > self.most * len(document.text) or not rest.strip():
            return Drop("same-paragraphs", f"{removed:,} of {len(document.text):,} characters: {shown(document.text)}")
        document.text = rest
        return None

    def _paragraphs(self, document: Document) -> list[tuple[int, str]]:
        lines = ((number, line.strip()) for number, line in enumerate(document.text.split("\n")))
        return [(number, line) for number, line in lines if line and len(line) >= self.least]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamePassages(_Repeats):
    """Removes runs of words that occurred before, verbatim, as deduplication by suffix array does (arXiv 2107.06499).

    Finds every repeated run of `words` words, except across the borders of 4 MB pieces of long documents. Takes 8 bytes
    per word on disk.

    Attributes:
        words: number of words per run; 100 are about 500 bytes.
        most: maximum share of a document's bytes that may be removed; beyond that, the document is dropped.
    """

    kind: ClassVar[str] = "same_passages"
    words: PositiveInt = 100
    most: Share = 1.0

    def features(self, document: Document) -> Values:
        return np.concatenate([_NONE, *(grams for grams, _, _ in self._runs(document.text.encode()))])

    def _runs(self, data: bytes) -> Iterator[tuple[Values, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield hashes, start offsets and end offsets (in bytes) of the runs of words in each piece of a text."""
        start = 0
        while start < len(data):
            space = _SPACE.search(data, start + _PIECE)
            end = space.start() if space else len(data)
            spans = np.array([match.span() for match in _WORD.finditer(data, start, end)], dtype=np.int64)
            if len(spans) >= self.words:
                starts, ends = spans[: len(spans) - self.words + 1, 0], spans[self.words - 1 :, 1]
                yield span_hashes(data[start:end], starts - start, ends - start), starts, ends
            start = end

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        if not verdicts.any():
            return None
        data = document.text.encode()
        edges = np.zeros(len(data) + 1, dtype=np.int64)
        runs = [(starts, ends) for _, starts, ends in self._runs(data)]
        starts, ends = (np.concatenate(each)[verdicts.astype(bool)] for each in zip(*runs, strict=True))
        np.add.at(edges, starts, 1)
        np.add.at(edges, ends, -1)
        kept = np.cumsum(edges[:-1]) == 0
        rest = np.frombuffer(data, dtype=np.uint8)[kept].tobytes().decode()
        removed = len(data) - len(rest.encode())
        if removed > self.most * len(data) or not rest.strip():
            return Drop("same-passages", f"{removed:,} of {len(data):,} bytes: {shown(document.text)}")
        document.text = rest
        return None


_WORD, _SPACE = re.compile(rb"\S+"), re.compile(rb"\s")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NearDuplicates(Barrier):
    """Drops near duplicates of earlier documents, found by MinHash of word n-grams.

    Two documents are linked if they share a band and their Jaccard similarity, estimated from all slots, is at least
    `threshold`. Among documents linked directly or through others, the first is kept.

    Attributes:
        ngram: number of words per n-gram.
        bands: number of bands.
        rows: number of slots per band; documents of similarity s share a band with probability
            1 - (1 - s**rows)**bands.
        threshold: minimum estimated similarity; null if a shared band is enough.
        seed: seed of the hash functions.
    """

    kind: ClassVar[str] = "near_duplicates"
    verdict_of_values: ClassVar[bool] = False
    ngram: PositiveInt = 5
    bands: PositiveInt = 14
    rows: PositiveInt = 8
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: NonNegativeInt = 1

    @property
    def _slots(self) -> int:
        return -(-self.bands * self.rows // 8) * 8  # rounded up to whole 64-bit values

    def features(self, document: Document) -> Values:
        words = Words([document.text])
        grams, _ = words.ngrams(self.ngram)
        if not len(grams) and len(words.hashes):
            grams = ngram_hashes(words.hashes, len(words.hashes))
        bands, slots = sketches([grams], slots=self._slots, rows=self.rows, seed=self.seed)
        return np.concatenate([bands[0, : self.bands], slots[0].view(np.uint64)])

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        width = self.bands + self._slots // 8
        firsts = np.cumsum([0, *(unit.documents for unit in units)])
        links, new_links = _NO_LINKS, [_NO_LINKS]
        for band in range(self.bands):
            for keys, documents in _parts(units, memory, width=width, column=band):
                there = keys != 0  # a document without words has none
                order = np.argsort(keys[there], kind="stable")
                sorted_keys, documents = keys[there][order], documents[there][order]
                new = np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]])[: len(sorted_keys)]
                start = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
                again = np.flatnonzero(~new)
                for earlier in (start[again], again - 1):  # the first document with the band, and the previous one
                    pairs = np.stack([documents[earlier], documents[again]], axis=1)
                    if self.threshold is not None and len(pairs):
                        pairs = pairs[self._similarity(units, firsts, pairs) >= self.threshold]
                    new_links.append(pairs)
            # Several bands find the same pairs, so each document keeps one link, to the first of its group.
            links, new_links = _to_firsts(np.concatenate([links, *new_links])), []
        later = np.sort(links[:, 1])
        edges = np.searchsorted(later, firsts)
        for number in range(len(units)):
            mark(number, later[edges[number] : edges[number + 1]] - firsts[number], 1)

    def _similarity(
        self, units: Sequence[Features], firsts: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Return the Jaccard similarity of pairs of documents, [pairs], estimated from their slots.

        Documents are numbered over all units; `firsts` are the numbers of the first document of each unit.
        """
        width = self.bands + self._slots // 8
        similarity = np.empty(len(pairs))
        for start in range(0, len(pairs), 1 << 16):
            numbers = pairs[start : start + (1 << 16)]
            rows = np.empty((*numbers.shape, self._slots // 8), dtype=np.uint64)
            units_of = np.searchsorted(firsts, numbers, side="right") - 1
            for unit in np.unique(units_of).tolist():
                table = np.memmap(units[unit].path, dtype=np.uint64, mode="r").reshape(-1, width)
                rows[units_of == unit] = table[numbers[units_of == unit] - firsts[unit], self.bands :]
            low = rows.view(np.uint8)
            equal = (low[:, 0] == low[:, 1]).mean(axis=1)
            similarity[start : start + len(equal)] = (equal - 1 / 256) / (1 - 1 / 256)  # some bytes match by chance
        return similarity

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        return Drop("near-duplicate", shown(document.text)) if verdicts.any() else None


def _parts(
    units: Sequence[Features], memory: int, *, width: int = 1, column: int = 0
) -> Iterator[tuple[Values, npt.NDArray[np.int64]]]:
    """Yield the values of a column and their row numbers (ascending, over all units), in parts that fit in `memory`.

    Equal values are in the same part, since the hash range is divided.
    """
    rows = sum(unit.number for unit in units) // width
    number = max(1, -(-rows * _BYTES_A_VALUE // memory))
    for part in range(number):
        keys, places, first = [_NONE], [np.empty(0, np.int64)], 0
        for unit in units:
            for block in unit.blocks(width):
                values = block[:, column]
                # The low half of a hash determines its part.
                here = (values & np.uint64(0xFFFFFFFF)) * np.uint64(number) >> np.uint64(32) == part
                keys.append(values[here])
                places.append(np.flatnonzero(here) + first)
                first += len(values)
        yield np.concatenate(keys), np.concatenate(places)


def _to_firsts(links: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Replace links [links, 2] by links (first, other) from the first document of each linked group to all others."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    if not len(links):
        return _NO_LINKS
    documents, number = np.unique(links, return_inverse=True)
    number = number.reshape(links.shape)
    shape = (len(documents), len(documents))
    matrix = coo_matrix((np.ones(len(links), dtype=np.int8), (number[:, 0], number[:, 1])), shape=shape)
    _, group = connected_components(matrix, directed=False)
    _, first = np.unique(group, return_index=True)
    both = np.stack([documents[first[group]], documents], axis=1)
    reduced: npt.NDArray[np.int64] = both[both[:, 0] != both[:, 1]]
    return reduced
