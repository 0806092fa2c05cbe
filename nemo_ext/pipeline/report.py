"""report.md of a pipeline: its stages with times and figures, their evaluations side by side, their pictures."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_ext.evaluation.compare import CompareSettings
from nemo_ext.evaluation.compare_page import tables
from nemo_ext.evaluation.compare_page import write as write_comparison
from nemo_ext.evaluation.store import RESULTS
from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table
from nemo_ext.job.run_directory import REPORT
from nemo_ext.memory.report import PLOT as MEMORY
from nemo_ext.pipeline.figures import figures_of, seconds_of
from nemo_ext.pipeline.stages import EVALUATION, NEW_MODEL, Pipeline
from nemo_ext.slurm import attempts

_LEGEND = (
    "{:,.0f} seconds in all, of every start. Figures of RL are those of the first step and the mean of the last tenth."
)
COMPARISON = "compare"
"""Folder of the comparison of all evaluations."""


def write_report(pipeline: Pipeline, states: Mapping[str, str]) -> Path:
    """Write report.md into a pipeline's folder, and the comparison of its evaluations beside it; returns its path.

    Args:
        pipeline: the pipeline, of which stages that were left out stand in the report too.
        states: states of the stages to run, by name.
    """
    run_dir, rows, seconds = pipeline.run_dir, list[list[str]](), 0.0
    for stage in pipeline.every:
        record = run_dir / stage.name
        found, spent = figures_of(stage.job, record), seconds_of(record)
        tokens = "" if found.tokens is None else f"{found.tokens:,}"
        name = f"[{stage.name}]({stage.name}/{REPORT})" if (record / REPORT).is_file() else stage.name
        left_out = "left out" if attempts.finished(record) is None else "finished"
        state = states.get(stage.name, left_out).removesuffix(" before")
        rows.append([name, stage.job, ", ".join(stage.after), state, f"{spent:,.0f}", tokens, found.text])
        seconds += spent
    head = ("stage", "job", "after", "state", "seconds", "tokens", "figures")
    parts = [f"# {run_dir.name}", markdown_table(head, rows), _LEGEND.format(seconds)]
    parts += _evaluations(pipeline)
    parts += _pictures(pipeline)
    write_text(run_dir / REPORT, "\n\n".join(parts) + "\n")
    return run_dir / REPORT


def _evaluations(pipeline: Pipeline) -> Iterator[str]:
    """The evaluations side by side; differences and tests are in the comparison."""
    runs = {
        stage.name.removeprefix(EVALUATION): str(pipeline.run_dir / stage.name)
        for stage in pipeline.every
        if stage.job == "evaluate" and (pipeline.run_dir / stage.name / RESULTS).is_file()
    }
    if not runs:
        return
    output = pipeline.run_dir / COMPARISON
    side_by_side = tables(write_comparison(CompareSettings(runs=runs, output=str(output))))[0]
    yield "## Evaluations"
    yield markdown_table(side_by_side.columns, side_by_side.rows)
    yield f"Differences with paired tests are in [{COMPARISON}/compare.md]({COMPARISON}/compare.md)."
    if (output / "compare.png").is_file():
        yield f"![evaluations]({COMPARISON}/compare.png)"


def _pictures(pipeline: Pipeline) -> Iterator[str]:
    """The pictures that stages made of their training."""
    trained = [
        (stage.name, picture)
        for stage in pipeline.every
        if stage.job in NEW_MODEL
        for picture in sorted((pipeline.run_dir / stage.name).glob("*.png"))
        if picture.name != MEMORY
    ]
    if trained:
        yield "## Training"
    for name, picture in trained:
        yield f"### {name}\n\n![{name}]({picture.relative_to(pipeline.run_dir)})"
