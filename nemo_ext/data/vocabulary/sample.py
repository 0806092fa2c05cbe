"""Sample of text for training a tokenizer, with held-out text for its report."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_ext.data.text.documents import ReadReport, document_digest, shuffled, split_position
from nemo_ext.data.vocabulary.settings import Weighted

HELD_OUT = 0.02
"""Share of the pieces of text that are held out from training."""
PIECE = 20_000
"""Maximum number of characters in a piece; a long document has several pieces, of which some are held out."""


@dataclass
class Sample:
    """Texts of one stream.

    Attributes:
        train: pieces of documents for training, `train_bytes` bytes in total.
        held_out: held-out pieces, `held_out_bytes` bytes in total.
        report: the reader's counts.
    """

    stream: Weighted
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    train_bytes: int = 0
    held_out_bytes: int = 0
    report: ReadReport = field(default_factory=ReadReport)


def draw(stream: Weighted, *, train: int, held_out: int, seed: int) -> Sample:
    """Sample pieces of a stream's documents, reading parts in random order until there are enough.

    A hash of seed and text decides whether a piece is held out, so equal pieces are either all held out or not at all.

    Args:
        train: number of bytes to train on.
        held_out: maximum number of bytes to hold out; at most about 2 % of the text is.

    Raises:
        ValueError: the source cannot be read, or too much of it is malformed.
    """
    sample = Sample(stream)
    for text, _ in shuffled(stream.source, sample.report, seed=f"{seed} {stream.name}"):
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            data = piece.encode()
            if split_position(seed, document_digest(data).hex()) < HELD_OUT * 2**64:
                if sample.held_out_bytes < held_out:
                    sample.held_out.append(piece)
                    sample.held_out_bytes += len(data)
            elif sample.train_bytes < train:
                # The bytes of a truncated last character count, although it is dropped, so that the loop ends.
                data = data[: train - sample.train_bytes]
                sample.train.append(data.decode(errors="ignore"))
                sample.train_bytes += len(data)
        if sample.train_bytes >= train and sample.held_out_bytes >= held_out:
            break
    stream.source.finish(sample.report)
    return sample


def texts(samples: list[Sample]) -> Iterator[str]:
    """Yield the training texts of all samples."""
    for sample in samples:
        yield from sample.train
