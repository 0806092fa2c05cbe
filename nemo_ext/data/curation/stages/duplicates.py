"""Duplicates: of addresses, documents, paragraphs and long passages exactly, and of documents nearly, by MinHash.

Every document is noted as 64-bit hashes, on disk. Which of them came before is decided by sorting, in as many parts of
the hashes' range as fit in memory; the first document, in the order of the input, is the one that stays. Dolma finds
paragraphs by a Bloom filter instead, which takes less room, but takes some that are new for old and depends on the
order in which processes come to it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
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
"""Memory that sorting takes for a value."""
_PIECE = 1 << 22
"""Bytes of a document that are looked at together for passages."""


def _digest(data: bytes) -> int:
    return int.from_bytes(document_digest(data)[:8])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SameUrl(Barrier):
    """Documents of an address that an earlier one has; those without an address stay."""

    kind: ClassVar[str] = "same_url"

    def noting(self) -> Callable[[Document], Values]:
        def note(document: Document) -> Values:
            url = url_of(document)
            return _NONE if url is None else np.array([_digest(url.encode(errors="replace"))], dtype=np.uint64)

        return note

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        mark_repeats(units, mark, memory)

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        return Drop("same-url", str(url_of(document))) if verdicts.any() else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SameText(Barrier):
    """Documents with the text of an earlier one.

    Attributes:
        exactly: whether every byte counts, or only words, in small letters and without punctuation.
    """

    kind: ClassVar[str] = "same_text"
    exactly: bool = True

    def noting(self) -> Callable[[Document], Values]:
        def note(document: Document) -> Values:
            # A text without words is compared as it is.
            text = document.text if self.exactly else " ".join(words_of(document.text)) or document.text
            return np.array([_digest(text.encode())], dtype=np.uint64)

        return note

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        mark_repeats(units, mark, memory)

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        return Drop("same-text", shown(document.text)) if verdicts.any() else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SameParagraphs(Barrier):
    """Paragraphs that came before, in this document or an earlier one: cut out.

    Attributes:
        least: characters of a paragraph (a line that is not blank) below which it is left alone.
        most: share of a document's characters that may be cut out; above it the document is dropped.
    """

    kind: ClassVar[str] = "same_paragraphs"
    least: NonNegativeInt = 13
    most: Share = 1.0

    def noting(self) -> Callable[[Document], Values]:
        def note(document: Document) -> Values:
            return np.array([_digest(line.encode()) for _, line in self._paragraphs(document)], dtype=np.uint64)

        return note

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        mark_repeats(units, mark, memory)

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        if not verdicts.any():
            return None
        pairs = zip(self._paragraphs(document), verdicts, strict=True)
        out = {number for (number, _), repeated in pairs if repeated}
        lines = document.text.split("\n")
        cut = sum(len(lines[number]) for number in out)
        left = "\n".join(line for number, line in enumerate(lines) if number not in out)
        if cut > self.most * len(document.text) or not left.strip():
            return Drop("same-paragraphs", f"{cut:,} of {len(document.text):,} characters: {shown(document.text)}")
        document.text = left
        return None

    def _paragraphs(self, document: Document) -> list[tuple[int, str]]:
        lines = ((number, line.strip()) for number, line in enumerate(document.text.split("\n")))
        return [(number, line) for number, line in lines if line and len(line) >= self.least]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamePassages(Barrier):
    """Runs of words that came before, letter by letter: cut out, as by a suffix array (arXiv 2107.06499).

    Every run of `words` words that is anywhere in the data before is found, but across the borders of pieces of 4 MB of
    longer documents; it takes 8 bytes a word on disk.

    Attributes:
        words: number of words of a run; 100 are about 500 bytes.
        most: share of a document's characters that may be cut out; above it the document is dropped.
    """

    kind: ClassVar[str] = "same_passages"
    words: PositiveInt = 100
    most: Share = 1.0

    def noting(self) -> Callable[[Document], Values]:
        def note(document: Document) -> Values:
            return np.concatenate([_NONE, *(grams for grams, _, _ in self._runs(document.text.encode()))])

        return note

    def _runs(self, data: bytes) -> Iterator[tuple[Values, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Hashes of the runs of words in each piece of a text, and where each begins and ends."""
        start = 0
        while start < len(data):
            space = _SPACE.search(data, start + _PIECE)
            end = space.start() if space else len(data)
            spans = np.array([match.span() for match in _WORD.finditer(data, start, end)], dtype=np.int64)
            if len(spans) >= self.words:
                starts, ends = spans[: len(spans) - self.words + 1, 0], spans[self.words - 1 :, 1]
                yield span_hashes(data[start:end], starts - start, ends - start), starts, ends
            start = end

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        mark_repeats(units, mark, memory)

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
        left = np.frombuffer(data, dtype=np.uint8)[kept].tobytes().decode()
        cut = len(data) - len(left.encode())
        if cut > self.most * len(data) or not left.strip():
            return Drop("same-passages", f"{cut:,} of {len(data):,} bytes: {shown(document.text)}")
        document.text = left
        return None


