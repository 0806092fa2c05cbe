"""A run's starts in its report: a picture of steps over time, and why each ended. No torch."""

import time
from collections.abc import Sequence
from pathlib import Path

from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy
from nemo_ext.slurm import attempts
from nemo_ext.slurm.status import goodput

PICTURE = "starts.png"


def add_section(report: Path) -> None:
    """Adds the section on the starts of a run to its `report.md`, and draws its picture; nothing without starts."""
    run_dir = report.parent
    starts = attempts.read(run_dir)
    if not starts:
        return
    draw(starts, run_dir / PICTURE, share=goodput(run_dir, starts), title=run_dir.name)
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
    table = markdown_table(("start", "job", "nodes", "began", "hours", "steps", "lost steps", "end"), rows)
    write_text(report, f"{report.read_text()}\n## Starts\n\n![steps over time]({PICTURE})\n\n{table}\n")


def draw(starts: Sequence[attempts.Attempt], path: Path, *, share: float | None, title: str) -> None:
    """Draws the steps that count over the hours since the first start, one line a start, with its number in the table.

    Args:
        starts: all starts, oldest first.
        path: file of the picture.
        share: share of the time that went into steps which count (`status.goodput`); None if not known.
        title: title of the picture.
    """
    figure = new_figure(figsize=(9, 3.6))
    axes = figure.subplots()
    zero = starts[0].began
    place, at = 0.0, starts[0].first_step
    for number, each in enumerate(starts):
        first, last = (each.began - zero) / 3600, (_end(each) - zero) / 3600
        reached = each.last_step or each.first_step
        axes.plot([place, first], [at, each.first_step], ":", color="#8c8c8c", label="" if number else "not running")
        axes.plot(
            [first, last],
            [each.first_step, reached],
            "-o",
            color="#1f4e8c",
            markersize=3,
            label="" if number else "running, to the last checkpoint",
        )
        if each.lost:
            axes.plot([last, last], [reached, reached + each.lost], color="#d1495b", linewidth=2.5)
        planned = not each.reason or each.reason.startswith(attempts.TIME_LIMIT)
        axes.annotate(
            str(number + 1),
            (last, reached + each.lost),
            (0, 7),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#1f4e8c" if planned else "#d1495b",
            weight="normal" if planned else "bold",
        )
        place, at = last, reached
    if any(each.lost for each in starts):
        axes.plot(
            [], [], color="#d1495b", linewidth=2.5, label="lost steps; bold: neither finished nor at a time limit"
        )
    axes.set_xlabel("hours since the first start")
    axes.set_ylabel("step")
    axes.margins(x=0.02, y=0.1)
    axes.set_title(title if share is None else f"{title}: goodput {share:.0%}", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    tidy(axes)
    save_figure(figure, path)


def _end(start: attempts.Attempt) -> float:
    return time.time() if start.ended is None else start.ended
