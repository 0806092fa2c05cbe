"""The job `nemo-ext merge_sweep`: averages of checkpoints, each evaluated, and the one that is chosen.

merges/NAME        an average; a Hugging Face folder that stands alone is used where it is
evaluations/NAME   its run of `nemo-ext evaluate`
compare/           the others beside the chosen one, with paired tests (`nemo-ext compare`)
chosen             link to the chosen checkpoint
report.md, front.json, front.png
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic.dataclasses import dataclass as checked_dataclass

from nemo_ext.checkpoint.beside import is_hugging_face
from nemo_ext.checkpoint.merge import Plan, Settings, merge, plan
from nemo_ext.evaluation import compare_page, job
from nemo_ext.evaluation.report import figure, measured
from nemo_ext.evaluation.runs import benchmark_is_low, counts
from nemo_ext.evaluation.settings import EvaluateSettings
from nemo_ext.evaluation.store import BITS, RESULTS
from nemo_ext.job.files import only_run_in, write_text
from nemo_ext.job.made_of import note
from nemo_ext.job.progress import notice
from nemo_ext.job.report import COLOURS, Report, markdown_table, tidy
from nemo_ext.job.run_directory import OWN, REPORT
from nemo_ext.job.settings import REPLACED, STRICT, Strings, checked, nearest, strings

PLOT, FRONT, CHOSEN = "front.png", "front.json", "chosen"
_NONE_COUNTS = "sweep.objectives: no benchmark counts in a grand mean: name those that do"
_EVALUATED = "evaluated.json"
_OF_MODEL = ("serving", "files_from", "trust_remote_code", "evaluate")


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class SweepSettings:
    """Settings of the section `sweep`.

    Attributes:
        points: values t of (1 - t) a + t b, for two checkpoints.
        mixtures: weights of the checkpoints, a list each, beside the points.
        iterations, shard_gigabytes, check_finite, verify: as in `nemo-ext merge`.
        objectives: names of objectives, each the mean of its benchmarks; empty for each benchmark by itself.
        at_least: least value of objectives, from 0 to 1, that the chosen average must have.
    """

    points: Sequence[float] = ()
    mixtures: Sequence[Sequence[float]] = ()
    iterations: Sequence[int | None] | None = None
    shard_gigabytes: float = 5
    check_finite: bool = True
    verify: bool = True
    objectives: Annotated[Mapping[str, Strings], REPLACED] = field(default_factory=dict)
    at_least: Annotated[Mapping[str, float], REPLACED] = field(default_factory=dict)

    def weights(self, count: int) -> dict[str, list[float]]:
        """Weights of each average of `count` checkpoints, by its name.

        Raises:
            ValueError: they are not of so many, or two have one name.
        """
        if self.points and count != 2:
            raise ValueError(f"sweep.points: a line has two ends, from has {count} checkpoints: give sweep.mixtures")
        for mixture in self.mixtures:
            if len(mixture) != count:
                raise ValueError(f"sweep.mixtures: {list(mixture)}: {len(mixture)} weights for {count} checkpoints")
        every = [(f"t{point + 0.0:g}", [1 - point, point]) for point in self.points]
        every += [("w" + "_".join(f"{one:g}" for one in mixture), list(mixture)) for mixture in self.mixtures]
        if len(found := dict(every)) < len(every):
            raise ValueError("sweep: points and mixtures: one of them is there twice")
        if len(found) < 2:
            raise ValueError("sweep: give two averages at least: sweep.points=[0,0.5,1], or sweep.mixtures=[[...],...]")
        return found


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An average that was evaluated.

    Attributes:
        name: its name.
        weights: weights of the checkpoints in it.
        model: folder of its checkpoint.
        objectives: value of each objective; larger is better.
        intervals: interval of each objective that is one benchmark; None for others.
        metrics: metric of each objective that is a measure to minimise, whose value is negated.
        front: whether no other one is as good in all objectives and better in one.
        admitted: whether it has the least values that are asked for.
        chosen: whether it is the chosen one.
    """

    name: str
    weights: Sequence[float]
    model: str
    objectives: Mapping[str, float]
    intervals: Mapping[str, Sequence[float] | None]
    metrics: Mapping[str, str] = field(default_factory=dict)
    front: bool = False
    admitted: bool = True
    chosen: bool = False


