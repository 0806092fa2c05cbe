"""Benchmark test sets, indexed by word n-grams to find their items in training data.

GPT-3 used n-grams of 13 words (arXiv 2005.14165, appendix C); 8 is also common. n-grams shared by many items are
benchmark phrasing and are excluded; of the others, those shared by fewer items count more. An item shorter than
an n-gram must occur as a whole; an item shorter than `min_words` only counts as an entire user message.
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from nemo_ext.data.text.documents import UNLIMITED, ReadReport
from nemo_ext.data.text.user_files import JsonlSource, record_source, utf8_text
from nemo_ext.data.text.words import Hashes, Words, ngram_hashes, word_hashes
from nemo_ext.job.settings import STRICT, Places, Share, StringsOrNone

USUAL_KEYS = ("question", "problem", "prompt", "query", "instruction", "input", "text")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TestSet:
    """Files of one benchmark's items.

    Attributes:
        name: name in reports.
        path: .txt (one item per line), .jsonl (also .gz, .zst) or .parquet files and globs.
        keys: keys of a record's texts; empty for the first of `USUAL_KEYS` that the record has.
    """

    __test__ = False  # keeps pytest from collecting it

    name: str
    path: Places
    keys: StringsOrNone = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TestSets:
    """Test sets that must not occur in training data, and the overlap that counts as an occurrence.

    Attributes:
        test_sets: the test sets.
        ngram: number of words per n-gram.
        min_words: number of words below which items are compared only with entire user messages.
        share: share of an item's n-grams that a sample must contain, rare n-grams weighted higher; 0 if one n-gram is
            enough.
        common: maximum number of items that may share an n-gram; n-grams shared by more are excluded.
    """

    __test__ = False

    test_sets: tuple[TestSet, ...] = Field(min_length=1)
    ngram: PositiveInt = 13
    min_words: PositiveInt = 5
    share: Share = 0.0
    common: PositiveInt = 10

    def __post_init__(self) -> None:
        if self.min_words > self.ngram:
            raise ValueError(f"min_words={self.min_words} must be at most ngram={self.ngram}")

    def check(self) -> None:
        """Reread and index the files; raises ValueError if a file cannot be used."""
        index_of.cache_clear()
        index_of(self)

    def reads(self) -> list[Path]:
        """Return the paths of the test sets' files."""
        return [path for test_set in self.test_sets for _, path in JsonlSource(path=test_set.path).inputs()]


@plain_dataclass(frozen=True)
class Index:
    """Index of test sets' items by their n-grams.

    Attributes:
        items: name of each item, such as `gsm8k test.jsonl:12`.
        report: counts of items read, items without text or words, and excluded n-grams.
        length: number of words per n-gram.
        min_words: number of words in the beginnings of short items.
        grams: [n-grams] sorted hashes; an n-gram shared by several items is repeated for each of them.
        owners: [n-grams] item of each entry of `grams`.
        weights: [n-grams] 1 + log(number of all items / number of items with the n-gram).
        sizes: [items] sum of the weights of the item's n-grams in `grams`.
        beginnings: [short texts] sorted hashes of their first `min_words` words.
        short: [short texts] item of each text.
        lengths: [short texts] number of words of each text.
        wholes: mapping from (number of words, hash) of a short text to its item.
    """

    items: list[str]
    report: ReadReport
    length: int
    min_words: int
    grams: Hashes
    owners: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float64]
    sizes: npt.NDArray[np.float64]
    beginnings: Hashes
    short: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    wholes: dict[tuple[int, int], int]

    def found_in(
        self, words: Words, *, share: float, judged: Collection[int] | None = None, whole: Collection[int] = ()
    ) -> str | None:
        """Return the name of a test set item that occurs in the texts; None if there is none.

        Args:
            share: fraction of an item's n-grams, weighted by `weights`, that must occur; 0 if one is enough.
            judged: indices of the texts to search; None for all.
            whole: indices of texts that are also compared as a whole with items of fewer than `min_words` words.
        """
        for text in whole:
            text_words = words.hashes_of(text)
            if 0 < len(text_words) < self.min_words and (item := self._whole(text_words)) is not None:
                return self.items[item]
        if len(self.short) and (item := self._short_item(words, judged)) is not None:
            return self.items[item]
        grams, _ = words.ngrams(self.length, texts=judged)
        if not len(self.grams) or not (there := _contains(self.grams, grams)).any():
            return None
        common = np.unique(grams[there])
        starts = np.searchsorted(self.grams, common, side="left")
        ends = np.searchsorted(self.grams, common, side="right")
        entries = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        names, number = np.unique(self.owners[entries], return_inverse=True)
        shares = np.bincount(number, weights=self.weights[entries]) / self.sizes[names]
        best = int(shares.argmax())
        return self.items[names[best]] if shares[best] >= share - 1e-9 else None

    def _whole(self, words: Hashes) -> int | None:
        return self.wholes.get((len(words), int(ngram_hashes(words, len(words))[0])))

    def _short_item(self, words: Words, judged: Collection[int] | None) -> int | None:
        first, places = words.ngrams(self.min_words, texts=judged)
        for number in np.flatnonzero(_contains(self.beginnings, first)).tolist():
            beginning, place = first[number], int(places[number])
            end = next(end for end in words.starts if end > place)  # end of the text
            for entry in range(
                int(np.searchsorted(self.beginnings, beginning)),
                int(np.searchsorted(self.beginnings, beginning, side="right")),
            ):
                part = words.hashes[place : min(end, place + int(self.lengths[entry]))]
                if len(part) == self.lengths[entry] and (item := self._whole(part)) is not None:
                    return item
        return None


