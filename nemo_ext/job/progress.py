"""Notices to the user, and progress of long work, on stderr: as a bar on a terminal, as plain lines otherwise."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SECONDS_BETWEEN_LINES = 10.0

_STDERR = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def notice(text: str) -> None:
    """Print a message for the user on stderr."""
    _STDERR.print(text)


@contextmanager
def progress_of(
    label: str, total: int, *, enabled: bool = True, unit: str | None = None, detail: Callable[[], str] = str
) -> Iterator[Callable[[int], None]]:
    """Show progress until the block ends; yields a function that advances it by an amount.

    Args:
        total: total amount, in bytes or in `unit`.
        enabled: whether to show anything.
        unit: name of the counted items, such as `variants`; None for bytes.
        detail: function that returns a string to show after the amounts.
    """
    if not enabled:
        yield lambda size: None
        return
    if _STDERR.is_terminal:
        counted: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
        if unit is not None:
            counted = (MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn(), TextColumn("left"))
        columns = (BarColumn(bar_width=30), *counted, TimeRemainingColumn())
        shown = (TextColumn("{task.description}", markup=False), *columns, TextColumn("{task.fields[detail]}"))
        with Progress(*shown, console=_STDERR, transient=True) as bar:
            task = bar.add_task(label, total=total, detail="")
            yield lambda size: bar.update(task, advance=size, detail=detail())
        return
    done, last_line = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, last_line
        done += size
        if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            amounts = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB" if unit is None else f"{done:,} of {total:,} {unit}"
            notice(", ".join(filter(None, (f"{label} {amounts}", detail()))))

    yield advance
