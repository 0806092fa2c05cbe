"""The text that a tokenizer is trained on, and the text that its report is about."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_ext.data.text.documents import Admission, ReadReport, document_digest, readable, split_position
from nemo_ext.data.vocabulary.settings import Weighted

HELD_OUT = 0.02
"""Share of pieces of text that training never sees."""
PIECE = 20_000
"""Characters of a piece: of long documents some pieces are held out."""
PART = 1 << 20
"""Bytes of input that are read at a time where a file can be cut."""


@dataclass
class Sample:
    """Texts of one stream.

    Attributes:
        stream: the stream.
        train: pieces of documents to train on, `train_bytes` in all.
        held_out: other pieces, `held_out_bytes` in all.
        report: what the reader skipped.
    """

    stream: Weighted
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    train_bytes: int = 0
    held_out_bytes: int = 0
    report: ReadReport = field(default_factory=ReadReport)


def draw(stream: Weighted, *, train: int, held_out: int, seed: int) -> Sample:
    """Pieces of a stream's documents, from parts of it in an order by the seed until there are enough.

    A hash of seed and text decides whether a piece is held out, so that none of the same text is trained on.

    Args:
        stream: the stream.
        train: bytes to train on.
        held_out: bytes to hold out; fewer where 2 % of what is read are fewer.
        seed: seed of the order and of the choice.

    Raises:
        ValueError: the source cannot be read, or too much of it is malformed.
    """
    found = Sample(stream)
    parts = list(stream.source.parts(max_documents=1000, max_size=PART))
    random.Random(f"{seed} {stream.name}").shuffle(parts)
    admission = Admission(stream.source)
    for document, data in (each for part in parts for each in readable(stream.source, part, found.report)):
        if not admission.admit(document_digest(data), len(data), found.report):
            if admission.full:
                break
            continue
        for start in range(0, len(document.text), PIECE):
            piece = document.text[start : start + PIECE]
            data = piece.encode()
            if split_position(seed, document_digest(data).hex()) < HELD_OUT * 2**64:
                if found.held_out_bytes < held_out:
                    found.held_out.append(piece)
                    found.held_out_bytes += len(data)
            elif found.train_bytes < train:
                # A character that does not fit is left out, and counted, so that this ends.
                data = data[: train - found.train_bytes]
                found.train.append(data.decode(errors="ignore"))
                found.train_bytes += len(data)
        if found.train_bytes >= train and found.held_out_bytes >= held_out:
            break
    stream.source.finish(found.report)
    return found


def texts(samples: list[Sample]) -> Iterator[str]:
    """The texts to train on."""
    for sample in samples:
        yield from sample.train
