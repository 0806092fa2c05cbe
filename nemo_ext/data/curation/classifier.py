"""Quality classifiers: a linear model over hashed words and word pairs, or fastText. Their files hold no code.

As in DCLM (arXiv 2406.11794, section 4.4), a linear classifier separates documents of the desired quality from web
documents, and a threshold determines the share of the web that is kept.
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
"""Label of the positive class in fastText models trained by `curate_classifier`."""
MOST_WORDS = 20_000
"""Maximum number of words that are read from a document."""


@dataclass(frozen=True)
class Scorer:
    """A loaded classifier.

    Attributes:
        score: function from a text to the probability that it belongs to the positive class.
        recommended: recommended threshold, determined in training.
    """

    score: Callable[[str], float]
    recommended: float
    files: list[Path]


def features(text: str, bits: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Hash a text's words and word pairs to features: ascending indices below 2**bits, and weights of norm 1."""
    words = Words([text[: 20 * MOST_WORDS]])
    both = np.concatenate([words.hashes[:MOST_WORDS], words.ngrams(2)[0][:MOST_WORDS]])
    numbers, counts = np.unique((both >> np.uint64(64 - bits)).astype(np.int64), return_counts=True)
    weights = np.log1p(counts)
    return numbers, weights / max(1e-12, float(np.sqrt((weights**2).sum())))


def one_line(text: str) -> str:
    """Return the beginning of a text on one line for fastText; its label prefix `__label__` becomes `label`."""
    return " ".join(text[: 20 * MOST_WORDS].split()).replace("__label__", "label")


def load_scorer(path: str, label: str | None = None) -> Scorer:
    """Load a classifier from its folder or from a fastText model file.

    Args:
        label: label of the positive class in a fastText model file.

    Raises:
        ValueError: the classifier is missing or damaged, or does not have the label.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        return _by_fasttext(place, label)
    try:
        about = json.loads((place / ABOUT).read_text())
        recommended = float(about["threshold"])
        if about["engine"] == "fasttext":
            scorer = _by_fasttext(place / FASTTEXT, WANTED)
            return replace(scorer, recommended=recommended, files=[*scorer.files, place / ABOUT])
        bits = int(about["bits"])
        with np.load(place / WEIGHTS, allow_pickle=False) as stored:
            weights, bias = stored["weights"].astype(np.float64), float(stored["bias"])
        if weights.shape != (1 << bits,) or not np.isfinite(weights).all():
            raise ValueError(f"weights have shape {weights.shape} or are not finite; expected 2**{bits} finite weights")
    except Exception as error:  # numpy raises many types for damaged files
        raise ValueError(
            f"{path} is not a classifier written by `nemo-ext curate_classifier` ({error}): train it again, or set "
            "another path"
        ) from error

    def score(text: str) -> float:
        numbers, values = features(text, bits)
        return float(1 / (1 + np.exp(-(weights[numbers] @ values + bias))))

    return Scorer(score, recommended, [place / WEIGHTS, place / ABOUT])


def _by_fasttext(place: Path, label: str | None) -> Scorer:
    model = fasttext_model(str(place))
    labels = [name.removeprefix("__label__") for name in model.get_labels()]
    if label not in labels:
        raise ValueError(f"{place}: the model does not have label={label!r}; choose one of {', '.join(labels)}")

    def score(text: str) -> float:
        predicted, scores = model.predict(one_line(text), k=-1)
        return min(1.0, float(dict(zip(predicted, scores, strict=True)).get(f"__label__{label}", 0.0)))

    return Scorer(score, 0.5, [place])
