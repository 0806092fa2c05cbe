"""Runs of `evaluate` side by side, with paired tests. No torch.

Differences are paired on what both runs were asked alike, by the scores in their stores.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field
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
from nemo_ext.job.settings import STRICT, Count, Place, PlacesOrNone, StringsOrNone, Whole, nearest
from nemo_ext.job.statistics import Difference, Floats

OFF = ("off", "no_think", "nothink", "thinking_off", "reasoning_off", "no_thinking", "no_reasoning")
"""Names of modes that are the first of a pair."""


def _listed(value: object) -> object:
    return (value,) if isinstance(value, str) else value


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class CompareSettings:
    """Settings of `nemo-ext compare`.

    Attributes:
        runs: run directories of `evaluate`, or a mapping from names to them.
        baseline: name or path of the run that others are compared with; None takes the first.
        paper: names of `hydra_conf/published`, or paths to such files.
        checkpoints: runs of the last checkpoints of one training, which say how much scores differ by chance.
        benchmarks: the only ones to compare; empty for all.
        output: folder of the comparison.
        level: coverage of intervals; a difference is shown if its p value is below 1 - level.
        draws: draws of bootstrap and permutations.
        seed: their seed.
    """

    runs: Annotated[tuple[Place, ...] | Mapping[str, Place], BeforeValidator(_listed)]
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
    """Two runs, or two modes of one, on what both were asked.

    Attributes:
        benchmark: name of the benchmark.
        a, b: names of the two; `difference` is b - a.
        before, after: headline of each on the shared problems.
        difference: the paired difference; None where nothing is shared.
        p: p value, adjusted for the benchmarks that are compared with it.
        words: `better`, `worse`, `no difference shown` or `not compared`.
        tokens: mean tokens of each on the shared problems; None where not counted.
        cut: share of the answers of each that were cut off, on the shared problems.
        note: what was left out, and why; "" for nothing.
        apart: differences by problem, [P], for grand means; not written.
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
        """All but the differences by problem."""
        return {key: value for key, value in asdict(self).items() if key != "apart"}


def compare_runs(a: Run, b: Run, benchmark: str, given: CompareSettings) -> Pair:
    """Two runs on a benchmark, in its first mode, on the problems and prompts that both were asked alike."""
    names: Any = {"benchmark": benchmark, "a": a.name, "b": b.name}
    absent = [run.name for run in (a, b) if benchmark not in run.benchmarks]
    if absent:
        return Pair(**names, note=f"not evaluated in {', '.join(absent)}")
    metrics = [str(run.benchmarks[benchmark].get("metric")) for run in (a, b)]
    alike = metrics[0] == metrics[1] or all(metric.startswith("avg@") for metric in metrics)
    if not alike:
        return Pair(**names, note=f"headlines differ: {metrics[0]} and {metrics[1]}")
    if a.benchmarks[benchmark].get("verifier") != b.benchmarks[benchmark].get("verifier"):
        return Pair(**names, note="scored by other verifiers, settings or judges: evaluate one of them again")
    modes = [run.modes(benchmark) for run in (a, b)]
    if not (modes[0] and modes[1]):
        empty = [run.name for run, there in zip((a, b), modes, strict=True) if not there]
        return Pair(**names, note=f"no scored answers in the store of {', '.join(empty)}")
    mode = next((each for each in modes[0] if each in modes[1]), None)
    if mode is None:
        return Pair(**names, note=f"asked in other modes: {', '.join(modes[0])} and {', '.join(modes[1])}")
    one, other = a.answers[benchmark][mode], b.answers[benchmark][mode]
    shared = {name for name in one.keys() & other.keys() if _same(one[name], other[name])}
    notes = []
    if differs := len(one.keys() & other.keys()) - len(shared):
        notes.append(f"{differs:,} asked differently")
    for run, alone in ((a, len(one.keys() - other.keys())), (b, len(other.keys() - one.keys()))):
        if alone:
            notes.append(f"{alone:,} only in {run.name}")
    if notes:
        notes = [f"{', '.join(notes)}: {len(shared):,} questions compared"]
    if any(mode != each[0] for each in modes):
        notes.append(f"in mode {mode}, which is not the first of both")
    if metrics[0] != metrics[1]:
        notes.append(f"{metrics[0]} and {metrics[1]}")
    low = benchmark_is_low(a.benchmarks[benchmark])
    both = [{name: answers[name] for name in shared} for answers in (one, other)]
    return _pair(both, metrics, given, low=low, names=names, notes=notes)


def _same(one: Answers, other: Answers) -> bool:
    """Whether the request and what is right are the same."""
    return one.asked == other.asked and one.reference == other.reference


