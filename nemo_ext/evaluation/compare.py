"""Comparison of runs of `evaluate` with paired tests. Does not import torch.

Differences are paired by problem, over the requests that both runs have in common, using the scores in their stores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.evaluation.benchmark import read_yaml
from nemo_ext.evaluation.runs import (
    Answers,
    Name,
    Run,
    benchmark_is_low,
    counts,
    entries_of,
    names_of,
    read_run,
    values_of,
)
from nemo_ext.job import statistics
from nemo_ext.job.settings import STRICT, Count, Place, Places, PlacesOrNone, StringsOrNone, Whole, nearest
from nemo_ext.job.statistics import Difference, Floats

OFF = ("off", "no_think", "nothink", "thinking_off", "reasoning_off", "no_thinking", "no_reasoning")
"""Names of modes without reasoning, which come first in a pair of modes."""


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class CompareSettings:
    """Settings of `nemo-ext compare`, described in hydra_conf/compare.yaml."""

    runs: Places | Mapping[str, Place]
    baseline: Place | None = None
    paper: StringsOrNone = ()
    checkpoints: PlacesOrNone = ()
    benchmarks: StringsOrNone = ()
    output: Place = "runs/compare"
    level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    draws: Count = 10_000
    seed: Whole = 1234


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Paired comparison of two runs, or of two modes of one run, on a benchmark.

    Attributes:
        a, b: names of the two runs or modes; `difference` is b - a.
        before, after: headline metric of a and of b on the shared problems.
        difference: paired difference; None if there are no shared problems.
        p: p-value; `adjusted` adjusts it for the number of benchmarks compared.
        words: verdict: `better`, `worse`, `no difference shown` or `not compared`.
        tokens: mean tokens per answer of a and of b on the shared problems; None if not counted.
        cut: share of truncated answers of a and of b on the shared problems.
        note: exclusions and their reasons; "" if there are none.
        apart: difference on each problem, [P], for grand means; not written to compare.json.
    """

    benchmark: str
    a: str
    b: str
    before: float | None = None
    after: float | None = None
    difference: Difference | None = None
    p: float | None = None
    words: str = "not compared"
    tokens: tuple[float | None, float | None] = (None, None)
    cut: tuple[float | None, float | None] = (None, None)
    note: str = ""
    apart: Floats | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields for compare.json: all but the differences on each problem."""
        return {key: value for key, value in asdict(self).items() if key != "apart"}


def compare_runs(a: Run, b: Run, benchmark: str, settings: CompareSettings) -> Pair:
    """Compare two runs on a benchmark, in their first common mode, over the problems and prompts that both have."""
    names: Any = {"benchmark": benchmark, "a": a.name, "b": b.name}
    absent = [run.name for run in (a, b) if benchmark not in run.benchmarks]
    if absent:
        return Pair(**names, note=f"not evaluated in {', '.join(absent)}")
    metrics = [str(run.benchmarks[benchmark].get("metric")) for run in (a, b)]
    if metrics[0] != metrics[1] and not all(metric.startswith("avg@") for metric in metrics):
        return Pair(**names, note=f"headlines differ: {metrics[0]} and {metrics[1]}")
    if a.benchmarks[benchmark].get("verifier") != b.benchmarks[benchmark].get("verifier"):
        note = "scored by different verifiers, verifier settings or judges: evaluate one of the runs again"
        return Pair(**names, note=note)
    modes = [run.modes(benchmark) for run in (a, b)]
    if not (modes[0] and modes[1]):
        empty = [run.name for run, scored in zip((a, b), modes, strict=True) if not scored]
        return Pair(**names, note=f"no scored answers in the store of {', '.join(empty)}")
    mode = next((name for name in modes[0] if name in modes[1]), None)
    if mode is None:
        return Pair(**names, note=f"no mode in common: {', '.join(modes[0])} and {', '.join(modes[1])}")
    first, second = a.answers[benchmark][mode], b.answers[benchmark][mode]
    common = first.keys() & second.keys()
    identity = attrgetter("asked", "reference")
    shared = {name for name in common if identity(first[name]) == identity(second[name])}
    notes = []
    if differs := len(common) - len(shared):
        notes.append(f"{differs:,} with different requests or references")
    for run, alone in ((a, len(first.keys() - second.keys())), (b, len(second.keys() - first.keys()))):
        if alone:
            notes.append(f"{alone:,} only in {run.name}")
    if notes:
        notes = [f"{', '.join(notes)}: {len(shared):,} questions compared"]
    if any(mode != scored[0] for scored in modes):
        notes.append(f"in mode {mode}, which is not the first mode of both")
    if metrics[0] != metrics[1]:
        notes.append(f"{metrics[0]} and {metrics[1]}")
    low = benchmark_is_low(a.benchmarks[benchmark])
    both = [{name: answers[name] for name in shared} for answers in (first, second)]
    return _pair(both, metrics, settings, low=low, names=names, notes=notes)


def _pair(
    both: Sequence[Mapping[Name, Answers]],
    metrics: Sequence[str],
    settings: CompareSettings,
    *,
    low: bool,
    names: Mapping[str, Any],
    notes: list[str],
) -> Pair:
    a, b = (values_of(answers, metric) for answers, metric in zip(both, metrics, strict=True))
    problems = sorted(set(a.problems) & set(b.problems))
    if a.short or b.short:
        notes.append(f"{max(a.short, b.short):,} problems with too few samples excluded")
    if not problems:
        return Pair(**names, note="; ".join([*notes, "no problem in common"]))
    a, b = a.at(problems), b.at(problems)
    difference = statistics.difference(
        a.values,
        b.values,
        samples=max(a.samples, b.samples),
        draws=settings.draws,
        seed=settings.seed,
        level=settings.level,
        weights=a.weights,
    )
    if len(problems) < 2:
        notes.append("a single problem shows nothing")
    return Pair(
        **names,
        before=a.mean,
        after=b.mean,
        difference=difference,
        p=difference.p,
        words=_words(difference.mean, difference.p, settings.level, low=low),
        tokens=(statistics.known_mean(a.tokens), statistics.known_mean(b.tokens)),
        cut=(statistics.known_mean(a.cut), statistics.known_mean(b.cut)),
        note="; ".join(notes),
        apart=b.values - a.values,
    )


def _words(mean: float, p: float, level: float, *, low: bool) -> str:
    if p >= 1 - level or mean == 0:
        return "no difference shown"
    return "better" if (mean > 0) != low else "worse"


def adjusted(pairs: Sequence[Pair], entries: Mapping[str, Mapping[str, Any]], level: float) -> list[Pair]:
    """Adjust the pairs' p-values for the number of pairs (Holm), and update their verdicts accordingly.

    `entries` maps benchmarks to their entries in results.json; `level` is `CompareSettings.level`.
    """
    p_values = iter(statistics.holm([pair.difference.p for pair in pairs if pair.difference is not None]))
    updated = []
    for pair in pairs:
        if pair.difference is None:
            updated.append(pair)
            continue
        p, low = next(p_values), benchmark_is_low(entries[pair.benchmark])
        words = _words(pair.difference.mean, p, level, low=low)
        updated.append(Pair(**{**vars(pair), "p": p, "words": words}))
    return updated


def grand_pair(
    pairs: Sequence[Pair], entries: Mapping[str, Mapping[str, Any]], settings: CompareSettings
) -> Pair | None:
    """Compare two runs by their grand mean over shared benchmarks; return None for fewer than two benchmarks.

    The permutation test flips the sign of each problem's difference, weighted as in the grand mean. `entries` maps
    benchmarks to their entries in results.json.
    """
    used = [pair for pair in pairs if pair.apart is not None and counts(entries[pair.benchmark])]
    if len(used) < 2:
        return None
    weights = [float(entries[pair.benchmark].get("weight", 1)) for pair in used]
    parts = [pair.apart for pair in used if pair.apart is not None]
    total = sum(weights)
    mean, interval = statistics.grand_mean(
        parts, weights, draws=settings.draws, seed=settings.seed, level=settings.level
    )
    if interval is not None and interval[0] == interval[1]:  # equal differences: resampling shows nothing
        interval = None
    flipped = np.concatenate([part * weight / total / len(part) for part, weight in zip(parts, weights, strict=True)])
    p = statistics.permutation(flipped, draws=settings.draws, seed=settings.seed)
    before, after = (
        sum(weight * (value or 0.0) for weight, value in zip(weights, values, strict=True)) / total
        for values in zip(*((pair.before, pair.after) for pair in used), strict=True)
    )
    difference = Difference(
        mean=mean,
        interval=interval,
        p=p,
        test="permutation",
        problems=len(flipped),
        only_a=int((flipped < 0).sum()),
        only_b=int((flipped > 0).sum()),
    )
    return Pair(
        benchmark=f"grand mean of {len(used)}",
        a=used[0].a,
        b=used[0].b,
        before=before,
        after=after,
        difference=difference,
        p=p,
        words=_words(mean, p, settings.level, low=False),
    )


def compare_modes(run: Run, settings: CompareSettings) -> list[Pair]:
    """Compare a run's modes, such as reasoning off and on, on the same problems, with adjusted p-values.

    The first mode of a pair is the one without reasoning (named in `OFF`), as in Domyn-Small's Table 9, or else the
    headline's mode.
    """
    pairs = []
    for benchmark, entry in run.benchmarks.items():
        modes = sorted(run.modes(benchmark), key=lambda mode: mode.lower() not in OFF)
        metric = [str(entry.get("metric"))] * 2
        for mode in modes[1:]:
            first, second = (run.answers[benchmark][name] for name in (modes[0], mode))
            shared = first.keys() & second.keys()
            notes = []
            if alone := len(first.keys() ^ second.keys()):
                notes.append(f"{alone:,} questions in one mode only excluded")
            both = [{name: answers[name] for name in shared} for answers in (first, second)]
            names: Any = {"benchmark": benchmark, "a": modes[0], "b": mode}
            pairs.append(_pair(both, metric, settings, low=benchmark_is_low(entry), names=names, notes=notes))
    return adjusted(pairs, run.benchmarks, settings.level)


def noise(arms: Sequence[Run], checkpoints: Sequence[Run]) -> dict[str, statistics.SignalNoise]:
    """Map each benchmark to its signal (differences between `arms`) and noise (differences between `checkpoints`).

    `arms` are evaluations of the models to compare, and `checkpoints` are evaluations of a training run's last
    checkpoints. Benchmarks for which either has fewer than two results are omitted.
    """
    by_benchmark = {}
    for name in names_of(arms):
        ends, last = (
            [float(value) for run in runs if (value := run.benchmarks.get(name, {}).get("accuracy")) is not None]
            for runs in (arms, checkpoints)
        )
        if len(ends) > 1 and len(last) > 1:
            by_benchmark[name] = statistics.signal_and_noise(last, ends)
    return by_benchmark


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Results of a comparison.

    Attributes:
        runs: the runs, the baseline first.
        checkpoints: number of checkpoints from which the noise is estimated.
        pairs: mapping from run to its comparisons with the baseline, the grand mean last.
        modes: mapping from run to the comparisons of its modes.
        noise: mapping from benchmark to its signal and noise.
        papers: contents of the files with published values.
        level: coverage of intervals.
    """

    runs: Sequence[Run]
    checkpoints: int
    pairs: Mapping[str, Sequence[Pair]]
    modes: Mapping[str, Sequence[Pair]]
    noise: Mapping[str, statistics.SignalNoise]
    papers: Sequence[Mapping[str, Any]]
    level: float