def _contains(known: Hashes, wanted: Hashes) -> npt.NDArray[np.bool_]:
    """Return the mask of the `wanted` values that occur in the sorted array `known`, [wanted]."""
    return known[np.minimum(np.searchsorted(known, wanted), len(known) - 1)] == wanted


@lru_cache(maxsize=1)
def index_of(settings: TestSets) -> Index:
    """Build the index of these test sets, once per process.

    Raises:
        ValueError: a file cannot be read, or there are no items.
    """
    report = ReadReport()
    items: list[str] = []
    grams, owners, beginnings, short = [np.empty(0, np.uint64)], [np.empty(0, np.int32)], list[int](), list[int]()
    wholes: dict[tuple[int, int], int] = {}
    words_of: list[int] = []
    for name, texts in itertools.chain.from_iterable(_items(test_set, report) for test_set in settings.test_sets):
        item = len(items)
        items.append(name)
        item_grams = []
        for text in texts:
            words = word_hashes(text)
            if len(words) >= settings.ngram:
                item_grams.append(ngram_hashes(words, settings.ngram))
            elif len(words):
                wholes.setdefault((len(words), int(ngram_hashes(words, len(words))[0])), item)
                if len(words) >= settings.min_words:
                    beginnings.append(int(ngram_hashes(words, settings.min_words)[0]))
                    short.append(item)
                    words_of.append(len(words))
        if item_grams:
            grams.append(np.unique(np.concatenate(item_grams)))
            owners.append(np.full(len(grams[-1]), item, dtype=np.int32))
    if not items:
        skipped = report.summary()
        raise ValueError(f"decontamination.test_sets have no items (skipped: {skipped}); correct their path or keys")
    all_grams, all_owners = np.concatenate(grams), np.concatenate(owners)
    order = np.argsort(all_grams, kind="stable")
    all_grams, all_owners = all_grams[order], all_owners[order]
    _, inverse, counts = np.unique(all_grams, return_inverse=True, return_counts=True)
    common = counts > settings.common
    if common.any():
        report.skip("common n-gram", count=int(common.sum()))
    rare = ~common[inverse]
    weights = 1 + np.log(len(items) / counts[inverse[rare]])
    all_grams, all_owners = all_grams[rare], all_owners[rare]
    by_beginning = np.argsort(np.array(beginnings, dtype=np.uint64), kind="stable")
    return Index(
        items=items,
        report=report,
        length=settings.ngram,
        min_words=settings.min_words,
        grams=all_grams,
        owners=all_owners,
        weights=weights,
        sizes=np.bincount(all_owners, weights=weights, minlength=len(items)),
        beginnings=np.array(beginnings, dtype=np.uint64)[by_beginning],
        short=np.array(short, dtype=np.int32)[by_beginning],
        wholes=wholes,
        lengths=np.array(words_of, dtype=np.int64)[by_beginning],
    )


def _items(test_set: TestSet, report: ReadReport) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and texts of every item in a test set."""
    where = f"decontamination: test set {test_set.name}"
    if all(Path(path).suffix == ".txt" for path in test_set.path):
        for name, path in JsonlSource(path=test_set.path).inputs():
            for number, line in enumerate(utf8_text(path).splitlines(), start=1):
                if line.strip():
                    report.records += 1
                    yield f"{test_set.name} {name}:{number}", [line]
        return
    files = record_source(test_set.path, None, where)
    for part in files.parts(max_documents=UNLIMITED, max_size=UNLIMITED):
        for number, record in files.records(part, report):
            texts = _texts(record, test_set.keys)
            if texts:
                yield f"{test_set.name} {part.name}:{number}", texts
            elif test_set.keys or any(key in record for key in USUAL_KEYS):
                report.skip("no text", files.place(part, number))
            else:
                place, known = files.place(part, number), ", ".join(sorted(record)) or "none"
                raise ValueError(
                    f"{where}: {place} has none of the usual keys; set `keys` to the keys that hold its texts, among: "
                    f"{known}"
                )


def _texts(record: dict[str, Any], keys: tuple[str, ...]) -> list[str]:
    if not keys:
        keys = next(((key,) for key in USUAL_KEYS if isinstance(record.get(key), str)), ())
    texts = []
    for key in keys:
        value = record.get(key)
        texts += [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    return [text for text in texts if text.strip()]
