"""What the user sees on stderr during long work: a bar on a terminal, plain lines elsewhere, and notices."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SECONDS_BETWEEN_LINES = 10.0

_STDERR = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def notice(text: str) -> None:
    """Tell the user something in one line."""
    _STDERR.print(text)


@contextmanager
def progress_of(label: str, total: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Give a function that notes `size` more of `total` bytes as done; the bar is removed at the end."""
    if not enabled:
        yield lambda size: None
        return
    if _STDERR.is_terminal:
        columns = (BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}", markup=False), *columns, console=_STDERR, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda size: bar.advance(task, size)
        return
    done, last_line = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, last_line
        done += size
        if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
            last_line = time.monotonic()
            notice(f"{label} {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")

    yield advance
