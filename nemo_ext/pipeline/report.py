"""report.md and report.html of a pipeline: what its stages took, their evaluations side by side, their pictures."""

from collections.abc import Mapping
from pathlib import Path

from nemo_ext.evaluation.compare import CompareSettings, compared
from nemo_ext.evaluation.compare_page import AGAINST, pair_row, tables
from nemo_ext.evaluation.compare_page import write as write_comparison
from nemo_ext.evaluation.runs import entries_of
from nemo_ext.evaluation.store import RESULTS
from nemo_ext.job.figures import Figures
from nemo_ext.job.registry import job as find
from nemo_ext.job.report import Report
from nemo_ext.job.run_directory import METRICS, REPORT
from nemo_ext.memory.report import PLOT as MEMORY
from nemo_ext.memory.sampler import gpu_memory
from nemo_ext.pipeline.figures import Efficiency, efficiency_of, figures_of, seconds_of
from nemo_ext.pipeline.stages import EVALUATION, Pipeline, Stage
from nemo_ext.slurm import attempts
from nemo_ext.slurm.jobs import SHARDS, nodes_and_gpus
from nemo_ext.slurm.submit import planned

_LEGEND = (
    "{:,.0f} seconds in all, of every start, evaluations with it{}. Figures of RL are those of the first step and the "
    "mean of the last tenth. MFU is model FLOPs utilisation: by exact FLOPs, with attention's scores and of active "
    "experts alone, and by 6N, as most papers count."
)
_HEAD = (
    *("stage", "job", "after", "state", "seconds", "GPU-hours", "tokens", "tokens a GPU-hour"),
    *("MFU (exact)", "MFU (6N)", "MJ", "figures", "paper"),
)
_ALWAYS = _HEAD.index("GPU-hours")
"""Columns after these are left out where no stage has anything in them."""
_EFFECTS = ("benchmark", "before", "after", "difference", "adjusted p", "problems", "verdict")
"""Those of `AGAINST` that are shown for what a stage changed."""
COMPARISON = "compare"
"""Folder of the comparison of all evaluations."""


def write_report(pipeline: Pipeline, states: Mapping[str, str]) -> Path:
    """Write report.md into a pipeline's folder, with report.html and the comparison of its evaluations beside it.

    Args:
        pipeline: the pipeline, of which stages that were left out stand in the report too.
        states: states of the stages to run, by name.

    Returns:
        Path of report.md.
    """
    run_dir, rows, seconds, hours = pipeline.run_dir, list[list[str]](), 0.0, 0.0
    for stage in pipeline.every:
        left_out = "left out" if attempts.finished(run_dir / stage.name) is None else "finished"
        state = states.get(stage.name, left_out).removesuffix(" before")
        seconds += seconds_of(run_dir / stage.name)
        hours += (spent := _gpu_hours(stage, run_dir / stage.name))
        if stage.job != "evaluate" or not stage.name.startswith(EVALUATION) or state not in ("finished", "left out"):
            rows.append(_row(stage, run_dir / stage.name, state, spent))
    kept = [place for place in range(len(_HEAD)) if place < _ALWAYS or any(row[place] for row in rows)]
    report = Report(run_dir.name).table(
        "", [_HEAD[place] for place in kept], [[row[place] for place in kept] for row in rows]
    )
    report.add(_LEGEND.format(seconds, f"; {hours:,.1f} GPU-hours" if hours else ""))
    try:
        _evaluations(report, pipeline)
    except ValueError as error:
        report.section("Evaluations", f"They cannot be shown: {error}")
    _pictures(report, pipeline)
    report.write(run_dir / REPORT, page=True)
    return run_dir / REPORT


def _row(stage: Stage, record: Path, state: str, hours: float) -> list[str]:
    name, found, efficiency = stage.name, Figures(), Efficiency()
    try:
        found = figures_of(stage.job, record)
        if find(stage.job).ranks == "slurm" and (record / METRICS).is_file():
            efficiency = efficiency_of(record)
    except (ValueError, OSError) as error:
        found = Figures(text=f"cannot be read: {error}")
    gpus = _gpus(stage) if efficiency.joules is not None else None
    joules = None if gpus is None else (efficiency.joules or 0.0) * gpus
    return [
        f"[{name}]({name}/{REPORT})" if (record / REPORT).is_file() else name,
        stage.job,
        ", ".join(stage.after),
        state,
        "" if stage.server else f"{seconds_of(record):,.0f}",
        f"{hours:,.2f}" if hours else "",
        "" if found.tokens is None else f"{found.tokens:,}",
        "" if found.tokens is None or not hours else f"{found.tokens / hours:,.0f}",
        "" if efficiency.mfu is None else f"{efficiency.mfu:.1%}",
        "" if efficiency.mfu_6n is None else f"{efficiency.mfu_6n:.1%}",
        "" if joules is None else f"{joules / 1e6:,.1f}",
        found.text,
        stage.paper,
    ]


