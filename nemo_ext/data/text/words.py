"""Words and word n-grams as 64-bit hashes that are the same in all processes.

The hash of a run of bytes or words is a polynomial modulo 2**64, computed from prefix sums: numpy hashes all words of a
text at once, and n-grams of any length cost the same. Collisions are negligible in practice.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

# Scripts without spaces (Thai, Lao, Burmese, Khmer, Japanese, Chinese), in which each character is a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[^\W{_UNSPACED}]+|[{_UNSPACED}]")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_IN_WORD = bytes(byte >= 128 or chr(byte).isalnum() or byte == ord("_") for byte in range(256))

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_CHUNK = 1 << 16


def words_of(text: str) -> list[str]:
    """Split a text into lower-case words, normalised by NFKC, without punctuation."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def word_hashes(text: str) -> Hashes:
    """Return the hashes of a text's words (see `words_of`), [words]."""
    return Words([text]).hashes


def ngram_hashes(words: Hashes, length: int) -> Hashes:
    """Return the hashes of the n-grams of `length` words at each position, [max(0, words - length + 1)]."""
    if len(words) < length:
        return np.empty(0, dtype=np.uint64)
    return _between(_sums(words), slice(None, len(words) - length + 1), slice(length, None))


def span_hashes(data: bytes, starts: Places, ends: Places) -> Hashes:
    """Return the hash of each span of bytes from `starts` to `ends`, [spans]; takes 16 times the memory of `data`."""
    return _between(_sums(np.frombuffer(data, dtype=np.uint8)), starts, ends)


class Words:
    """Hashed words of several texts, concatenated.

    Attributes:
        hashes: [words] hashes of the words.
        starts: [texts + 1] index of each text's first word, followed by the number of words.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        plain = [text.lower() if text.isascii() else " ".join(words_of(text)) for text in texts]
        pieces, begins, size = list[Hashes](), list[Places](), 0
        # All texts together, as most are short, but in pieces, which bounds the number of powers for long texts.
        for piece in _pieces("\n".join(plain)):
            hashes, places = _run_hashes(piece)
            pieces.append(hashes)
            begins.append(places + size)
            size += len(piece)
        self.hashes: Hashes = np.concatenate([np.empty(0, dtype=np.uint64), *pieces])
        ends = list(accumulate(1 + len(text if text.isascii() else text.encode()) for text in plain))
        self.starts: list[int] = [0, *np.concatenate([np.empty(0, np.int64), *begins]).searchsorted(ends).tolist()]
        self._running = _sums(self.hashes)

    def hashes_of(self, text: int) -> Hashes:
        """Return the hashes of the words in the text with this index."""
        return self.hashes[self.starts[text] : self.starts[text + 1]]

    def ngrams(self, length: int, *, texts: Collection[int] | None = None) -> tuple[Hashes, Places]:
        """Return the hashes of n-grams and indices of their first words, both [n-grams]; no n-gram spans two texts.

        Args:
            length: number of words per n-gram.
            texts: indices of the texts whose n-grams to return; None for all.
        """
        chosen = range(len(self.starts) - 1) if texts is None else texts
        spans = [(self.starts[text], self.starts[text + 1] - length + 1) for text in chosen]
        places = np.concatenate([np.empty(0, np.int64), *(np.arange(*span) for span in spans if span[0] < span[1])])
        if not len(places):
            return np.empty(0, dtype=np.uint64), places
        return _between(self._running, places, places + length), places


def _pieces(text: str) -> Iterator[bytes]:
    """Cut a text at white space into UTF-8 pieces of about `_CHUNK` characters."""
    start = 0
    while start < len(text):
        end = start + _CHUNK
        while end < len(text) and not text[end].isspace():
            end += 1
        yield text[start:end].encode()
        start = end


def _run_hashes(data: bytes) -> tuple[Hashes, Places]:
    """Return the hashes of the words in UTF-8 bytes, and the byte offsets at which they begin."""
    inside = np.frombuffer(b"\0" + data.translate(_IN_WORD) + b"\0", dtype=np.uint8)
    edges = (inside[1:] != inside[:-1]).nonzero()[0]
    return _between(_sums(np.frombuffer(data, dtype=np.uint8)), edges[::2], edges[1::2]), edges[::2]


def _sums(values: Hashes | npt.NDArray[np.uint8]) -> Hashes:
    """Return the prefix sums of (value + 1) times powers of the base, [values + 1]."""
    sums = np.empty(len(values) + 1, dtype=np.uint64)
    sums[0] = 0
    if len(values):
        powers, _ = _powers((len(values) - 1).bit_length())
        terms = np.add(values, 1, dtype=np.uint64)
        terms *= powers[: len(values)]
        terms.cumsum(out=sums[1:])
    return sums


def _between(sums: Hashes, starts: Places | slice, ends: Places | slice) -> Hashes:
    """Return the hashes of the runs of values from `starts` to `ends` (exclusive), given the result of `_sums`."""
    _, inverses = _powers((len(sums) - 1).bit_length())
    hashes = (sums[ends] - sums[starts]) * inverses[starts]
    # The low bits of a product depend only on low bits of the factors, so mix the high bits into them.
    return (hashes ^ (hashes >> np.uint64(32))) * _MIX


@lru_cache(maxsize=32)
def _powers(bits: int) -> tuple[Hashes, Hashes]:
    """Return the first 2**bits powers of the base and of its inverse, from exponent 0."""
    powers = []
    for base in (_BASE, _INVERSE):
        factors = np.full(1 << bits, base, dtype=np.uint64)
        factors[0] = 1
        powers.append(np.cumprod(factors).astype(np.uint64))
    return powers[0], powers[1]
