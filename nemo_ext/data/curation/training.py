"""The `nemo-ext curate_classifier` job: trains a quality classifier on two sets of documents and evaluates it."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from nemo_ext.data.curation.classifier import ABOUT, FASTTEXT, WANTED, WEIGHTS, features, load_scorer, one_line
from nemo_ext.data.streams import sources_of
from nemo_ext.data.text.documents import ReadReport, Source, shuffled, split_position
from nemo_ext.job.files import complete_file, only_run_in, write_text
from nemo_ext.job.made_of import note
from nemo_ext.job.progress import notice
from nemo_ext.job.report import Report, tidy
from nemo_ext.job.run_directory import OWN, REPORT
from nemo_ext.job.settings import STRICT, Count, Place, Places, Share, checked
from nemo_ext.job.units import OutputFolder

PICTURE = "calibration.png"
_NAMES = ("positives", "negatives")
_LEAST_STEPS = 500_000
"""Minimum number of documents that fastText sees over all epochs, within 5 to 100 epochs."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings(OutputFolder):
    """Settings of `nemo-ext curate_classifier`; hydra_conf/curate_classifier.yaml describes the other keys.

    Attributes:
        kind: file kind; null to infer it from the file names.
        text_key: key of a record's text; null for `text`.
    """

    positives: Places
    negatives: Places
    kind: str | None
    text_key: str | None
    output: Annotated[Place, Field(min_length=1)]
    engine: Literal["fasttext", "hashed"] | None
    share: Annotated[Share, Field(gt=0, lt=1)]
    most: Count
    held_out: Annotated[Share, Field(gt=0, le=0.5)]
    bits: Annotated[int, Field(ge=10, le=28)]
    seed: int


@plain_dataclass
class _Set:
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    report: ReadReport = field(default_factory=ReadReport)


def check(config: Mapping[str, Any]) -> Settings:
    """Validate the settings of a composed config, without looking at files.

    Raises:
        ValueError: a setting is invalid.
    """
    for key, value in (("positives", "files"), ("negatives", "files"), ("output", "a folder")):
        if config[key] is None:
            raise ValueError(f"{key}=null: set it to {value}")
    settings = checked(Settings, {field.name: config[field.name] for field in fields(Settings)})
    if settings.engine == "fasttext" and find_spec("fasttext") is None:
        raise ValueError("engine=fasttext requires fastText: pip install fasttext-numpy2-wheel, or set engine=hashed")
    return settings


def run(config: Mapping[str, Any]) -> None:
    """Train the classifier of a composed config and report on it, unless it is already complete.

    Raises:
        ValueError: a setting or a file is invalid, or the folder has a classifier made with different settings.
    """
    settings = check(config)
    engine = settings.engine or ("fasttext" if find_spec("fasttext") else "hashed")
    sources = {name: _source(config, name, settings) for name in _NAMES}
    for source in sources.values():
        source.check()
    folder = settings.folder
    made_of: dict[str, Any] = {
        "engine": engine,
        **{key: getattr(settings, key) for key in ("share", "most", "held_out", "bits", "seed")},
        **{name: source.identity() for name, source in sources.items()},
    }
    with only_run_in(folder, "output"):
        settings.check_same(made_of, "already has a classifier")
        if (folder / REPORT).exists():
            notice(f"{folder} is already complete: see {(folder / REPORT).with_suffix('.html')}")
            return
        note(settings.record, made_of)
        sets = {name: _read(name, sources[name], settings) for name in _NAMES}
        numbers = " and ".join(f"{len(sets[name].train):,} {name}" for name in _NAMES)
        notice(f"training on {numbers} ({engine})")
        (_by_fasttext if engine == "fasttext" else _by_hashes)(sets, settings)
        write_text(folder / ABOUT, json.dumps({"engine": engine, "bits": settings.bits, "threshold": 0.5}) + "\n")
        scorer = load_scorer(str(folder))
        notice("measuring on held-out documents")
        scores = {name: np.array([scorer.score(text) for text in sets[name].held_out]) for name in _NAMES}
        threshold = _threshold(scores["negatives"], settings.share)
        write_text(folder / ABOUT, json.dumps({"engine": engine, "bits": settings.bits, "threshold": threshold}) + "\n")
        page = _report(settings, engine, sets, scores, threshold)
    notice(f"classifier in {folder}; report: {page}")


def _source(config: Mapping[str, Any], name: str, settings: Settings) -> Source:
    text = {"input": config[name], "data": {}, "kind": settings.kind, "text_key": settings.text_key}
    return sources_of(text, settings.folder, own=settings.folder / OWN / name)[name][0]


def _read(name: str, source: Source, settings: Settings) -> _Set:
    notice(f"reading {name}")
    texts = _Set()
    for text, digest in shuffled(source, texts.report, seed=f"{settings.seed} {name}"):
        held_out = split_position(settings.seed, digest.hex()) < settings.held_out * 2**64
        (texts.held_out if held_out else texts.train).append(text)
        if len(texts.train) + len(texts.held_out) >= settings.most:
            break
    source.finish(texts.report)
    if len(texts.train) < 2 or len(texts.held_out) < 2:
        raise ValueError(
            f"{name} has {len(texts.train)} training documents and {len(texts.held_out)} held-out documents, but at "
            "least 2 of each are required: provide more documents"
        )
    return texts


