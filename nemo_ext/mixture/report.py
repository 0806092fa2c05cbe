"""What a swarm of small runs found: the report, its picture, and the numbers as JSON."""

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
"""Share of the runs' spread below which an error of predictions is small."""
_BLUE, _ORANGE, _GREY = "#1f77b4", "#d95f02", "#999999"


@dataclass(frozen=True, kw_only=True)
class Found:
    """Runs, laws and the optimum.

    Attributes:
        streams, tasks, names: names of streams, benchmarks and runs, of which the first is the prior's.
        sizes, prior, best, highest: tokens, prior share, best share and most share of each stream.
        others: the optima of laws fitted to parts of the runs, [folds, streams].
        weights: weights of the benchmarks in their mean.
        shares, values: mixtures [runs, streams] and bits per byte [runs, tasks].
        laws, quality: of each benchmark.
        tokens, target: tokens of a small run, and of the run that the mixture is for.
        run: folder of the run on the optimum.
        measured: bits per byte of that run, [tasks]; None before it.
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
        """Bits per byte on the optimum by the laws, [tasks]."""
        return np.array([float(law.at(self.best)) for law in self.laws])

    @property
    def mean_quality(self) -> Quality:
        """How well the mean of the benchmarks is foreseen."""
        predicted = np.stack([each.predicted for each in self.quality], axis=1)
        return quality(predicted @ self.weights, self.values @ self.weights)


def verdict(found: Found) -> str:
    """Predicted and measured mean loss in one line."""
    before, after = float(found.values[0] @ found.weights), float(found.predicted @ found.weights)
    text = f"Mean bits per byte of small runs: {before:.4f} on the prior, {after:.4f} predicted for the optimum"
    if found.measured is not None:
        text += f", {float(found.measured @ found.weights):.4f} measured"
    return f"{text} (error of predictions {found.mean_quality.error:.4f})"


def doubt(found: Found) -> str | None:
    """Why the optimum is not to be trusted; None if predictions are much better than the mean of the runs."""
    error, spread = found.mean_quality.error, found.mean_quality.spread
    if error < _GOOD * spread:
        return None
    return (
        f"The laws foresee runs hardly better than the mean of all does (error {error:.4f}, spread {spread:.4f}): the "
        "optimum is a guess. Longer runs, more of them or larger benchmarks help"
    )


def write(found: Found, folder: Path) -> Path:
    """Write the report and what it is made of; returns the page."""
    assert found.measured is not None
    write_text(folder / RESULT, json.dumps(_as_json(found), indent=1) + "\n")
    return _page(found).write(folder / REPORT, page=True)


def _as_json(found: Found) -> dict[str, object]:
    assert found.measured is not None

    def by_stream(values: Shares) -> dict[str, float]:
        return dict(zip(found.streams, values.tolist(), strict=True))

    best = zip(found.tasks, found.values[0], found.predicted, found.measured, strict=True)
    laws, runs = zip(found.tasks, found.laws, found.quality, strict=True), zip(found.shares, found.values, strict=True)
    return {
        "mixture": by_stream(found.best),
        "prior": by_stream(found.prior),
        "tokens": by_stream(found.sizes),
        "bits_per_byte": {
            task: dict(zip(("prior", "predicted", "measured"), map(float, values), strict=True))
            for task, *values in best
        },
        "laws": {
            task: {"constant": law.constant, "slopes": by_stream(law.slopes), "held_out_error": of.error}
            for task, law, of in laws
        },
        "runs": {
            name: {
                "mixture": by_stream(shares),
                "bits_per_byte": dict(zip(found.tasks, values.tolist(), strict=True)),
            }
            for name, (shares, values) in zip(found.names, runs, strict=True)
        },
    }


def _page(found: Found) -> Report:
    assert found.measured is not None
    length = found.target or found.tokens
    streams = [
        [
            name,
            f"{found.sizes[place]:,.0f}",
            f"{100 * found.prior[place]:.2f}",
            f"{100 * found.best[place]:.2f}",
            f"{100 * found.others[:, place].min():.1f} to {100 * found.others[:, place].max():.1f}",
            f"{100 * found.highest[place]:.1f}",
            f"{found.best[place] * length / found.sizes[place]:.3g}",
        ]
        for place, name in enumerate(found.streams)
    ]
    columns = (found.tasks, found.values[0], found.predicted, found.measured, found.quality)
    rows = [_row(task, *values, of=of) for task, *values, of in zip(*columns, strict=True)]
    means = (float(values @ found.weights) for values in (found.values[0], found.predicted, found.measured))
    rows.append(_row("mean", *means, of=found.mean_quality))
    of = "the run that it is for" if found.target else "a small run"
    weights = ", ".join(f"{task} {weight:.3g}" for task, weight in zip(found.tasks, found.weights, strict=True))
    why = doubt(found)
    report = Report(f"Mixture of {len(found.streams)} streams", f"{verdict(found)}.", why and f"**{why}.**")
    report.add(
        f"{len(found.names)} runs of {found.tokens:,} tokens, the prior's among them, and one on the optimum "
        f"([{found.run}]({found.run}/report.md)). {_best_sample(found)}"
    )
    _picture(report, found)
    heading = ("stream", "tokens", "prior %", "optimum %", "by parts of the runs", "at most %", "passes")
    note = f"Passes are those of {of}, {length:,.0f} tokens. As a data file: `--config-dir=OUTPUT/conf data=mixture`."
    report.table("Shares", heading, streams, note)
    heading = ("benchmark", "prior", "optimum, predicted", "optimum, measured", "change", "error", "spread")
    note = (
        "Error is the root of the mean squared error of predictions for runs that the law was not fitted to, "
        "spread the standard deviation of the runs themselves: a law is of use where its error is much smaller. A "
        "change smaller than the error may be chance."
        + (f" Weights in the mean: {weights}." if np.ptp(found.weights) else "")
    )
    return report.table("Bits per byte", (*heading, "rank correlation"), rows, note)


def _best_sample(found: Found) -> str:
    """The best of the sampled mixtures, which the optimum has to beat."""
    means = found.values @ found.weights
    place = int(means.argmin())
    shares = zip(found.streams, found.shares[place], strict=True)
    told = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares if share)
    return f"The best of the others is {found.names[place]} with {means[place]:.4f} ({told})."


def _row(name: str, prior: float, predicted: float, measured: float, *, of: Quality) -> list[str]:
    values = [f"{value:.4f}" for value in (prior, predicted, measured)]
    return [name, *values, f"{measured - prior:+.4f}", f"{of.error:.4f}", f"{of.spread:.4f}", f"{of.rank:.2f}"]


def _picture(report: Report, found: Found) -> None:
    """Draws shares before and after, predicted against measured means, and slopes by stream and benchmark."""
    assert found.measured is not None
    count = len(found.streams)
    height = max(4.5, 1.5 + 0.28 * max(count, len(found.tasks)))
    left, middle, right = report.picture("shares", PICTURE, 15, height, columns=3)
    places = np.arange(count)
    left.barh(places - 0.2, 100 * found.prior, 0.4, color=_GREY, label="prior")
    left.barh(places + 0.2, 100 * found.best, 0.4, color=_BLUE, label="optimum")
    left.set_yticks(places, found.streams)
    left.invert_yaxis()
    legend = {"ncols": 2, "loc": "lower right", "bbox_to_anchor": (1, 1)}
    tidy(left, grid="x", title="shares", xlabel="share (%)", legend=legend)
    own, values = found.mean_quality.predicted, found.values @ found.weights
    best = float(found.predicted @ found.weights), float(found.measured @ found.weights)
    ends = [min(*own, *values, *best), max(*own, *values, *best)]
    middle.plot(ends, ends, "--", color=_GREY, linewidth=1)
    middle.plot(own[1:], values[1:], "o", color=_BLUE, markersize=4, label="samples")
    middle.plot(own[0], values[0], "s", color="black", markersize=6, label="prior")
    middle.plot(*best, "*", color=_ORANGE, markersize=12, label="optimum")
    label = "predicted by laws of other runs (bits per byte)"
    tidy(middle, title="mean of the benchmarks", xlabel=label, ylabel="measured", legend=True)
    # What a benchmark loses or gains, near the prior, by more of a stream in place of the average of all.
    slopes = np.stack(
        [(law.slopes - found.prior @ law.slopes) * np.exp(found.prior @ law.slopes) for law in found.laws]
    )
    most = float(np.abs(slopes).max()) or 1.0
    image = right.imshow(slopes, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    right.set_xticks(places, found.streams, rotation=45, ha="right", fontsize=8)
    right.set_yticks(range(len(found.tasks)), found.tasks, fontsize=8)
    right.set_title("bits per byte by a stream's share, at the prior (blue: less)", loc="left", fontsize=10)
    right.figure.colorbar(image, ax=right)
