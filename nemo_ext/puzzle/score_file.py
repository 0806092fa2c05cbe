"""The file of replace-one-block scores: one line of JSON a variant. No torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.records import append_lines, read_lines
from nemo_ext.puzzle.variants import KEEP


@dataclass(frozen=True)
class Score:
    """What one replacement costs.

    Attributes:
        block: 1-based number of the block.
        variant: its name.
        kl: nats a token.
        loss: language model loss, nats a token.
        cosine: 1 - cosine similarity of the last hidden states.
        tokens: of the calibration set.
    """

    block: int
    variant: str
    kl: float
    loss: float
    cosine: float
    tokens: int


def read_scores(file: Path) -> list[Score]:
    """The scores of a file; a last line that a kill cut short is left out.

    Raises:
        ValueError: another line is not a score.
    """
    return read_lines(file, Score, what="a score")


def append_scores(file: Path, scores: Sequence[Score]) -> None:
    """Add lines, after whatever whole lines there are."""
    append_lines(file, scores, Score, what="a score")


def collect_scores(file: Path, parts: Sequence[Path], order: Sequence[tuple[int, str]]) -> None:
    """Move what is in other files into one, its lines in the order of (block, variant) in which one process scores.

    Args:
        file: the one.
        parts: of shards; removed.
        order: of all variants.
    """
    known = {(score.block, score.variant): score for each in (*parts, file) for score in read_scores(each)}
    if known:
        keys = dict.fromkeys([*(key for key in order if key in known), *known])
        write_text(file, "".join(json.dumps(asdict(known[key])) + "\n" for key in keys))
    for part in parts:
        part.unlink()


def parent_loss(scores: Sequence[Score]) -> float:
    """The parent's own loss: any block kept as it is."""
    return next(score.loss for score in scores if score.variant == KEEP)
