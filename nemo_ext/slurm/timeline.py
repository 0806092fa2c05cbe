"""The report section on a run's starts: a picture of steps over time, and why each start ended."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_ext.job.report import Report, tidy
from nemo_ext.slurm import attempts
from nemo_ext.slurm.status import goodput

PICTURE = "starts.png"


def add_section(report: Path) -> None:
    """Append the section on a run's starts, with its picture, to the run's `report.md`, unless there are no starts."""
    run_dir = report.parent
    starts = attempts.read(run_dir)
    if not starts:
        return
    rows = [
        (
            str(number),
            start.job,
            start.nodes,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(start.began)),
            f"{(_end(start) - start.began) / 3600:.2f}",
            f"{start.first_step:,} to {start.last_step or start.first_step:,}" if start.counted else "",
            f"{start.lost:,}" if start.lost else "",
            start.reason or ("runs" if start.ended is None else "finished"),
        )
        for number, start in enumerate(starts, start=1)
    ]
    share = goodput(run_dir, starts)
    section = Report("").section("Starts")
    _draw(section, starts, run_dir.name if share is None else f"{run_dir.name}: goodput {share:.0%}")
    section.table("", ("start", "job", "nodes", "began", "hours", "steps", "lost steps", "end"), rows)
    section.write(report, after=report.read_text())


def _draw(section: Report, starts: Sequence[attempts.Attempt], title: str) -> None:
    """Plot useful steps over hours, with one line per start, labelled with the start's number in the report's table."""
    (axes,) = section.picture("steps over time", PICTURE, 9, 3.6)
    zero = starts[0].began
    place, at = 0.0, starts[0].first_step
    for number, start in enumerate(starts):
        first, last = (start.began - zero) / 3600, (_end(start) - zero) / 3600
        reached = start.last_step or start.first_step
        axes.plot([place, first], [at, start.first_step], ":", color="#8c8c8c", label="" if number else "not running")
        label = "" if number else "running, to the last checkpoint"
        axes.plot([first, last], [start.first_step, reached], "-o", color="#1f4e8c", markersize=3, label=label)
        if start.lost:
            axes.plot([last, last], [reached, reached + start.lost], color="#d1495b", linewidth=2.5)
        planned = not start.reason or start.reason.startswith(attempts.TIME_LIMIT)
        looks: Any = {"color": "#1f4e8c"} if planned else {"color": "#d1495b", "weight": "bold"}
        top = (last, reached + start.lost)
        axes.annotate(str(number + 1), top, (0, 7), textcoords="offset points", ha="right", fontsize=8, **looks)
        place, at = last, reached
    if any(start.lost for start in starts):
        label = "lost steps; bold: neither finished nor at a time limit"
        axes.plot([], [], color="#d1495b", linewidth=2.5, label=label)
    axes.margins(x=0.02, y=0.1)
    tidy(axes, title=title, xlabel="hours since the first start", ylabel="step", legend={"loc": "lower right"})


def _end(start: attempts.Attempt) -> float:
    return time.time() if start.ended is None else start.ended
