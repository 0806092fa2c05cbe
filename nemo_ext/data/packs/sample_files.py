"""Files of tokenised samples, which are the input of packing; several processes can each write their own.

BASE.tokens          token ids of all samples, concatenated, in `ids_type` of the vocabulary
BASE.loss            loss mask: one byte per token, 1 for tokens to train on
BASE.lengths.npy     lengths of the samples, written last, after the other files
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_ext.data.packs.packing import Lengths
from nemo_ext.data.text.indexed_dataset import ids_type
from nemo_ext.job.files import complete_file

Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class SampleFile:
    """A file of tokenised samples.

    Attributes:
        base: path without suffixes.
        lengths: lengths of the samples, in tokens.
    """

    base: Path
    lengths: Lengths

    @property
    def tokens(self) -> Path:
        """Path of the token ids, which are stored in the vocabulary's `ids_type`."""
        return self.base.with_name(f"{self.base.name}.tokens")

    @property
    def loss(self) -> Path:
        """Path of the loss mask: one byte per token, 1 for tokens to train on."""
        return self.base.with_name(f"{self.base.name}.loss")


def write_samples(base: Path, samples: Iterable[tuple[npt.ArrayLike, npt.ArrayLike]], *, vocab_size: int) -> SampleFile:
    """Write a stream of samples; the file with the lengths is written last.

    Args:
        base: path without suffixes; its folder must exist.
        samples: token ids and loss mask (0 or 1) of each sample, of equal length.
        vocab_size: size of the vocabulary, which determines the ids' integer type.

    Raises:
        ValueError: a sample is empty, its ids and mask differ in length, an id is not an integer or is outside the
            vocabulary, or the mask has values other than 0 and 1.
    """
    dtype = ids_type(vocab_size)
    lengths = list[int]()
    paths = SampleFile(base=base, lengths=np.empty(0, dtype=np.int64))
    with complete_file(paths.tokens) as tokens, complete_file(paths.loss) as loss:
        for ids, mask in samples:
            row, marks = np.asarray(ids), np.asarray(mask)
            if not len(row) or row.shape != marks.shape or row.ndim != 1:
                raise ValueError(
                    f"{base}: sample {len(lengths)} has ids of shape {row.shape} and a mask of shape {marks.shape}; "
                    "both must be vectors of the same length, at least 1"
                )
            if row.dtype.kind not in "iu":
                raise ValueError(f"{base}: sample {len(lengths)} has ids of type {row.dtype}; they must be integers")
            if not ((marks == 0) | (marks == 1)).all():
                raise ValueError(
                    f"{base}: sample {len(lengths)} has a mask with values other than 0 and 1; use 1 for trained "
                    "tokens, 0 for others"
                )
            if row.min() < 0 or row.max() >= vocab_size:
                raise ValueError(
                    f"{base}: sample {len(lengths)} has ids outside the vocabulary; they must be from 0 to "
                    f"{vocab_size - 1}"
                )
            tokens.write(row.astype(dtype).tobytes())
            loss.write(marks.astype(np.uint8).tobytes())
            lengths.append(len(row))
    with complete_file(_lengths_path(base)) as file:
        np.save(file, np.array(lengths, dtype=np.int64))
    return open_samples(base, vocab_size=vocab_size)


def open_samples(base: Path, *, vocab_size: int) -> SampleFile:
    """Open a finished sample file; raises ValueError if the file is missing or damaged."""
    path = _lengths_path(base)
    try:
        lengths = np.load(path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: tokenise the samples first") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it and tokenise the samples again") from error
    samples = SampleFile(base=base, lengths=lengths)
    width = np.dtype(ids_type(vocab_size)).itemsize
    for file, size in ((samples.tokens, width), (samples.loss, 1)):
        if not file.exists() or file.stat().st_size != int(lengths.sum()) * size:
            raise ValueError(f"{file} is missing or truncated: remove {path} and tokenise the samples again")
    return samples


def _lengths_path(base: Path) -> Path:
    return base.with_name(f"{base.name}.lengths.npy")
