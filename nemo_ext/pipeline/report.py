"""Report of a pipeline (report.md and report.html): its stages' costs, evaluations side by side, and pictures."""

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
    "{:,.0f} seconds in total, over all starts and evaluations{}. Figures of RL are those of the first step and the "
    "mean of the last tenth of the steps. MFU is model FLOPs utilisation: by exact FLOPs (with attention scores, of "
    "active experts only), and by 6N, as most papers count."
)
_HEAD = (
    *("stage", "job", "after", "state", "seconds", "GPU-hours", "tokens", "tokens per GPU-hour"),
    *("MFU (exact)", "MFU (6N)", "MJ", "figures", "paper"),
)
_ALWAYS = _HEAD.index("GPU-hours")
"""Index of the first column that is omitted if it is empty for all stages; so are the columns after it."""
_EFFECTS = ("benchmark", "before", "after", "difference", "adjusted p", "problems", "verdict")
"""Columns of `AGAINST` shown in the table of the stages' effects."""
COMPARISON = "compare"
"""Name of the folder with the comparison of all evaluations."""


def write_report(pipeline: Pipeline, states: Mapping[str, str]) -> Path:
    """Write a pipeline's report.md and report.html, and the comparison of its evaluations, to its folder.

    Args:
        pipeline: the pipeline; the report also shows its skipped stages.
        states: mapping from the selected stages' names to their states.

    Returns:
        Path of report.md.
    """
    run_dir, rows, seconds, gpu_hours = pipeline.run_dir, list[list[str]](), 0.0, 0.0
    for stage in pipeline.every:
        not_selected = "skipped" if attempts.finished(run_dir / stage.name) is None else "finished"
        state = states.get(stage.name, not_selected).removesuffix(" before")
        seconds += seconds_of(run_dir / stage.name)
        gpu_hours += (spent := _gpu_hours(stage, run_dir / stage.name))
        if stage.job != "evaluate" or not stage.name.startswith(EVALUATION) or state not in ("finished", "skipped"):
            rows.append(_row(stage, run_dir / stage.name, state, spent))
    columns = [place for place in range(len(_HEAD)) if place < _ALWAYS or any(row[place] for row in rows)]
    report = Report(run_dir.name).table(
        "", [_HEAD[place] for place in columns], [[row[place] for place in columns] for row in rows]
    )
    report.add(_LEGEND.format(seconds, f"; {gpu_hours:,.1f} GPU-hours" if gpu_hours else ""))
    try:
        _evaluations(report, pipeline)
    except ValueError as error:
        report.section("Evaluations", f"They could not be compared: {error}")
    _pictures(report, pipeline)
    report.write(run_dir / REPORT, page=True)
    return run_dir / REPORT


def _row(stage: Stage, record: Path, state: str, hours: float) -> list[str]:
    name, figures, efficiency = stage.name, Figures(), Efficiency()
    try:
        figures = figures_of(stage.job, record)
        if find(stage.job).ranks == "slurm" and (record / METRICS).is_file():
            efficiency = efficiency_of(record)
    except (ValueError, OSError) as error:
        figures = Figures(text=f"cannot be read: {error}")
    gpus = _gpus(stage) if efficiency.joules is not None else None
    joules = None if gpus is None else (efficiency.joules or 0.0) * gpus
    return [
        f"[{name}]({name}/{REPORT})" if (record / REPORT).is_file() else name,
        stage.job,
        ", ".join(stage.after),
        state,
        "" if stage.server else f"{seconds_of(record):,.0f}",
        f"{hours:,.2f}" if hours else "",
        "" if figures.tokens is None else f"{figures.tokens:,}",
        "" if figures.tokens is None or not hours else f"{figures.tokens / hours:,.0f}",
        "" if efficiency.mfu is None else f"{efficiency.mfu:.1%}",
        "" if efficiency.mfu_6n is None else f"{efficiency.mfu_6n:.1%}",
        "" if joules is None else f"{joules / 1e6:,.1f}",
        figures.text,
        stage.paper,
    ]


def _gpus(stage: Stage) -> int | None:
    """Number of GPUs used by a stage, or by each task of its array; None if it depends on an unspecified cluster."""
    try:
        submission = planned(stage.words)
        nodes, gpus = nodes_and_gpus(stage.job, submission.config, submission.settings)
    except ValueError:
        return None
    return nodes * gpus


def _gpu_hours(stage: Stage, record: Path) -> float:
    """Return the GPU-hours of all ended starts in the folder `record`.

    A start outside Slurm counts at most this machine's GPUs.
    """
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
    """Add a pipeline's evaluations side by side, and the effect of each stage, to its report."""
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
        "intervals; `no difference shown` does not prove that there is none."
    )
    report.table("What each stage changed", ("stage", "from", *_EFFECTS), effects, note)


def _effects(pipeline: Pipeline, runs: Mapping[str, str]) -> list[list[str]]:
    """Return table rows with the paired differences between each evaluated stage and its nearest evaluated ancestor.

    `runs` maps the names of evaluated stages to the run directories of their evaluations.
    """
    by_name, rows = {stage.name: stage for stage in pipeline.every}, list[list[str]]()
    evaluated = dict[str, str]()  # folder of the first evaluation, by the stage that made the model
    for stage in pipeline.every:
        label = stage.name.removeprefix(EVALUATION)
        if stage.job == "evaluate" and stage.parent is not None and label in runs:
            evaluated.setdefault(stage.parent, runs[label])
    for name in evaluated:
        above = by_name[name].parent
        while above is not None and above not in evaluated:
            above = by_name[above].parent
        if above is None:
            continue
        both = compared(CompareSettings(runs={above: evaluated[above], name: evaluated[name]}, draws=2000))
        entries = entries_of(both.runs)
        for pair in both.pairs[name]:
            cells = dict(zip(AGAINST, pair_row(pair, entries.get(pair.benchmark, {})), strict=True))
            rows.append([name, above, *(cells[column] for column in _EFFECTS)])
    return rows


def _pictures(report: Report, pipeline: Pipeline) -> None:
    """Add the pictures of a pipeline's training runs to its report."""
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