def _gpus(stage: Stage) -> int | None:
    """Number of GPUs that a stage takes, each task of an array; None if it depends on a cluster that is not named."""
    try:
        submission = planned(stage.words)
        nodes, gpus = nodes_and_gpus(stage.job, submission.config, submission.settings)
    except ValueError:
        return None
    return nodes * gpus


def _gpu_hours(stage: Stage, record: Path) -> float:
    """GPU-hours of all starts that have ended; on this machine there may be fewer GPUs than a stage takes, or none."""
    records = [record, *(record / SHARDS).glob("*")]
    starts = [each for place in records for each in attempts.read(place) if each.ended is not None]
    here = len(gpu_memory("total"))
    if not starts or not (here or any(each.job for each in starts)):
        return 0.0
    gpus = _gpus(stage) or 0
    spent = ((each.ended or 0.0) - each.began for each in starts)
    counted = (seconds * (gpus if each.job else min(gpus, here)) for each, seconds in zip(starts, spent, strict=True))
    return sum(counted) / 3600


def _evaluations(report: Report, pipeline: Pipeline) -> None:
    """Adds the evaluations side by side, and what each stage changed."""
    runs = {
        stage.name.removeprefix(EVALUATION): str(pipeline.run_dir / stage.name)
        for stage in pipeline.every
        if stage.job == "evaluate" and (pipeline.run_dir / stage.name / RESULTS).is_file()
    }
    if not runs:
        return
    output = pipeline.run_dir / COMPARISON
    side_by_side = tables(write_comparison(CompareSettings(runs=runs, output=str(output))))[0]
    where = f"All are compared with the first in [{COMPARISON}/compare.md]({COMPARISON}/compare.md)."
    report.table("Evaluations", side_by_side.heading, side_by_side.rows, where)
    if (output / "compare.png").is_file():
        report.add(f"![evaluations]({COMPARISON}/compare.png)")
    effects = _effects(pipeline, runs)
    note = (
        "Each stage against the model that it started from, on the same questions: paired differences with their "
        "intervals; `no difference shown` is no proof that there is none."
    )
    report.table("What each stage changed", ("stage", "from", *_EFFECTS), effects, note)


def _effects(pipeline: Pipeline, runs: Mapping[str, str]) -> list[list[str]]:
    """Rows of the paired differences between each evaluated stage and the nearest one that its model comes from."""
    named, rows = {stage.name: stage for stage in pipeline.every}, list[list[str]]()
    evaluated = dict[str, str]()  # the stage that made a model, and where it is evaluated first
    for stage in pipeline.every:
        label = stage.name.removeprefix(EVALUATION)
        if stage.job == "evaluate" and stage.parent is not None and label in runs:
            evaluated.setdefault(stage.parent, runs[label])
    for name in evaluated:
        above = named[name].parent
        while above is not None and above not in evaluated:
            above = named[above].parent
        if above is None:
            continue
        both = compared(CompareSettings(runs={above: evaluated[above], name: evaluated[name]}, draws=2000))
        entries = entries_of(both.runs)
        for pair in both.pairs[name]:
            cells = dict(zip(AGAINST, pair_row(pair, entries.get(pair.benchmark, {})), strict=True))
            rows.append([name, above, *(cells[column] for column in _EFFECTS)])
    return rows


def _pictures(report: Report, pipeline: Pipeline) -> None:
    """Adds the pictures that stages made of their training."""
    trained = [
        (stage.name, picture)
        for stage in pipeline.every
        if find(stage.job).model.trained
        for picture in sorted((pipeline.run_dir / stage.name).glob("*.png"))
        if picture.name != MEMORY
    ]
    if trained:
        report.section("Training")
    for name, picture in trained:
        report.section(name, f"![{name}]({picture.relative_to(pipeline.run_dir)})", level=3)