def _pair(
    both: Sequence[Mapping[Name, Answers]],
    metrics: Sequence[str],
    given: CompareSettings,
    *,
    low: bool,
    names: Mapping[str, Any],
    notes: list[str],
) -> Pair:
    one, other = (values_of(answers, metric) for answers, metric in zip(both, metrics, strict=True))
    problems = sorted(set(one.problems) & set(other.problems))
    if one.short or other.short:
        notes.append(f"{max(one.short, other.short):,} problems with too few samples left out")
    if not problems:
        return Pair(**names, note="; ".join([*notes, "no problem was asked alike in both"]))
    one, other = one.at(problems), other.at(problems)
    found = statistics.difference(
        one.values,
        other.values,
        samples=max(one.samples, other.samples),
        draws=given.draws,
        seed=given.seed,
        level=given.level,
        weights=one.weights,
    )
    if len(problems) < 2:
        notes.append("one problem shows nothing")
    return Pair(
        **names,
        before=one.mean,
        after=other.mean,
        difference=found,
        p=found.p,
        words=_words(found.mean, found.p, given.level, low=low),
        tokens=(statistics.known_mean(one.tokens), statistics.known_mean(other.tokens)),
        cut=(statistics.known_mean(one.cut), statistics.known_mean(other.cut)),
        note="; ".join(notes),
        apart=other.values - one.values,
    )


def _words(mean: float, p: float, level: float, *, low: bool) -> str:
    if p >= 1 - level or mean == 0:
        return "no difference shown"
    return "better" if (mean > 0) != low else "worse"


def adjusted(pairs: Sequence[Pair], entries: Mapping[str, Mapping[str, Any]], level: float) -> list[Pair]:
    """The pairs with p values adjusted for their number (Holm), and words by these."""
    known = [pair for pair in pairs if pair.difference is not None]
    new = iter(statistics.holm([pair.difference.p for pair in known if pair.difference is not None]))
    found = []
    for pair in pairs:
        if pair.difference is None:
            found.append(pair)
            continue
        p, low = next(new), benchmark_is_low(entries[pair.benchmark])
        words = _words(pair.difference.mean, p, level, low=low)
        found.append(Pair(**{**vars(pair), "p": p, "words": words}))
    return found


def grand_pair(pairs: Sequence[Pair], entries: Mapping[str, Mapping[str, Any]], given: CompareSettings) -> Pair | None:
    """The grand mean of two runs over the benchmarks that both have; None for fewer than two.

    Signs are flipped by problem, each with the weight that it has in the grand mean.
    """
    used = [pair for pair in pairs if pair.apart is not None and counts(entries[pair.benchmark])]
    if len(used) < 2:
        return None
    weights = [float(entries[pair.benchmark].get("weight", 1)) for pair in used]
    parts = [pair.apart for pair in used if pair.apart is not None]
    total = sum(weights)
    mean, interval = statistics.grand_mean(parts, weights, draws=given.draws, seed=given.seed, level=given.level)
    if interval is not None and interval[0] == interval[1]:  # all problems differ alike: draws say nothing
        interval = None
    flipped = np.concatenate([part * weight / total / len(part) for part, weight in zip(parts, weights, strict=True)])
    p = statistics.permutation(flipped, draws=given.draws, seed=given.seed)
    ends = [sum(w * float(v) for w, v in zip(weights, e, strict=True)) / total for e in zip(*_ends(used), strict=True)]
    apart = Difference(
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
        before=ends[0],
        after=ends[1],
        difference=apart,
        p=p,
        words=_words(mean, p, given.level, low=False),
    )


def _ends(pairs: Iterable[Pair]) -> list[tuple[float, float]]:
    return [(pair.before or 0.0, pair.after or 0.0) for pair in pairs]


def compare_modes(run: Run, given: CompareSettings) -> list[Pair]:
    """Pairs of modes of a run on the same problems, such as reasoning off and on, adjusted for their number.

    One that is called `off`, `no_think` or alike is the first of a pair, as in Domyn-Small's Table 9; else the
    headline's.
    """
    pairs = []
    for benchmark, entry in run.benchmarks.items():
        modes = sorted(run.modes(benchmark), key=lambda mode: mode.lower() not in OFF)
        metric = [str(entry.get("metric"))] * 2
        for mode in modes[1:]:
            one, other = (run.answers[benchmark][each] for each in (modes[0], mode))
            shared = one.keys() & other.keys()
            notes = []
            if alone := len(one.keys() ^ other.keys()):
                notes.append(f"{alone:,} questions of one mode alone left out")
            both = [{name: answers[name] for name in shared} for answers in (one, other)]
            names: Any = {"benchmark": benchmark, "a": modes[0], "b": mode}
            pairs.append(_pair(both, metric, given, low=benchmark_is_low(entry), names=names, notes=notes))
    return adjusted(pairs, run.benchmarks, given.level)


