"""report.md of a pipeline: its stages with times and figures, their evaluations side by side, their pictures."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nemo_ext.evaluation.compare import CompareSettings
from nemo_ext.evaluation.compare_page import tables
from nemo_ext.evaluation.compare_page import write as write_comparison
from nemo_ext.evaluation.store import RESULTS
from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table
from nemo_ext.job.run_directory import REPORT
from nemo_ext.pipeline.figures import figures_of
from nemo_ext.pipeline.stages import EVALUATION, Stage

COMPARISON = "compare"
"""Folder of the comparison of all evaluations."""


class Done(Protocol):
    """A stage, its state and its time, as the runner has them."""

    stage: Stage
    record: Path
    log: Path
    state: str

    @property
    def seconds(self) -> float:
        """Time of all its starts."""
        ...


def write_report(run_dir: Path, works: Sequence[Done]) -> Path:
    """Write report.md into a pipeline's folder, and the comparison of its evaluations beside it; returns its path."""
    rows = []
    for work in works:
        found = figures_of(work.stage.job, work.record)
        tokens = "" if found.tokens is None else f"{found.tokens:,}"
        after = ", ".join(work.stage.after)
        name = (
            f"[{work.stage.name}]({work.stage.name}/{REPORT})" if (work.record / REPORT).is_file() else work.stage.name
        )
        rows.append([name, work.stage.job, after, work.state, f"{work.seconds:,.0f}", tokens, found.text])
    total = sum(work.seconds for work in works)
    head = ("stage", "job", "after", "state", "seconds", "tokens", "figures")
    parts = [f"# {run_dir.name}", markdown_table(head, rows), f"{total:,.0f} seconds in all, of every start."]
    parts += _evaluations(run_dir, works)
    parts += _pictures(run_dir, works)
    write_text(run_dir / REPORT, "\n\n".join(parts) + "\n")
    return run_dir / REPORT


def _evaluations(run_dir: Path, works: Sequence[Done]) -> Iterator[str]:
    """The evaluations side by side; differences and tests are in the comparison."""
    runs = {
        work.stage.name.removeprefix(EVALUATION): str(work.record)
        for work in works
        if work.stage.job == "evaluate" and (work.record / RESULTS).is_file()
    }
    if not runs:
        return
    output = run_dir / COMPARISON
    side_by_side = tables(write_comparison(CompareSettings(runs=runs, output=str(output))))[0]
    yield "## Evaluations"
    yield markdown_table(side_by_side.columns, side_by_side.rows)
    yield f"Differences with paired tests are in [{COMPARISON}/compare.md]({COMPARISON}/compare.md)."
    if (output / "compare.png").is_file():
        yield f"![evaluations]({COMPARISON}/compare.png)"


def _pictures(run_dir: Path, works: Sequence[Done]) -> Iterator[str]:
    """The pictures that stages made of their training."""
    found = [(work.stage.name, each) for work in works for each in sorted(work.record.glob("*.png"))]
    trained = [(name, each) for name, each in found if not name.startswith(EVALUATION)]
    if trained:
        yield "## Training"
    for name, each in trained:
        yield f"### {name}\n\n![{name}]({each.relative_to(run_dir)})"