def _by_fasttext(sets: Mapping[str, _Set], settings: Settings) -> None:
    import fasttext

    labels = zip((WANTED, "other"), _NAMES, strict=True)
    texts = [(label, text) for label, name in labels for text in sets[name].train]
    order = np.random.default_rng(settings.seed).permutation(len(texts))
    with tempfile.TemporaryDirectory(dir=settings.folder) as place:
        file = Path(place) / "train.txt"
        with open(file, "w", encoding="utf-8") as out:
            for number in order:
                label, text = texts[number]
                out.write(f"__label__{label} {one_line(text)}\n")
        # One thread, as several give different weights each time. The rest is as in DCLM, except for small sets, which
        # need more than 5 epochs.
        epochs = max(5, min(100, _LEAST_STEPS // len(texts)))
        options = {"wordNgrams": 2, "epoch": epochs, "thread": 1, "seed": settings.seed, "verbose": 0}
        model = fasttext.train_supervised(str(file), **options)
        model.save_model(str(Path(place) / FASTTEXT))
        (Path(place) / FASTTEXT).rename(settings.folder / FASTTEXT)


def _by_hashes(sets: Mapping[str, _Set], settings: Settings) -> None:
    from scipy.sparse import csr_matrix
    from sklearn.linear_model import LogisticRegression

    rows = [features(text, settings.bits) for name in _NAMES for text in sets[name].train]
    ends = np.cumsum([0, *(len(numbers) for numbers, _ in rows)])
    values, columns = np.concatenate([row[1] for row in rows]), np.concatenate([row[0] for row in rows])
    matrix = csr_matrix((values, columns, ends), shape=(len(rows), 1 << settings.bits))
    wanted = np.repeat([1, 0], [len(sets[name].train) for name in _NAMES])
    model = LogisticRegression(C=10.0, max_iter=300, class_weight="balanced").fit(matrix, wanted)
    with complete_file(settings.folder / WEIGHTS) as out:
        np.savez_compressed(out, weights=model.coef_[0].astype(np.float32), bias=model.intercept_[0])


def _report(
    settings: Settings,
    engine: str,
    sets: Mapping[str, _Set],
    scores: Mapping[str, npt.NDArray[np.float64]],
    least: float,
) -> Path:
    """Write the report on a trained classifier; return the path of its HTML page."""
    from scipy.stats import mannwhitneyu

    positives, negatives = (scores[name] for name in _NAMES)
    count = len(positives) + len(negatives)
    area = float(mannwhitneyu(positives, negatives).statistic) / (len(positives) * len(negatives))
    about = {
        "engine": engine,
        **{name: f"{len(sets[name].train):,} for training, {len(sets[name].held_out):,} held out" for name in _NAMES},
        "recommended threshold": f"{least:.5f}, which keeps {np.mean(negatives >= least):.1%} of held-out negatives",
        "area under the ROC curve": f"{area:.4f}",
        "Brier score": f"{(np.sum((1 - positives) ** 2) + np.sum(negatives**2)) / count:.4f}",
    }
    thresholds = {"recommended": least, **{f"{value:g}": value for value in (0.1, 0.25, 0.5, 0.75, 0.9)}}
    rows = [(name, *_at(value, positives, negatives)) for name, value in thresholds.items()]
    bins = _reliability(positives, negatives)
    report = Report("Classifier").facts(about)
    _picture(report, scores, bins)
    note_on_rows = "On held-out documents, with precision computed as if positives and negatives were equally frequent."
    report.section("By threshold", note_on_rows).table("", ("threshold", "precision", "recall", "negatives kept"), rows)
    report.section("Calibration", "Share of positives among held-out documents by score.")
    tenths = [(f"{low:.1f}-{low + 0.1:.1f}", n, f"{mean:.3f}", f"{share:.3f}") for low, n, mean, share in bins]
    report.table("", ("score", "documents", "mean score", "positives"), tenths)
    report.section("Input", *(f"Skipped {name}: {sets[name].report.summary(examples=2)}." for name in _NAMES))
    return report.write(settings.folder / REPORT, page=True)


def _threshold(negatives: npt.NDArray[np.float64], share: float) -> float:
    """Return the lowest threshold that keeps at most a fraction `share` of the negatives."""
    above = np.sort(negatives)[::-1]
    first_out = above[min(int(share * len(above)), len(above) - 1)]
    return float(np.nextafter(first_out, np.inf))


def _at(least: float, positives: npt.NDArray[np.float64], negatives: npt.NDArray[np.float64]) -> tuple[str, str, str]:
    """Return precision, recall and share of negatives kept at threshold `least`, as text, given both sets' scores."""
    recall, kept = float((positives >= least).mean()), float((negatives >= least).mean())
    precision = recall / (recall + kept) if recall + kept else 0.0
    return f"{precision:.3f}", f"{recall:.3f}", f"{kept:.3f}"


def _reliability(
    positives: npt.NDArray[np.float64], negatives: npt.NDArray[np.float64]
) -> list[tuple[float, int, float, float]]:
    """Return (lower edge, documents, mean score, share of positives) for each non-empty tenth of the score range."""
    scores = np.concatenate([positives, negatives])
    is_positive = np.concatenate([np.ones(len(positives)), np.zeros(len(negatives))])
    tenth = np.minimum((scores * 10).astype(int), 9)
    rows = []
    for number in np.unique(tenth).tolist():
        here = tenth == number
        rows.append((number / 10, int(here.sum()), float(scores[here].mean()), float(is_positive[here].mean())))
    return rows


def _picture(
    report: Report, scores: Mapping[str, npt.NDArray[np.float64]], bins: list[tuple[float, int, float, float]]
) -> None:
    left, right = report.picture("calibration", PICTURE, 9, 3.5, columns=2)
    for name, values in scores.items():
        left.hist(values, bins=np.linspace(0, 1, 41).tolist(), alpha=0.6, label=name, density=True)
    right.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    right.plot([mean for _, _, mean, _ in bins], [share for *_, share in bins], marker="o")
    tidy(left, xlabel="score of held-out documents", legend=True)
    tidy(right, xlabel="mean score", ylabel="share of positives")