def noise(arms: Sequence[Run], checkpoints: Sequence[Run]) -> dict[str, statistics.SignalNoise]:
    """Differences between runs beside those between the last checkpoints of one training, by benchmark."""
    found = {}
    for name in names_of(arms):
        ends, last = (
            [float(run.benchmarks[name]["accuracy"]) for run in runs if _accuracy(run, name) is not None]
            for runs in (arms, checkpoints)
        )
        if len(ends) > 1 and len(last) > 1:
            found[name] = statistics.signal_and_noise(last, ends)
    return found


def _accuracy(run: Run, name: str) -> float | None:
    return run.benchmarks.get(name, {}).get("accuracy")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison has found.

    Attributes:
        runs: the runs, the baseline first.
        checkpoints: number of runs that say how much scores differ by chance.
        pairs: run -> its pairs with the baseline, the grand mean last.
        modes: run -> pairs of its modes.
        noise: benchmark -> differences between runs beside those between checkpoints.
        papers: published values, as the files have them.
        level: coverage of intervals.
    """

    runs: Sequence[Run]
    checkpoints: int
    pairs: Mapping[str, Sequence[Pair]]
    modes: Mapping[str, Sequence[Pair]]
    noise: Mapping[str, statistics.SignalNoise]
    papers: Sequence[Mapping[str, Any]]
    level: float


def compared(given: CompareSettings) -> Comparison:
    """Read the runs and compare them.

    Raises:
        ValueError: a run, the baseline or the paper is not there, or no benchmark is.
    """
    papers = [published(name) for name in given.paper]
    runs = [read_run(Path(path).expanduser(), name, given.benchmarks) for name, path in _named(given.runs).items()]
    last = [read_run(Path(path).expanduser(), path, given.benchmarks) for path in given.checkpoints]
    if len(last) == 1:
        raise ValueError("checkpoints: give two runs at least, of the last checkpoints of one training")
    unknown = [name for name in given.benchmarks if name not in names_of(runs)]
    if unknown:
        there = names_of([read_run(run.folder, run.name) for run in runs])
        raise ValueError(f"benchmarks: no run has {unknown[0]!r}: {nearest(unknown[0], there)}")
    if not names_of(runs):
        raise ValueError("runs: none has results of a benchmark; its report.md says what was missing")
    baseline = _baseline(runs, given.baseline)
    runs.sort(key=lambda run: run is not baseline)
    entries = entries_of(runs)
    pairs = {}
    for run in runs[1:]:
        found = [compare_runs(baseline, run, name, given) for name in names_of(runs)]
        found = adjusted(found, entries, given.level)
        grand = grand_pair(found, entries, given)
        pairs[run.name] = [*found, grand] if grand else found
    return Comparison(
        runs=runs,
        checkpoints=len(last),
        pairs=pairs,
        modes={run.name: found for run in runs if (found := compare_modes(run, given))},
        noise=noise(runs, last),
        papers=papers,
        level=given.level,
    )


def _named(runs: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Runs by short names that differ."""
    if isinstance(runs, Mapping):
        return dict(runs)
    for depth in range(1, 64):
        names = ["/".join(Path(run).expanduser().resolve().parts[-depth:]).lstrip("/") for run in runs]
        if len(set(names)) == len(names):
            return dict(zip(names, runs, strict=True))
    raise ValueError("runs: one of them is there twice")


def _baseline(runs: Sequence[Run], wanted: str | None) -> Run:
    if wanted is None:
        return runs[0]
    for run in runs:
        if wanted == run.name or Path(wanted).expanduser().resolve() == run.folder.resolve():
            return run
    raise ValueError(f"baseline={wanted}: is none of the runs: {nearest(wanted, [run.name for run in runs])}")


def published(name: str) -> Mapping[str, Any]:
    """A table of published values, by its name or path.

    Raises:
        ValueError: there is none, or a value lacks its place in the paper.
    """
    found = read_yaml("published", name)
    try:
        for model, one in found["models"].items():
            for benchmark, value in one["values"].items():
                if not value["where"] or not isinstance(value["value"], int | float):
                    raise ValueError(f"paper={name}: {model}: {benchmark}: wants a number and where it stands")
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            f"paper={name}: expected models: {{MODEL: {{values: {{BENCHMARK: {{value, unit, where}}}}}}}}"
        ) from None
    return found
