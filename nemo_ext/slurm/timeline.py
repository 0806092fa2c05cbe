"""A run's starts in its report: a picture of steps over time, and why each ended. No torch."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_ext.job.report import Report, tidy
from nemo_ext.slurm import attempts
from nemo_ext.slurm.status import goodput

PICTURE = "starts.png"


def add_section(report: Path) -> None:
    """Adds the section on the starts of a run to its `report.md`, and draws its picture; nothing without starts."""
    run_dir = report.parent
    starts = attempts.read(run_dir)
    if not starts:
        return
    rows = [
        (
            str(number),
            each.job,
            each.nodes,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(each.began)),
            f"{(_end(each) - each.began) / 3600:.2f}",
            f"{each.first_step:,} to {each.last_step or each.first_step:,}" if each.counted else "",
            f"{each.lost:,}" if each.lost else "",
            each.reason or ("runs" if each.ended is None else "finished"),
        )
        for number, each in enumerate(starts, start=1)
    ]
    share = goodput(run_dir, starts)
    section = Report("").section("Starts")
    _draw(section, starts, run_dir.name if share is None else f"{run_dir.name}: goodput {share:.0%}")
    section.table("", ("start", "job", "nodes", "began", "hours", "steps", "lost steps", "end"), rows)
    section.write(report, after=report.read_text())


def _draw(section: Report, starts: Sequence[attempts.Attempt], title: str) -> None:
    """Draws the steps that count over the hours, one line a start, with its number in the table."""
    (axes,) = section.picture("steps over time", PICTURE, 9, 3.6)
    zero = starts[0].began
    place, at = 0.0, starts[0].first_step
    for number, each in enumerate(starts):
        first, last = (each.began - zero) / 3600, (_end(each) - zero) / 3600
        reached = each.last_step or each.first_step
        axes.plot([place, first], [at, each.first_step], ":", color="#8c8c8c", label="" if number else "not running")
        label = "" if number else "running, to the last checkpoint"
        axes.plot([first, last], [each.first_step, reached], "-o", color="#1f4e8c", markersize=3, label=label)
        if each.lost:
            axes.plot([last, last], [reached, reached + each.lost], color="#d1495b", linewidth=2.5)
        planned = not each.reason or each.reason.startswith(attempts.TIME_LIMIT)
        looks: Any = {"color": "#1f4e8c"} if planned else {"color": "#d1495b", "weight": "bold"}
        top = (last, reached + each.lost)
        axes.annotate(str(number + 1), top, (0, 7), textcoords="offset points", ha="right", fontsize=8, **looks)
        place, at = last, reached
    if any(each.lost for each in starts):
        label = "lost steps; bold: neither finished nor at a time limit"
        axes.plot([], [], color="#d1495b", linewidth=2.5, label=label)
    axes.margins(x=0.02, y=0.1)
    tidy(axes, title=title, xlabel="hours since the first start", ylabel="step", legend={"loc": "lower right"})


def _end(start: attempts.Attempt) -> float:
    return time.time() if start.ended is None else start.ended
