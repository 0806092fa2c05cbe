"""Results of the small runs: the report, its plot, and the numbers as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_ext.job.files import write_text
from nemo_ext.job.report import Report, tidy
from nemo_ext.job.run_directory import REPORT
from nemo_ext.mixture.law import Law, Quality, quality
from nemo_ext.mixture.sampling import Shares

RESULT, PICTURE = "mixture.json", "mixture.png"
_GOOD = 0.5
"""Predictions are trusted if their error is below this fraction of the runs' spread."""
_BLUE, _ORANGE, _GREY = "#1f77b4", "#d95f02", "#999999"


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of the job: runs, laws and the optimum.

    Attributes:
        streams, tasks, names: names of streams, benchmarks and runs; the first run is the prior.
        sizes, prior, best, highest: tokens, prior share, optimal share and maximum share of each stream.
        others: optima according to the laws of the folds, [folds, streams].
        weights: weights of the benchmarks in their mean.
        shares, values: mixtures [runs, streams] and bits per byte [runs, tasks].
        laws, quality: law and quality for each benchmark.
        tokens, target: number of tokens in a small run, and in the target run.
        run: folder of the run on the optimum.
        measured: bits per byte of the run on the optimum, [tasks]; None before this run.
    """

    streams: Sequence[str]
    sizes: Shares
    prior: Shares
    best: Shares
    highest: Shares
    others: Shares
    tasks: Sequence[str]
    weights: Shares
    names: Sequence[str]
    shares: Shares
    values: Shares
    laws: Sequence[Law]
    quality: Sequence[Quality]
    tokens: int
    target: float | None
    run: str
    measured: Shares | None = None

    @property
    def predicted(self) -> Shares:
        """Bits per byte predicted for the optimum, [tasks]."""
        return np.array([float(law.at(self.best)) for law in self.laws])

    @property
    def mean_quality(self) -> Quality:
        """Quality of the predictions for the mean over benchmarks."""
        predicted = np.stack([task.predicted for task in self.quality], axis=1)
        return quality(predicted @ self.weights, self.values @ self.weights)


def verdict(results: Results) -> str:
    """Return a sentence that states the predicted and measured mean loss."""
    before, after = float(results.values[0] @ results.weights), float(results.predicted @ results.weights)
    text = f"Mean bits per byte of small runs: {before:.4f} on the prior, {after:.4f} predicted for the optimum"
    if results.measured is not None:
        text += f", {float(results.measured @ results.weights):.4f} measured"
    return f"{text} (error of predictions {results.mean_quality.error:.4f})"


def doubt(results: Results) -> str | None:
    """Return a reason not to trust the optimum; None if the laws predict runs much better than the runs' mean does."""
    error, spread = results.mean_quality.error, results.mean_quality.spread
    if error < _GOOD * spread:
        return None
    return (
        f"The laws predict runs hardly better than the mean of all runs does (error {error:.4f}, spread {spread:.4f}), "
        "so the optimum is a guess. Use longer runs, more runs or larger benchmarks"
    )


def write(results: Results, folder: Path) -> Path:
    """Write the report, as Markdown and HTML, and its numbers as JSON; return the report's path."""
    assert results.measured is not None
    write_text(folder / RESULT, json.dumps(_as_json(results), indent=1) + "\n")
    return _page(results).write(folder / REPORT, page=True)


def _as_json(results: Results) -> dict[str, object]:
    assert results.measured is not None

    def by_stream(values: Shares) -> dict[str, float]:
        return dict(zip(results.streams, values.tolist(), strict=True))

    optimum = zip(results.tasks, results.values[0], results.predicted, results.measured, strict=True)
    laws, runs = (
        zip(results.tasks, results.laws, results.quality, strict=True),
        zip(results.shares, results.values, strict=True),
    )
    return {
        "mixture": by_stream(results.best),
        "prior": by_stream(results.prior),
        "tokens": by_stream(results.sizes),
        "bits_per_byte": {
            task: dict(zip(("prior", "predicted", "measured"), map(float, values), strict=True))
            for task, *values in optimum
        },
        "laws": {
            task: {"constant": law.constant, "slopes": by_stream(law.slopes), "held_out_error": quality.error}
            for task, law, quality in laws
        },
        "runs": {
            name: {
                "mixture": by_stream(shares),
                "bits_per_byte": dict(zip(results.tasks, values.tolist(), strict=True)),
            }
            for name, (shares, values) in zip(results.names, runs, strict=True)
        },
    }