_WORD, _SPACE = re.compile(rb"\S+"), re.compile(rb"\s")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NearDuplicates(Barrier):
    """Documents that are nearly the same as an earlier one, by MinHash of their word n-grams.

    Two documents are alike if they have a band in common, and their slots say that their Jaccard similarity is at
    least `threshold`. Of documents that are linked so, directly or through others, the first stays.

    Attributes:
        ngram: number of words of an n-gram.
        bands: number of bands.
        rows: number of slots that are joined to a band: documents of similarity s are compared with probability
            1 - (1 - s**rows)**bands.
        threshold: least similarity by all slots; null if a band in common is enough.
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
        return -(-self.bands * self.rows // 8) * 8  # in whole 64-bit values

    def noting(self) -> Callable[[Document], Values]:
        def note(document: Document) -> Values:
            words = Words([document.text])
            grams, _ = words.ngrams(self.ngram)
            if not len(grams) and len(words.hashes):
                grams = ngram_hashes(words.hashes, len(words.hashes))
            bands, slots = sketches([grams], slots=self._slots, rows=self.rows, seed=self.seed)
            return np.concatenate([bands[0, : self.bands], slots[0].view(np.uint64)])

        return note

    def decide(self, units: Sequence[Features], mark: Mark, memory: int) -> None:
        width = self.bands + self._slots // 8
        firsts = np.cumsum([0, *(unit.documents for unit in units)])
        links, found = _NO_LINKS, [_NO_LINKS]
        for band in range(self.bands):
            for keys, documents in _parts(units, memory, width=width, column=band):
                there = keys != 0  # a document without words has none
                order = np.argsort(keys[there], kind="stable")
                sorted_keys, documents = keys[there][order], documents[there][order]
                new = np.concatenate([[True], sorted_keys[1:] != sorted_keys[:-1]])[: len(sorted_keys)]
                start = np.maximum.accumulate(np.where(new, np.arange(len(new)), 0))
                again = np.flatnonzero(~new)
                for left in (start[again], again - 1):  # the first with the band, and the one before
                    pairs = np.stack([documents[left], documents[again]], axis=1)
                    if self.threshold is not None and len(pairs):
                        pairs = pairs[self._similarity(units, firsts, pairs) >= self.threshold]
                    found.append(pairs)
            # Bands find the same pairs again and again: each document keeps one link, to the first of its group.
            links, found = _to_firsts(np.concatenate([links, *found])), []
        later = np.sort(links[:, 1])
        edges = np.searchsorted(later, firsts)
        for number in range(len(units)):
            mark(number, later[edges[number] : edges[number + 1]] - firsts[number], 1)

    def _similarity(
        self, units: Sequence[Features], firsts: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Estimated Jaccard similarity of pairs of documents."""
        width = self.bands + self._slots // 8
        found = np.empty(len(pairs))
        for start in range(0, len(pairs), 1 << 16):
            numbers = pairs[start : start + (1 << 16)]
            rows = np.empty((*numbers.shape, self._slots // 8), dtype=np.uint64)
            unit = np.searchsorted(firsts, numbers, side="right") - 1
            for each in np.unique(unit).tolist():
                table = np.memmap(units[each].path, dtype=np.uint64, mode="r").reshape(-1, width)
                rows[unit == each] = table[numbers[unit == each] - firsts[each], self.bands :]
            low = rows.view(np.uint8)
            equal = (low[:, 0] == low[:, 1]).mean(axis=1)
            found[start : start + len(equal)] = (equal - 1 / 256) / (1 - 1 / 256)  # some bytes are equal by chance
        return found

    def apply(self, document: Document, verdicts: Verdicts) -> Drop | None:
        return Drop("near-duplicate", shown(document.text)) if verdicts.any() else None


def mark_repeats(units: Sequence[Features], mark: Mark, memory: int) -> None:
    """Set the verdict of every value that came before in the order of the units."""
    firsts = np.cumsum([0, *(unit.number for unit in units)])
    for keys, numbers in _parts(units, memory):
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        repeated = np.sort(numbers[order[1:][sorted_keys[1:] == sorted_keys[:-1]]])
        edges = np.searchsorted(repeated, firsts)
        for unit in np.flatnonzero(np.diff(edges)).tolist():
            mark(unit, repeated[edges[unit] : edges[unit + 1]] - firsts[unit], 1)


def _parts(
    units: Sequence[Features], memory: int, *, width: int = 1, column: int = 0
) -> Iterator[tuple[Values, npt.NDArray[np.int64]]]:
    """A column of the units' rows, with the rows' numbers, ascending, in parts of its range that fit in memory."""
    rows = sum(unit.number for unit in units) // width
    number = max(1, -(-rows * _BYTES_A_VALUE // memory))
    for part in range(number):
        keys, places, first = [_NONE], [np.empty(0, np.int64)], 0
        for unit in units:
            for block in unit.blocks(width):
                values = block[:, column]
                # The low half of a hash says which part it is in.
                here = (values & np.uint64(0xFFFFFFFF)) * np.uint64(number) >> np.uint64(32) == part
                keys.append(values[here])
                places.append(np.flatnonzero(here) + first)
                first += len(values)
        yield np.concatenate(keys), np.concatenate(places)


def _to_firsts(links: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Links [links, 2] of each document that others lead to, to the first of them."""
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
    found: npt.NDArray[np.int64] = both[both[:, 0] != both[:, 1]]
    return found
