"""File of replace-one-block scores, with one JSON line per variant. Does not import torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.records import append_lines, read_lines


@dataclass(frozen=True)
class Score:
    """Scores of a model in which one block is replaced by one of its variants.

    Attributes:
        block: 1-based number of the block.
        kl: KL divergence from the parent, in nats per token.
        loss: language model loss, in nats per token.
        cosine: 1 - cosine similarity to the parent's last hidden states.
        tokens: number of predicted tokens in the calibration set.
    """

    block: int
    variant: str
    kl: float
    loss: float
    cosine: float
    tokens: int


def read_scores(file: Path) -> list[Score]:
    """Read scores from a file; an incomplete last line is skipped.

    Raises:
        ValueError: another line is not a score.
    """
    return read_lines(file, Score, what="a score")


def append_scores(file: Path, scores: Sequence[Score]) -> None:
    """Append scores to the file, one per line, dropping an incomplete last line."""
    append_lines(file, scores, Score, what="a score")


def collect_scores(file: Path, parts: Sequence[Path], order: Sequence[tuple[int, str]]) -> None:
    """Merge the shards' score files into one, in the order in which a single process would score the variants.

    Args:
        file: file to write; scores that it already has are kept.
        parts: the shards' score files, which are then removed.
        order: (1-based block number, variant name) of all variants, in the required order.
    """
    known = {(score.block, score.variant): score for each in (*parts, file) for score in read_scores(each)}
    if known:
        keys = dict.fromkeys([*(key for key in order if key in known), *known])
        write_text(file, "".join(json.dumps(asdict(known[key])) + "\n" for key in keys))
    for part in parts:
        part.unlink()