def _page(results: Results) -> Report:
    assert results.measured is not None
    length = results.target or results.tokens
    streams = [
        [
            name,
            f"{results.sizes[place]:,.0f}",
            f"{100 * results.prior[place]:.2f}",
            f"{100 * results.best[place]:.2f}",
            f"{100 * results.others[:, place].min():.1f} to {100 * results.others[:, place].max():.1f}",
            f"{100 * results.highest[place]:.1f}",
            f"{results.best[place] * length / results.sizes[place]:.3g}",
        ]
        for place, name in enumerate(results.streams)
    ]
    columns = (results.tasks, results.values[0], results.predicted, results.measured, results.quality)
    rows = [_row(task, *values, quality=quality) for task, *values, quality in zip(*columns, strict=True)]
    means = (float(values @ results.weights) for values in (results.values[0], results.predicted, results.measured))
    rows.append(_row("mean", *means, quality=results.mean_quality))
    run = "the target run" if results.target else "a small run"
    weights = ", ".join(f"{task} {weight:.3g}" for task, weight in zip(results.tasks, results.weights, strict=True))
    reason = doubt(results)
    report = Report(f"Mixture of {len(results.streams)} streams", f"{verdict(results)}.", reason and f"**{reason}.**")
    report.add(
        f"{len(results.names)} runs of {results.tokens:,} tokens, including the prior, and one on the optimum "
        f"([{results.run}]({results.run}/report.md)). {_best_sample(results)}"
    )
    _picture(report, results)
    heading = ("stream", "tokens", "prior %", "optimum %", "by folds of the runs", "at most %", "passes")
    note = f"Passes are for {run} of {length:,.0f} tokens. As a data file: `--config-dir=OUTPUT/conf data=mixture`."
    report.table("Shares", heading, streams, note)
    heading = ("benchmark", "prior", "optimum, predicted", "optimum, measured", "change", "error", "spread")
    note = (
        "Error is the root mean squared error of predictions for held-out runs, spread the standard deviation of the "
        "runs: a law is useful if its error is much smaller than the spread. A change smaller than the error may be "
        "due to chance." + (f" Weights in the mean: {weights}." if np.ptp(results.weights) else "")
    )
    return report.table("Bits per byte", (*heading, "rank correlation"), rows, note)


def _best_sample(results: Results) -> str:
    """Return a sentence about the best run on the prior or a sampled mixture, which the optimum should beat."""
    means = results.values @ results.weights
    place = int(means.argmin())
    shares = zip(results.streams, results.shares[place], strict=True)
    mixture = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares if share)
    return f"The best other run is {results.names[place]} with {means[place]:.4f} ({mixture})."


def _row(name: str, prior: float, predicted: float, measured: float, *, quality: Quality) -> list[str]:
    numbers = (prior, predicted, measured, quality.error, quality.spread)
    *values, error, spread = (f"{number:.4f}" for number in numbers)
    return [name, *values, f"{measured - prior:+.4f}", error, spread, f"{quality.rank:.2f}"]


def _picture(report: Report, results: Results) -> None:
    """Draw prior and optimal shares, predicted against measured means, and slopes by stream and benchmark."""
    assert results.measured is not None
    count = len(results.streams)
    height = max(4.5, 1.5 + 0.28 * max(count, len(results.tasks)))
    left, middle, right = report.picture("shares", PICTURE, 15, height, columns=3)
    places = np.arange(count)
    left.barh(places - 0.2, 100 * results.prior, 0.4, color=_GREY, label="prior")
    left.barh(places + 0.2, 100 * results.best, 0.4, color=_BLUE, label="optimum")
    left.set_yticks(places, results.streams)
    left.invert_yaxis()
    legend = {"ncols": 2, "loc": "lower right", "bbox_to_anchor": (1, 1)}
    tidy(left, grid="x", title="shares", xlabel="share (%)", legend=legend)
    predicted, values = results.mean_quality.predicted, results.values @ results.weights
    best = float(results.predicted @ results.weights), float(results.measured @ results.weights)
    ends = [min(*predicted, *values, *best), max(*predicted, *values, *best)]
    middle.plot(ends, ends, "--", color=_GREY, linewidth=1)
    middle.plot(predicted[1:], values[1:], "o", color=_BLUE, markersize=4, label="samples")
    middle.plot(predicted[0], values[0], "s", color="black", markersize=6, label="prior")
    middle.plot(*best, "*", color=_ORANGE, markersize=12, label="optimum")
    label = "predicted by laws of other runs (bits per byte)"
    tidy(middle, title="mean of the benchmarks", xlabel=label, ylabel="measured", legend=True)
    # Derivative at the prior, when a stream's share grows at the expense of all streams in proportion.
    slopes = np.stack(
        [(law.slopes - results.prior @ law.slopes) * np.exp(results.prior @ law.slopes) for law in results.laws]
    )
    most = float(np.abs(slopes).max()) or 1.0
    image = right.imshow(slopes, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    right.set_xticks(places, results.streams, rotation=45, ha="right", fontsize=8)
    right.set_yticks(range(len(results.tasks)), results.tasks, fontsize=8)
    right.set_title("bits per byte by a stream's share, at the prior (blue: less)", loc="left", fontsize=10)
    right.figure.colorbar(image, ax=right)