def run(config: Mapping[str, Any]) -> None:
    """Average, evaluate and choose; the same command goes on, and more points add to those there.

    Raises:
        ValueError: a setting is wrong, or a checkpoint cannot be read, or no average has the least values.
        OSError: a file cannot be written.
    """
    given, sources, settings = _checked(config)
    weights = given.weights(len(sources))
    run_dir = Path(str(config["run_dir"])).expanduser()
    _check_askable(given, settings)
    with only_run_in(run_dir):
        (run_dir / "merges").mkdir(exist_ok=True)
        plans = {name: _plan(sources, shares, run_dir / "merges" / name, given) for name, shares in weights.items()}
        found, runs = [], {}
        for number, (name, shares) in enumerate(weights.items(), 1):
            notice(f"average {number}/{len(weights)}: {name}")
            alone = [source for source, share in zip(sources, shares, strict=True) if share == 1]
            as_it_is = bool(alone) and (alone[0] / "config.json").is_file()
            model = alone[0].resolve() if as_it_is else merge(plans[name])[0]
            runs[name] = run_dir / "evaluations" / name
            results = _evaluated(config, model, runs[name])
            values, intervals, metrics = objectives(results, given.objectives)
            one = Candidate(name=name, weights=shares, model=str(model), objectives=values, intervals=intervals)
            found.append(replace(one, metrics=metrics))
        candidates = choose(found, given.at_least)
        best = next(one for one in candidates if one.chosen)
        words = {"runs": {name: str(path) for name, path in runs.items()}, "output": str(run_dir / "compare")}
        compare_page.run({**words, "baseline": best.name, "draws": settings.draws, "seed": settings.seed})
        _write(candidates, given.at_least, run_dir)


def check(config: Mapping[str, Any], *, megatron: bool = True) -> None:
    """Refuse what the job would refuse before its first average; checkpoints that are not there yet are not seen.

    Args:
        megatron: whether checkpoints of Megatron are opened, with torch; not where an earlier job may write them yet.

    Raises:
        ValueError: see `run`.
    """
    given, sources, settings = _checked(config)
    run_dir = Path(str(config["run_dir"])).expanduser()
    _check_askable(given, settings)
    there = megatron and all(source.is_dir() for source in sources) and find_spec("torch") is not None
    if there or all(map(is_hugging_face, sources)):
        for name, shares in given.weights(len(sources)).items():
            _plan(sources, shares, run_dir / "merges" / name, given)


def _checked(config: Mapping[str, Any]) -> tuple[SweepSettings, list[Path], EvaluateSettings]:
    given = checked(SweepSettings, config["sweep"], where="sweep")
    sources = [Path(path).expanduser() for path in strings(config["from"])]
    given.weights(len(sources))
    settings = job.read(_of(config, str(sources[0]), Path(str(config["run_dir"])).expanduser())).evaluate
    _check_names(given, [benchmark.name for benchmark in job.chosen(settings)])
    return given, sources, settings


def _of(config: Mapping[str, Any], model: str, run_dir: Path) -> dict[str, Any]:
    """The config of the evaluation of a model."""
    own = {key: config[key] for key in _OF_MODEL}
    return {**own, "served": model, "endpoint": None, "key_variable": None, "run_dir": str(run_dir)}


def _plan(sources: Sequence[Path], shares: Sequence[float], to: Path, given: SweepSettings) -> Plan:
    """Plan of an average; all are made before the first is carried out."""
    settings = Settings(
        weights=shares,
        iterations=given.iterations,
        shard_gigabytes=given.shard_gigabytes,
        check_finite=given.check_finite,
        verify=given.verify,
    )
    return plan(sources, to, settings)


