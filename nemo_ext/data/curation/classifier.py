"""Classifiers of documents: hashed words and pairs of words with one weight each, or fastText's; files hold numbers.

The pattern is DCLM's (arXiv 2406.11794, section 4.4): one linear classifier between documents that are like what is
wanted and documents of the web, and a threshold that keeps a share of the web.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nemo_ext.data.curation.stages.languages import fasttext_model
from nemo_ext.data.text.words import Words

WEIGHTS = "classifier.npz"
FASTTEXT = "classifier.bin"
ABOUT = "classifier.json"
WANTED = "wanted"
"""Label of what is wanted in a fastText model of ours."""
MOST_WORDS = 20_000
"""Words of a document that are looked at."""


@dataclass(frozen=True)
class Scorer:
    """Probability that a text is wanted.

    Attributes:
        of: the function.
        recommended: threshold that its training found.
        files: its files.
    """

    of: Callable[[str], float]
    recommended: float
    files: list[Path]

    def __call__(self, text: str) -> float:
        return self.of(text)


def features(text: str, bits: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Hashed words and pairs of words: numbers below 2**bits, ascending, and weights of length 1 together."""
    words = Words([text[: 20 * MOST_WORDS]])
    both = np.concatenate([words.hashes[:MOST_WORDS], words.ngrams(2)[0][:MOST_WORDS]])
    numbers, counts = np.unique((both >> np.uint64(64 - bits)).astype(np.int64), return_counts=True)
    weights = np.log1p(counts)
    return numbers, weights / max(1e-12, float(np.sqrt((weights**2).sum())))


def one_line(text: str) -> str:
    """The beginning of a text as fastText reads it, without what it would take for a label."""
    return " ".join(text[: 20 * MOST_WORDS].split()).replace("__label__", "label")


def load_scorer(path: str, label: str | None = None) -> Scorer:
    """A classifier from its folder, or from a fastText model's file.

    Raises:
        ValueError: it is not there, damaged, or has no such label.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        return _by_fasttext(place, label)
    try:
        about = json.loads((place / ABOUT).read_text())
        recommended = float(about["threshold"])
        if about["engine"] == "fasttext":
            made = _by_fasttext(place / FASTTEXT, WANTED)
            return replace(made, recommended=recommended, files=[*made.files, place / ABOUT])
        bits = int(about["bits"])
        with np.load(place / WEIGHTS, allow_pickle=False) as stored:
            weights, bias = stored["weights"].astype(np.float64), float(stored["bias"])
        if weights.shape != (1 << bits,) or not np.isfinite(weights).all():
            raise ValueError(f"{weights.shape} weights for {bits} bits, or no numbers")
    except Exception as error:  # numpy has many for files that are damaged
        raise ValueError(f"{path}: no classifier of `nemo-ext curate_classifier` ({error})") from error

    def score(text: str) -> float:
        numbers, values = features(text, bits)
        return float(1 / (1 + np.exp(-(weights[numbers] @ values + bias))))

    return Scorer(score, recommended, [place / WEIGHTS, place / ABOUT])


def _by_fasttext(place: Path, label: str | None) -> Scorer:
    model = fasttext_model(str(place))
    labels = [each.removeprefix("__label__") for each in model.get_labels()]
    if label not in labels:
        raise ValueError(f"{place}: label={label!r}: choose one of {', '.join(labels)}")

    def score(text: str) -> float:
        found, scores = model.predict(one_line(text), k=-1)
        return min(1.0, float(dict(zip(found, scores, strict=True)).get(f"__label__{label}", 0.0)))

    return Scorer(score, 0.5, [place])
