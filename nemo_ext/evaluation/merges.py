"""The `nemo-ext merge_sweep` job: averages checkpoints with several weights, evaluates each average and chooses one.

merges/NAME        an average; a Hugging Face folder with weight 1 is used in place
evaluations/NAME   its run of `nemo-ext evaluate`
compare/           all averages compared with the chosen one, with paired tests (`nemo-ext compare`)
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
from nemo_ext.evaluation.frontier import on_front
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
_EVALUATED = "evaluated.json"
_OF_MODEL = ("serving", "files_from", "trust_remote_code", "evaluate")


@checked_dataclass(frozen=True, kw_only=True, config=STRICT)
class SweepSettings:
    """Settings in the `sweep` section, described in hydra_conf/merge_sweep.yaml."""

    points: Sequence[float] = ()
    mixtures: Sequence[Sequence[float]] = ()
    iterations: Sequence[int | None] | None = None
    shard_gigabytes: float = 5
    check_finite: bool = True
    verify: bool = True
    objectives: Annotated[Mapping[str, Strings], REPLACED] = field(default_factory=dict)
    at_least: Annotated[Mapping[str, float], REPLACED] = field(default_factory=dict)

    def weights(self, count: int) -> dict[str, list[float]]:
        """Map the name of each average of `count` checkpoints to its weights.

        Raises:
            ValueError: an average does not have `count` weights, two are the same, or there are fewer than two.
        """
        if self.points and count != 2:
            raise ValueError(
                f"sweep.points requires two checkpoints, but `from` lists {count}; use sweep.mixtures instead"
            )
        for mixture in self.mixtures:
            if len(mixture) != count:
                raise ValueError(
                    f"sweep.mixtures: {list(mixture)} has {len(mixture)} weights for {count} checkpoints; give one per "
                    "checkpoint"
                )
        averages = [(f"t{point + 0.0:g}", [1 - point, point]) for point in self.points]
        averages += [("w" + "_".join(f"{weight:g}" for weight in mixture), list(mixture)) for mixture in self.mixtures]
        if len(by_name := dict(averages)) < len(averages):
            raise ValueError("sweep.points and sweep.mixtures list the same average twice: remove one")
        if len(by_name) < 2:
            raise ValueError(
                "sweep: give at least two averages with sweep.points=[0,0.5,1] or sweep.mixtures=[[...],...]"
            )
        return by_name


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An evaluated average.

    Attributes:
        name: name of the average.
        model: folder of the averaged checkpoint.
        objectives: mapping from objective to value; larger is better.
        intervals: mapping from objective to its confidence interval; None unless the objective is a single benchmark.
        metrics: mapping from each objective that is minimised, and therefore negated, to its metric.
        front: whether the average is on the Pareto front.
        admitted: whether it reaches the minimum values in `sweep.at_least`.
        chosen: whether it is the chosen average.
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
    """Run `nemo-ext merge_sweep`; the same command resumes it, and if points are added, existing averages are kept.

    Raises:
        ValueError: a setting is invalid, a checkpoint cannot be read, or no average reaches the minimum values.
        OSError: a file cannot be written.
    """
    sweep, sources, settings = _checked(config)
    weights = sweep.weights(len(sources))
    run_dir = Path(str(config["run_dir"])).expanduser()
    _check_benchmarks(sweep, settings)
    with only_run_in(run_dir):
        (run_dir / "merges").mkdir(exist_ok=True)
        plans = {name: _plan(sources, shares, run_dir / "merges" / name, sweep) for name, shares in weights.items()}
        candidates, runs = [], {}
        for number, (name, shares) in enumerate(weights.items(), 1):
            notice(f"average {number} of {len(weights)}: {name}")
            alone = [source for source, share in zip(sources, shares, strict=True) if share == 1]
            in_place = bool(alone) and (alone[0] / "config.json").is_file()
            model = alone[0].resolve() if in_place else merge(plans[name])[0]
            runs[name] = run_dir / "evaluations" / name
            results = _evaluated(config, model, runs[name])
            values, intervals, metrics = objectives(results, sweep.objectives)
            settled: Any = {"objectives": values, "intervals": intervals, "metrics": metrics}
            candidates.append(Candidate(name=name, weights=shares, model=str(model), **settled))
        candidates = choose(candidates, sweep.at_least)
        best = next(candidate for candidate in candidates if candidate.chosen)
        comparison = {"runs": {name: str(path) for name, path in runs.items()}, "output": str(run_dir / "compare")}
        compare_page.run({**comparison, "baseline": best.name, "draws": settings.draws, "seed": settings.seed})
        _write(candidates, sweep.at_least, run_dir)


def check(config: Mapping[str, Any], *, megatron: bool = True) -> None:
    """Validate a config as `nemo-ext merge_sweep` does before it computes its first average.

    Checkpoints that do not exist yet are not checked.

    Args:
        megatron: whether to open Megatron checkpoints, which requires torch; False if an earlier job has yet to write
            them.

    Raises:
        ValueError: a setting is invalid, a benchmark cannot be run, or a checkpoint cannot be read.
    """
    sweep, sources, settings = _checked(config)
    run_dir = Path(str(config["run_dir"])).expanduser()
    _check_benchmarks(sweep, settings)
    readable = megatron and all(source.is_dir() for source in sources) and find_spec("torch") is not None
    if readable or all(map(is_hugging_face, sources)):
        for name, shares in sweep.weights(len(sources)).items():
            _plan(sources, shares, run_dir / "merges" / name, sweep)


def _checked(config: Mapping[str, Any]) -> tuple[SweepSettings, list[Path], EvaluateSettings]:
    sweep = checked(SweepSettings, config["sweep"], where="sweep")
    sources = [Path(path).expanduser() for path in strings(config["from"])]
    sweep.weights(len(sources))
    settings = job.read(_evaluation(config, str(sources[0]), Path(str(config["run_dir"])).expanduser())).evaluate
    _check_names(sweep, [benchmark.name for benchmark in job.chosen(settings)])
    return sweep, sources, settings


def _evaluation(config: Mapping[str, Any], model: str, run_dir: Path) -> dict[str, Any]:
    """Return the config with which `nemo-ext evaluate` evaluates one model."""
    own = {key: config[key] for key in _OF_MODEL}
    return {**own, "served": model, "endpoint": None, "key_variable": None, "run_dir": str(run_dir)}


def _plan(sources: Sequence[Path], shares: Sequence[float], to: Path, sweep: SweepSettings) -> Plan:
    """Plan an average with these weights; all are planned before any is computed, so that errors show early."""
    shared = {key: getattr(sweep, key) for key in ("iterations", "shard_gigabytes", "check_finite", "verify")}
    return plan(sources, to, Settings(weights=shares, **shared))


def _evaluated(config: Mapping[str, Any], model: Path, run_dir: Path) -> Mapping[str, Any]:
    """Evaluate an average, unless a run with the same settings has finished; return the content of its results.json."""
    record = run_dir / OWN / _EVALUATED
    made_of = {"evaluate": config["evaluate"], "model": str(model)}
    if record.exists() and json.loads(record.read_text()) == json.loads(json.dumps(made_of)):
        results: dict[str, Any] = json.loads((run_dir / RESULTS).read_text())
        return results
    evaluation = _evaluation(config, str(model), run_dir)
    settings = job.read(evaluation)
    results = job.asked(evaluation, settings, job.chosen(settings.evaluate))
    note(record, made_of)
    return results


def _check_names(sweep: SweepSettings, benchmarks: Sequence[str]) -> None:
    for objective, names in sweep.objectives.items():
        for name in names:
            if name not in benchmarks:
                raise ValueError(f"sweep.objectives.{objective}: unknown name {name!r}: {nearest(name, benchmarks)}")
    for name in sweep.at_least:
        known = list(sweep.objectives) or benchmarks
        if name not in known:
            raise ValueError(f"sweep.at_least: unknown name {name!r}: {nearest(name, known)}")


def _check_benchmarks(sweep: SweepSettings, settings: EvaluateSettings) -> None:
    """Check, before the first average, that the benchmarks of all objectives can be run."""
    with job.prepare(settings, Path(settings.data_root).expanduser(), job.chosen(settings)) as prepared:
        pass
    for objective, names in sweep.objectives.items():
        for name in filter(prepared.missing.__contains__, names):
            raise ValueError(f"sweep.objectives.{objective}: {name} cannot be run ({prepared.missing[name]})")
    benchmarks = [plan.benchmark for plan in prepared.plans]
    if (
        not sweep.objectives
        and not prepared.harness
        and all(entry.kind == "bits" or not entry.higher_is_better or not entry.weight for entry in benchmarks)
    ):
        raise ValueError(
            "sweep.objectives is empty, and no benchmark is part of a grand mean; name the benchmarks of each objective"
        )


def objectives(
    results: Mapping[str, Any], groups: Mapping[str, Sequence[str]]
) -> tuple[dict[str, float], dict[str, Sequence[float] | None], dict[str, str]]:
    """Compute the objectives' values and confidence intervals, and the metrics of those that are minimised.

    Larger values are better: objectives that are minimised are negated. Each result is keyed by objective.

    Args:
        results: content of results.json.
        groups: mapping from objective to the benchmarks it averages; if empty, each benchmark that counts in a grand
            mean is an objective.

    Raises:
        ValueError: a benchmark was not evaluated.
    """
    entries = results["benchmarks"]
    groups = groups or {name: (name,) for name, entry in entries.items() if counts(entry)}
    if not groups:
        raise ValueError(
            "sweep.objectives is empty, and no evaluated benchmark is part of a grand mean; name the benchmarks of "
            "each objective"
        )
    values: dict[str, float] = {}
    intervals: dict[str, Sequence[float] | None] = {}
    metrics: dict[str, str] = {}
    for objective, names in groups.items():
        missing = [name for name in names if entries.get(name, {}).get("accuracy") is None]
        if missing:
            why = results.get("missing", {}).get(missing[0], "see its report.md")
            raise ValueError(f"sweep.objectives.{objective}: benchmark {missing[0]} was not evaluated ({why})")
        signs = [-1.0 if benchmark_is_low(entries[name]) else 1.0 for name in names]
        signed = [sign * float(entries[name]["accuracy"]) for sign, name in zip(signs, names, strict=True)]
        values[objective] = sum(signed) / len(signed)
        interval = entries[names[0]].get("interval") if len(names) == 1 else None
        intervals[objective] = None if interval is None else sorted(signs[0] * float(end) for end in interval)
        if max(signs) < 0:
            metrics[objective] = str(entries[names[0]].get("metric", ""))
    return values, intervals, metrics


def choose(candidates: Sequence[Candidate], at_least: Mapping[str, float]) -> list[Candidate]:
    """Return the candidates with the Pareto front and the chosen candidate marked.

    Of the candidates on the front that reach the minimum values, the one with the highest mean over objectives (with
    equal weights) is chosen; among equal means, the first one.

    Raises:
        ValueError: no candidate on the front reaches the minimum values.
    """
    names = list(candidates[0].objectives)
    front = on_front([tuple(candidate.objectives[name] for name in names) for candidate in candidates])
    marked = [
        replace(entry, front=on, admitted=all(entry.objectives[name] >= least for name, least in at_least.items()))
        for entry, on in zip(candidates, front, strict=True)
    ]
    eligible = [candidate for candidate in marked if candidate.front and candidate.admitted]
    if not eligible:
        best = {name: max(candidate.objectives[name] for candidate in marked) for name in at_least}
        raise ValueError(
            f"sweep.at_least: no average on the Pareto front reaches {_named(at_least)}; the best values are "
            f"{_named(best)}; lower sweep.at_least or add averages"
        )
    winner = max(eligible, key=_mean)
    return [replace(candidate, chosen=candidate is winner) for candidate in marked]


def _mean(candidate: Candidate) -> float:
    return sum(candidate.objectives.values()) / len(candidate.objectives)


def _named(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _write(candidates: Sequence[Candidate], at_least: Mapping[str, float], run_dir: Path) -> None:
    best = next(candidate for candidate in candidates if candidate.chosen)
    link = run_dir / CHOSEN
    link.unlink(missing_ok=True)
    link.symlink_to(Path(best.model).resolve())
    names = list(best.objectives)
    rows = [
        [
            candidate.name,
            " ".join(f"{share:g}" for share in candidate.weights),
            *(_cell(candidate, name) for name in names),
            figure(_mean(candidate), metric=BITS if any(map(measured, candidate.metrics.values())) else "").text,
            ("front" if candidate.front else "") + ("" if candidate.admitted else ", below the minimum values"),
            "chosen" if candidate.chosen else "",
        ]
        for candidate in candidates
    ]
    shown = [f"{name} ↓" if name in best.metrics else name for name in names]
    least = f" with at least {_named(at_least)}" if at_least else ""
    report = Report(
        f"{run_dir.name}: averages of checkpoints",
        f"Chosen: **{best.name}**, which has the highest mean of the objectives among the averages on the Pareto "
        f"front{least} (equal weights; ↓: lower is better, negated in the mean). Intervals are over problems, and "
        "smaller differences may be chance: [compare/compare.md](compare/compare.md) tests each average against the "
        "chosen one.",
    )
    (run_dir / PLOT).unlink(missing_ok=True)
    if len(names) > 1:
        _plot(report, candidates, names[:2])
    table = markdown_table(("average", "weights", *shown, "mean", "", ""), rows)
    report.add(table).write(run_dir / REPORT)
    write_text(run_dir / FRONT, json.dumps([asdict(one) for one in candidates], indent=1) + "\n")
    print(table)
    notice(f"chosen average: {best.name} ({link}); report: {run_dir / REPORT}")


def _cell(candidate: Candidate, name: str) -> str:
    value, ends = candidate.objectives[name], candidate.intervals[name]
    if name in candidate.metrics:
        value, ends = -value, None if ends is None else [-ends[1], -ends[0]]
    return figure(value, ends, metric=candidate.metrics.get(name, "")).text


def _plot(report: Report, candidates: Sequence[Candidate], names: Sequence[str]) -> None:
    """Plot the two objectives in `names` for all averages, with the Pareto front."""
    (axes,) = report.picture("front", PLOT, 6.5, 4.5)
    scales = [1 if measured(candidates[0].metrics.get(name, "")) else 100 for name in names]

    def place_of(candidate: Candidate) -> tuple[float, float]:
        return scales[0] * candidate.objectives[names[0]], scales[1] * candidate.objectives[names[1]]

    for candidate in candidates:
        place, chosen = place_of(candidate), candidate.chosen
        colour = COLOURS[1] if chosen else COLOURS[0] if candidate.front else "#999999"
        axes.plot(*place, "*" if chosen else "o", color=colour, markersize=13 if chosen else 7)
        axes.annotate(candidate.name, place, xytext=(5, 5), textcoords="offset points", fontsize=8)
    front = sorted(place_of(candidate) for candidate in candidates if candidate.front)
    axes.plot(*zip(*front, strict=True), "--", color="#999999", linewidth=1.1, zorder=0)
    labels = [f"{name} (%)" if scale == 100 else f"{name} (negated)" for scale, name in zip(scales, names, strict=True)]
    axes.margins(0.15)
    title = "averages; dashed: the Pareto front; star: chosen"
    tidy(axes, title=title, xlabel=labels[0], ylabel=labels[1])