def compared(settings: CompareSettings) -> Comparison:
    """Read the runs and compare them.

    Raises:
        ValueError: a run, the baseline, a paper or a benchmark does not exist.
    """
    papers = [published(name) for name in settings.paper]
    named = _named(settings.runs).items()
    runs = [read_run(Path(path).expanduser(), name, settings.benchmarks) for name, path in named]
    last = [read_run(Path(path).expanduser(), path, settings.benchmarks) for path in settings.checkpoints]
    if len(last) == 1:
        raise ValueError(
            f"checkpoints lists only {settings.checkpoints[0]}: list the evaluations of at least two of the last "
            "checkpoints of one training"
        )
    unknown = [name for name in settings.benchmarks if name not in names_of(runs)]
    if unknown:
        known = names_of([read_run(run.folder, run.name) for run in runs])
        raise ValueError(f"benchmarks: no run has {unknown[0]!r}: {nearest(unknown[0], known)}")
    if not names_of(runs):
        raise ValueError('runs: no run has results of any benchmark; see "Not evaluated" in their report.md')
    baseline = _baseline(runs, settings.baseline)
    runs.sort(key=lambda run: run is not baseline)
    entries = entries_of(runs)
    pairs = {}
    for run in runs[1:]:
        by_benchmark = [compare_runs(baseline, run, name, settings) for name in names_of(runs)]
        by_benchmark = adjusted(by_benchmark, entries, settings.level)
        grand = grand_pair(by_benchmark, entries, settings)
        pairs[run.name] = [*by_benchmark, grand] if grand else by_benchmark
    return Comparison(
        runs=runs,
        checkpoints=len(last),
        pairs=pairs,
        modes={run.name: modes for run in runs if (modes := compare_modes(run, settings))},
        noise=noise(runs, last),
        papers=papers,
        level=settings.level,
    )


