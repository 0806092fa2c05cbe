"""Memory section of a run's report: a plot over time and each phase's peaks, from samples. Does not import torch."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from nemo_ext.job.report import Report, outer_legend, tidy
from nemo_ext.memory.sampler import FOLDER, PHASES

PLOT = "memory.png"

QUANTITIES = ("processes, resident", "in use on the node", "/dev/shm", "fullest GPU")
"""Measured quantities: columns of the table, and panels of the plot."""

DAY, GIB = 86400, 2**30

Phases = Sequence[tuple[float, str | None]]


class Node(NamedTuple):
    """The samples of one node.

    Attributes:
        name: node name.
        time: times of the samples in Unix seconds, `[samples]`.
        values: bytes in use for each of `QUANTITIES`, `[samples, 4]`; NaN where not measured, and in the row that
            separates two starts of the run.
        total: bytes available for each of `QUANTITIES`; NaN where unknown.
    """

    name: str
    time: NDArray[np.float64]
    values: NDArray[np.float64]
    total: list[float]


def read(folder: Path) -> list[Node]:
    """Read all nodes' samples from a run's `memory` folder, sorted by name; incomplete lines are skipped."""
    nodes = []
    for path in sorted({*folder.glob("*.jsonl")} - {folder / PHASES}):
        times, rows, total = list[float](), list[list[float]](), _row({})
        for line in _lines(path):
            total = _row(line["total"]) if "total" in line else total
            times += [line["time"]] if "time" in line else [last + line.get("seconds", 0) for last in times[-1:]]
            rows += [_row(line)] if "time" in line or rows else []
        if rows:
            nodes.append(Node(path.stem, np.array(times, float), np.array(rows, float), total))
    return nodes


def _lines(path: Path) -> list[dict[str, Any]]:
    """Parse a file's lines of JSON, skipping those cut off by a kill or a full disk; empty if there is no file."""
    whole = list[dict[str, Any]]()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(orjson.JSONDecodeError):
            whole.append(orjson.loads(line))
    return whole


def _row(line: Mapping[str, Any]) -> list[float]:
    values = [line.get(name, np.nan) for name in ("rss", "host", "shm")]
    return [*values, max(filter(None, line.get("gpu", ())), default=np.nan)]


def read_phases(folder: Path) -> list[tuple[float, str | None]]:
    """Read when each phase began (Unix seconds) and its name, in order; the name None marks when the ranks ended."""
    return sorted(((line["time"], line["phase"]) for line in _lines(folder / PHASES)), key=itemgetter(0))


def peaks(nodes: Sequence[Node], phases: Phases) -> dict[str, tuple[int, NDArray[np.float64]]]:
    """Return each phase's number of samples and its peaks on every node, `[nodes, 4]`, in order of first occurrence.

    Samples before the first phase count towards it, those after the end of the run towards none. Without phases, all
    samples belong to a single phase, `run`. A phase that was never sampled has 0 samples and NaN peaks.
    """
    begins, names = [begin for begin, _ in phases], np.array([name or "" for _, name in phases] or ["run"])
    of = [names[np.maximum(np.searchsorted(begins, node.time, side="right") - 1, 0)] for node in nodes]
    found = {}
    for name in dict.fromkeys(filter(None, names.tolist())):
        values = [node.values[phase == name] for node, phase in zip(nodes, of, strict=True)]
        highest = np.array([np.fmax.reduce(each, axis=0, initial=np.nan) for each in values])
        found[name] = int(np.isfinite(np.concatenate(values)[:, 0]).sum()), highest
    return found


def add_section(report: Report, run_dir: Path) -> bool:
    """Add a section on memory to a run's report; return False if nothing was sampled."""
    nodes, phases = read(run_dir / FOLDER), read_phases(run_dir / FOLDER)
    if not nodes:
        return False
    found = peaks(nodes, phases).items()
    rows = [[phase, f"{count:,}", *(_peak(most, nodes) for most in highest.T)] for phase, (count, highest) in found]
    rows.append(["total on a node", "", *map(_size, np.fmin.reduce([node.total for node in nodes]))])
    note = (
        f"Peak of each phase on any node, of the samples in `{FOLDER}/`. Memory that processes share counts for each."
    )
    _plot(report.section("Memory"), nodes, phases)
    report.table("", ("phase", "samples", *QUANTITIES), rows, note)
    return True


def _peak(values: NDArray[np.float64], nodes: Sequence[Node]) -> str:
    most = int(np.argmax(np.nan_to_num(values)))
    return _size(values[most]) + (f" ({nodes[most].name})" if len(nodes) > 1 and np.isfinite(values[most]) else "")


def _size(value: float) -> str:
    return "" if np.isnan(value) else f"{value / GIB:,.2f} GiB"


def _plot(report: Report, nodes: Sequence[Node], phases: Phases) -> None:
    """Draw each quantity over time, with shaded phases; up to five nodes each get their own colour."""
    shown = np.flatnonzero(np.any([np.isfinite(node.values).any(axis=0) for node in nodes], axis=0))
    axes = report.picture("memory over time", PLOT, 9, 1.9 * len(shown) + 0.6, len(shown), sharex=True)
    # A killed run recorded no end: its phase ends where samples ended before the next start.
    killed = nodes[0].time[np.isnan(nodes[0].values[:, 0])]
    marks = [*phases, *((at, None) for at in [*killed, max(node.time[-1] for node in nodes)])]
    spans: dict[str | None, list[tuple[float, float]]] = {}
    for (begin, phase), (end, _) in pairwise(sorted(marks, key=itemgetter(0))):
        spans.setdefault(phase, []).append((begin / DAY, (end - begin) / DAY))
    for axis, column in zip(axes, shown, strict=True):
        style: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "linewidth": 0.4, "alpha": 0.25, "zorder": 0}
        for number, phase in enumerate(filter(None, spans)):
            axis.broken_barh(spans[phase], (0, 1), color=f"C{9 - number % 10}", label=phase, **style)
        for node in nodes:
            style = {"label": node.name} if len(nodes) < 6 else {"color": "#1f4e8c", "alpha": 0.3}
            marker = "." if len(node.time) < 20 else ""
            axis.plot(node.time / DAY, node.values[:, column] / GIB, marker=marker, linewidth=1.2, **style)
        tidy(axis, title=QUANTITIES[column], ylabel="GiB", ylim=(0, None))
    outer_legend(axes, columns=9)
    axes[-1].xaxis_date()
    axes[-1].set_xlabel("UTC")
