"""Tokenised samples on their way to packs: any number of processes write files of them, packing reads them all.

BASE.tokens          the ids of all samples one after the other, in `ids_type` of the vocabulary
BASE.loss            a byte a token, 1 where it is one to learn
BASE.lengths.npy     of the samples; it comes last and marks the others as whole
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_ext.data.packs.packing import Lengths
from nemo_ext.data.text.indexed_dataset import ids_type
from nemo_ext.job.files import publish, unfinished

Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class SampleFile:
    """Tokenised samples one after the other.

    Attributes:
        base: path without endings.
        lengths: of the samples, in tokens.
    """

    base: Path
    lengths: Lengths

    @property
    def tokens(self) -> Path:
        """The ids, in `ids_type` of the vocabulary."""
        return self.base.with_name(f"{self.base.name}.tokens")

    @property
    def loss(self) -> Path:
        """A byte a token, 1 where it is one to learn."""
        return self.base.with_name(f"{self.base.name}.loss")


def write_samples(base: Path, samples: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]], *, vocab_size: int) -> SampleFile:
    """Write samples as they come; the file of lengths comes last and marks the others as whole.

    Args:
        base: path without endings; its folder exists.
        samples: ids and mask of each, equally long; a mask is 0 or 1.
        vocab_size: decides the integer type of ids.

    Raises:
        ValueError: an empty sample, ids and mask of different length, an id that is not an integer or outside the
            vocabulary, or a mark that is neither 0 nor 1.
    """
    dtype = ids_type(vocab_size)
    lengths = list[int]()
    made = SampleFile(base=base, lengths=np.empty(0, dtype=np.int64))
    with open(unfinished(made.tokens), "wb") as tokens, open(unfinished(made.loss), "wb") as loss:
        for ids, mask in samples:
            row, marks = np.asarray(ids), np.asarray(mask)
            if not len(row) or row.shape != marks.shape or row.ndim != 1:
                raise ValueError(
                    f"{base}: sample {len(lengths)} has {row.shape} ids and a mask {marks.shape}: both must be equally "
                    "long, one or more"
                )
            if row.dtype.kind not in "iu":
                raise ValueError(f"{base}: sample {len(lengths)} has ids of type {row.dtype}: they must be integers")
            if not ((marks == 0) | (marks == 1)).all():
                raise ValueError(
                    f"{base}: sample {len(lengths)} has a mask with other values than 0 and 1: mark what to learn"
                )
            if row.min() < 0 or row.max() >= vocab_size:
                raise ValueError(f"{base}: sample {len(lengths)} has ids outside 0 to {vocab_size - 1}")
            tokens.write(row.astype(dtype).tobytes())
            loss.write(marks.astype(np.uint8).tobytes())
            lengths.append(len(row))
    publish(unfinished(made.tokens), made.tokens)
    publish(unfinished(made.loss), made.loss)
    path = _lengths_path(base)
    with open(unfinished(path), "wb") as file:
        np.save(file, np.array(lengths, dtype=np.int64))
    publish(unfinished(path), path)
    return open_samples(base, vocab_size=vocab_size)


def open_samples(base: Path, *, vocab_size: int) -> SampleFile:
    """A finished sample file.

    Raises:
        ValueError: it is not there, or damaged.
    """
    path = _lengths_path(base)
    try:
        lengths = np.load(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such sample file: tokenise the samples first") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and tokenise the samples again") from error
    found = SampleFile(base=base, lengths=lengths)
    width = np.dtype(ids_type(vocab_size)).itemsize
    for file, size in ((found.tokens, width), (found.loss, 1)):
        if not file.exists() or file.stat().st_size != int(lengths.sum()) * size:
            raise ValueError(f"{file} is missing or cut short: remove {path} and tokenise the samples again")
    return found


def _lengths_path(base: Path) -> Path:
    return base.with_name(f"{base.name}.lengths.npy")