def _evaluated(config: Mapping[str, Any], model: Path, run_dir: Path) -> Mapping[str, Any]:
    """results.json of an average; a model is served only if something was not asked yet."""
    record = run_dir / OWN / _EVALUATED
    made_of = {"evaluate": config["evaluate"], "model": str(model)}
    if record.exists() and json.loads(record.read_text()) == json.loads(json.dumps(made_of)):
        found: dict[str, Any] = json.loads((run_dir / RESULTS).read_text())
        return found
    settings = job.read(_of(config, str(model), run_dir))
    found = job.asked(_of(config, str(model), run_dir), settings, job.chosen(settings.evaluate))
    note(record, made_of)
    return found


def _check_names(given: SweepSettings, benchmarks: Sequence[str]) -> None:
    for objective, names in given.objectives.items():
        for name in names:
            if name not in benchmarks:
                raise ValueError(f"sweep.objectives.{objective}: unknown name {name!r}: {nearest(name, benchmarks)}")
    for name in given.at_least:
        known = list(given.objectives) or benchmarks
        if name not in known:
            raise ValueError(f"sweep.at_least: unknown name {name!r}: {nearest(name, known)}")


def _check_askable(given: SweepSettings, settings: EvaluateSettings) -> None:
    """Refuses objectives that no evaluation could give, before the first average."""
    prepared = job.prepare(settings, Path(settings.data_root).expanduser(), job.chosen(settings))
    for scorer in prepared.scorers.values():
        scorer.close()
    for objective, names in given.objectives.items():
        for name in filter(prepared.missing.__contains__, names):
            raise ValueError(f"sweep.objectives.{objective}: {name} cannot be asked: {prepared.missing[name]}")
    asked = [one.benchmark for one in prepared.plans]
    if (
        not given.objectives
        and not prepared.harness
        and all(one.kind == "bits" or not one.higher_is_better or not one.weight for one in asked)
    ):
        raise ValueError(_NONE_COUNTS)


