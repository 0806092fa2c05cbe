"""Words and word n-grams as 64-bit hashes, the same in every process.

A run of bytes or words hashes to a polynomial modulo 2**64, taken from prefix sums: numpy hashes all words of a text at
once, and n-grams cost the same whatever their length. In practice, two words or n-grams never share a hash.
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

# Scripts written without spaces: Thai, Lao, Burmese, Khmer, Japanese, Chinese. Each character is a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[^\W{_UNSPACED}]+|[{_UNSPACED}]")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)
_IN_WORD = bytes(byte >= 128 or chr(byte).isalnum() or byte == ord("_") for byte in range(256))

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = np.uint64(0xD6E8FEB86659FD93)
_CHUNK = 1 << 16


def words_of(text: str) -> list[str]:
    """Words of a text in lower case, compatibility forms normalised (NFKC), without punctuation."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def word_hashes(text: str) -> Hashes:
    """Hash of each word of `words_of`, [words]."""
    return Words([text]).hashes


def ngram_hashes(words: Hashes, length: int) -> Hashes:
    """Hash of the `length` words that begin at each place, [max(0, words - length + 1)]."""
    if len(words) < length:
        return np.empty(0, dtype=np.uint64)
    return _between(_sums(words), slice(None, len(words) - length + 1), slice(length, None))


def span_hashes(data: bytes, starts: Places, ends: Places) -> Hashes:
    """Hashes of the bytes between starts and ends, [spans], wherever they are; takes 16 times the memory of `data`."""
    return _between(_sums(np.frombuffer(data, dtype=np.uint8)), starts, ends)


class Words:
    """Words of several texts, concatenated.

    Attributes:
        hashes: [words] hashes of the words.
        starts: [texts + 1] start of each text.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        plain = [text.lower() if text.isascii() else " ".join(words_of(text)) for text in texts]
        found, begins, size = list[Hashes](), list[Places](), 0
        # All texts at once, as most are short; where they are long in pieces, which bounds the number of powers.
        whole = "\n".join(plain)
        for piece in _pieces(whole):
            hashes, places = _run_hashes(piece)
            found.append(hashes)
            begins.append(places + size)
            size += len(piece)
        self.hashes: Hashes = np.concatenate([np.empty(0, dtype=np.uint64), *found])
        ends = list(accumulate(1 + len(text if text.isascii() else text.encode()) for text in plain))
        self.starts: list[int] = [0, *np.concatenate([np.empty(0, np.int64), *begins]).searchsorted(ends).tolist()]
        self._running = _sums(self.hashes)

    def of(self, text: int) -> Hashes:
        """Words of one text."""
        return self.hashes[self.starts[text] : self.starts[text + 1]]

    def ngrams(self, length: int, *, texts: Collection[int] | None = None) -> tuple[Hashes, Places]:
        """Hashes of the n-grams and places of their first words, none across two texts.

        Args:
            length: number of words of an n-gram.
            texts: texts to take n-grams of; None for all.
        """
        chosen = range(len(self.starts) - 1) if texts is None else texts
        spans = [(self.starts[text], self.starts[text + 1] - length + 1) for text in chosen]
        places = np.concatenate([np.empty(0, np.int64), *(np.arange(*span) for span in spans if span[0] < span[1])])
        if not len(places):
            return np.empty(0, dtype=np.uint64), places
        return _between(self._running, places, places + length), places


def _pieces(text: str) -> Iterator[bytes]:
    """Divide a text between words into pieces of about `_CHUNK` characters, in UTF-8."""
    start = 0
    while start < len(text):
        end = start + _CHUNK
        while end < len(text) and not text[end].isspace():
            end += 1
        yield text[start:end].encode()
        start = end


def _run_hashes(data: bytes) -> tuple[Hashes, Places]:
    """Hashes of the words in UTF-8 bytes, and the bytes at which they begin."""
    inside = np.frombuffer(b"\0" + data.translate(_IN_WORD) + b"\0", dtype=np.uint8)
    edges = (inside[1:] != inside[:-1]).nonzero()[0]
    return _between(_sums(np.frombuffer(data, dtype=np.uint8)), edges[::2], edges[1::2]), edges[::2]


def _sums(values: Hashes | npt.NDArray[np.uint8]) -> Hashes:
    """Running sums of the values times powers of the base, [values + 1]."""
    sums = np.empty(len(values) + 1, dtype=np.uint64)
    sums[0] = 0
    if len(values):
        powers, _ = _powers((len(values) - 1).bit_length())
        terms = np.add(values, 1, dtype=np.uint64)
        terms *= powers[: len(values)]
        terms.cumsum(out=sums[1:])
    return sums


def _between(sums: Hashes, starts: Places | slice, ends: Places | slice) -> Hashes:
    """Hashes of the values between starts and ends, independent of their place."""
    _, inverses = _powers((len(sums) - 1).bit_length())
    hashes = (sums[ends] - sums[starts]) * inverses[starts]
    # Low bits of a product depend only on low bits: mix the high ones into them.
    return (hashes ^ (hashes >> np.uint64(32))) * _MIX


@lru_cache(maxsize=32)
def _powers(bits: int) -> tuple[Hashes, Hashes]:
    """Powers 0, 1, ... of the base and of its inverse, 2**bits of them."""
    found = []
    for base in (_BASE, _INVERSE):
        factors = np.full(1 << bits, base, dtype=np.uint64)
        factors[0] = 1
        found.append(np.cumprod(factors).astype(np.uint64))
    return found[0], found[1]