def _named(runs: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Map names to run directories; unnamed runs are named by the shortest distinct ends of their paths."""
    if isinstance(runs, Mapping):
        return dict(runs)
    places = [Path(run).expanduser().resolve() for run in runs]
    for depth in range(1, 64):
        names = ["/".join(place.parts[-depth:]).lstrip("/") for place in places]
        if len(set(names)) == len(names):
            return dict(zip(names, runs, strict=True))
    twice = next(run for run, place in zip(runs, places, strict=True) if places.count(place) > 1)
    raise ValueError(f"runs lists {twice} twice: remove one")


def _baseline(runs: Sequence[Run], wanted: str | None) -> Run:
    if wanted is None:
        return runs[0]
    for run in runs:
        if wanted == run.name or Path(wanted).expanduser().resolve() == run.folder.resolve():
            return run
    raise ValueError(f"baseline={wanted} is not one of the runs: {nearest(wanted, [run.name for run in runs])}")


def published(name: str) -> Mapping[str, Any]:
    """Read a table of published values, given by name or path.

    Raises:
        ValueError: the table does not exist, or a value has no number or no location in the paper.
    """
    table = read_yaml("published", name)
    try:
        for model, published_model in table["models"].items():
            for benchmark, value in published_model["values"].items():
                if not value["where"] or not isinstance(value["value"], int | float):
                    raise ValueError(
                        f"paper={name}: models.{model}.values.{benchmark} requires a number in `value`, and its "
                        "location in the paper in `where`"
                    )
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            f"paper={name}: expected `models: {{MODEL: {{values: {{BENCHMARK: {{value, unit, where}}}}}}}}` in the file"
        ) from None
    return table