def objectives(
    results: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> tuple[dict[str, float], dict[str, Sequence[float] | None], dict[str, str]]:
    """Objectives of an evaluation, their intervals, and the metrics of those of measures to minimise.

    Larger is better: measures to minimise are negated.

    Args:
        results: what results.json has.
        groups: names of objectives -> benchmarks that each is the mean of; empty for each that counts in a grand mean.

    Raises:
        ValueError: a benchmark was not evaluated.
    """
    entries = results["benchmarks"]
    groups = groups or {name: (name,) for name, entry in entries.items() if counts(entry)}
    if not groups:
        raise ValueError(_NONE_COUNTS)
    values: dict[str, float] = {}
    intervals: dict[str, Sequence[float] | None] = {}
    metrics: dict[str, str] = {}
    for objective, names in groups.items():
        missing = [name for name in names if entries.get(name, {}).get("accuracy") is None]
        if missing:
            why = results.get("missing", {}).get(missing[0], "report.md there says why")
            raise ValueError(f"sweep: {missing[0]} was not evaluated: {why}")
        signs = [-1.0 if benchmark_is_low(entries[name]) else 1.0 for name in names]
        each = [sign * float(entries[name]["accuracy"]) for sign, name in zip(signs, names, strict=True)]
        values[objective] = sum(each) / len(each)
        interval = entries[names[0]].get("interval") if len(names) == 1 else None
        intervals[objective] = None if interval is None else sorted(signs[0] * float(end) for end in interval)
        if max(signs) < 0:
            metrics[objective] = str(entries[names[0]].get("metric", ""))
    return values, intervals, metrics


def choose(candidates: Sequence[Candidate], at_least: Mapping[str, float]) -> list[Candidate]:
    """The candidates, with the front marked, and of those on it that have the least values the best mean chosen.

    The mean is that of the objectives, with equal weights; of equal ones the first is chosen.

    Raises:
        ValueError: none has the least values.
    """
    marked = [
        replace(
            one,
            front=not any(_beats(other, one) for other in candidates),
            admitted=all(one.objectives[name] >= least for name, least in at_least.items()),
        )
        for one in candidates
    ]
    left = [one for one in marked if one.front and one.admitted]
    if not left:
        best = {name: max(one.objectives[name] for one in marked) for name in at_least}
        raise ValueError(
            f"sweep.at_least: no average on the front has {_named(at_least)}; the best of each are {_named(best)}"
        )
    best_of_all = max(left, key=_mean)
    return [replace(one, chosen=one is best_of_all) for one in marked]


def _beats(one: Candidate, other: Candidate) -> bool:
    pairs = [(one.objectives[name], other.objectives[name]) for name in other.objectives]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _mean(one: Candidate) -> float:
    return sum(one.objectives.values()) / len(one.objectives)


def _named(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _write(candidates: Sequence[Candidate], at_least: Mapping[str, float], run_dir: Path) -> None:
    best = next(one for one in candidates if one.chosen)
    link = run_dir / CHOSEN
    link.unlink(missing_ok=True)
    link.symlink_to(Path(best.model).resolve())
    names = list(best.objectives)
    rows = [
        [
            one.name,
            " ".join(f"{share:g}" for share in one.weights),
            *(_cell(one, name) for name in names),
            figure(_mean(one), metric=BITS if any(map(measured, one.metrics.values())) else "").text,
            ("front" if one.front else "") + ("" if one.admitted else ", below the least values"),
            "chosen" if one.chosen else "",
        ]
        for one in candidates
    ]
    shown = [f"{name} ↓" if name in best.metrics else name for name in names]
    least = f" that have {_named(at_least)} at least" if at_least else ""
    report = Report(
        f"{run_dir.name}: averages of checkpoints",
        f"Chosen: **{best.name}**, of the averages on the Pareto front{least} the one with the highest mean of the "
        "objectives (equal weights; ↓: less is better, negated in the mean). With intervals over problems; differences "
        "of less than these are chance: [compare/compare.md](compare/compare.md) tests each average against the chosen "
        "one.",
    )
    (run_dir / PLOT).unlink(missing_ok=True)
    if len(names) > 1:
        _plot(report, candidates, names[:2])
    table = markdown_table(("average", "weights", *shown, "mean", "", ""), rows)
    report.add(table).write(run_dir / REPORT)
    write_text(run_dir / FRONT, json.dumps([asdict(one) for one in candidates], indent=1) + "\n")
    print(table)
    notice(f"chosen: {best.name}: {link}; report: {run_dir / REPORT}")


def _cell(one: Candidate, name: str) -> str:
    value, ends = one.objectives[name], one.intervals[name]
    if name in one.metrics:
        value, ends = -value, None if ends is None else [-ends[1], -ends[0]]
    return figure(value, ends, metric=one.metrics.get(name, "")).text


def _plot(report: Report, candidates: Sequence[Candidate], names: Sequence[str]) -> None:
    """Draw two objectives against each other."""
    (axes,) = report.picture("front", PLOT, 6.5, 4.5)
    scales = [1 if measured(candidates[0].metrics.get(name, "")) else 100 for name in names]

    def place_of(one: Candidate) -> tuple[float, float]:
        return scales[0] * one.objectives[names[0]], scales[1] * one.objectives[names[1]]

    for one in candidates:
        place = place_of(one)
        colour = COLOURS[1] if one.chosen else COLOURS[0] if one.front else "#999999"
        axes.plot(*place, "*" if one.chosen else "o", color=colour, markersize=13 if one.chosen else 7)
        axes.annotate(one.name, place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    front = sorted(place_of(one) for one in candidates if one.front)
    axes.plot(*zip(*front, strict=True), "--", color="#999999", linewidth=1.1, zorder=0)
    labels = [f"{name} (%)" if scale == 100 else f"{name} (negated)" for scale, name in zip(scales, names, strict=True)]
    axes.margins(0.15)
    title = "averages; dashed: the Pareto front; star: chosen"
    tidy(axes, title=title, xlabel=labels[0], ylabel=labels[1])
