"""File of replace-one-block scores: one line of JSON per variant. No torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.records import append_lines, read_lines


@dataclass(frozen=True)
class Score:
    """Scores of one replacement.

    Attributes:
        block: 1-based number of the block.
        variant: name of the variant.
        kl: KL divergence, nats per token.
        loss: language model loss, nats per token.
        cosine: 1 - cosine similarity of the last hidden states.
        tokens: number of tokens in the calibration set.
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
    """Append lines after the last complete line."""
    append_lines(file, scores, Score, what="a score")


def collect_scores(file: Path, parts: Sequence[Path], order: Sequence[tuple[int, str]]) -> None:
    """Merge score files of shards into one, in the order in which a single process would score variants.

    Args:
        file: file to write.
        parts: score files of shards; removed.
        order: (block, variant) of all variants.
    """
    known = {(score.block, score.variant): score for each in (*parts, file) for score in read_scores(each)}
    if known:
        keys = dict.fromkeys([*(key for key in order if key in known), *known])
        write_text(file, "".join(json.dumps(asdict(known[key])) + "\n" for key in keys))
    for part in parts:
        part.unlink()
