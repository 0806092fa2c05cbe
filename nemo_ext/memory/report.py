"""The memory section of a run's report: a plot over time and the peak of each phase, from the samples. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy
from nemo_ext.memory.sampler import FOLDER, HELD, PHASES

PLOT = "memory.png"

QUANTITIES = {
    "rss": "resident memory of the run's processes",
    "host": "memory in use on the node",
    "shm": "/dev/shm",
    "gpu": "fullest GPU",
}
"""Quantities of the samples and their titles in the table."""

SINGLE_NODES = 5
"""Maximum number of nodes plotted one by one; beyond it the plot has minimum, median and maximum."""

POINTS = 1500
"""Approximate maximum number of points per line."""

_COLOURS = {
    "setup": "#8c8c8c",
    "training": "#dbe6f2",
    "validation": "#f2b134",
    "checkpoint": "#d1495b",
    "generation": "#7fb685",
    "scoring": "#7a5195",
}
_OTHER_COLOURS = ("#4e79a7", "#76b7b2", "#b07aa1", "#9c755f")

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Node:
    """The samples of one node.

    Attributes:
        name: node name.
        time: Unix seconds of the samples, ascending, `[samples]`.
        values: bytes by quantity, `[samples]` each; NaN where there is none.
        starts: index of the first sample after each start of the sampler and each gap.
        total: total bytes by quantity, where known.
        seconds: interval between samples at the last start.
        errors: reasons for missing samples.
    """

    name: str
    time: Values
    values: Mapping[str, Values]
    starts: tuple[int, ...]
    total: Mapping[str, float]
    seconds: float
    errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peak:
    """Maximum of a quantity in bytes, and its node."""

    bytes: float
    node: str


def read(folder: Path) -> list[Node]:
    """Nodes with samples in a run's folder `memory`, by name; unchanged samples filled in, incomplete lines skipped."""
    files = [path for path in sorted(folder.glob("*.jsonl")) if path.name != PHASES]
    return [node for path in files if (node := _read_node(path)) is not None]


def _read_node(path: Path) -> Node | None:
    rows, starts, errors = list[tuple[float, ...]](), list[int](), list[str]()
    total, seconds = dict[str, float](), 0.0
    for line in _lines(path):
        if "error" in line:
            errors.append(str(line["error"]))
        elif "start" in line:
            seconds, total = float(line["seconds"]), _quantities(line["total"])
            starts.append(len(rows))
        else:
            values, time = _quantities(line), float(line["time"])
            if rows and seconds and starts[-1:] != [len(rows)]:
                gap = time - rows[-1][0]
                # Unchanged samples are not in the file and are filled in; a longer gap is a real one.
                if gap < (HELD + 1.5) * seconds:
                    count = round(gap / seconds)
                    last, *held = rows[-1]
                    rows += [(last + gap / count * number, *held) for number in range(1, count)]
                else:
                    starts.append(len(rows))
            rows.append((time, *(values.get(name, np.nan) for name in QUANTITIES)))
    if not rows:
        return None
    table = np.array(rows, dtype=np.float64)
    return Node(
        name=path.stem,
        time=np.maximum.accumulate(table[:, 0]),  # a clock may be set back
        values={name: table[:, column] for column, name in enumerate(QUANTITIES, start=1)},
        starts=tuple(starts),
        total=total,
        seconds=seconds,
        errors=tuple(errors),
    )


def read_phases(folder: Path) -> list[tuple[float, str | None]]:
    """Unix time and name of each phase's begin, in order; the name None ends a start of the run."""
    return sorted(((float(line["time"]), line["phase"]) for line in _lines(folder / PHASES)), key=lambda each: each[0])


def peaks(nodes: Sequence[Node], phases: Sequence[tuple[float, str | None]]) -> dict[str, tuple[int, dict[str, Peak]]]:
    """Number of samples and peak of each quantity by phase, in order of first occurrence.

    Samples before the first phase count towards it, those after the end of the run towards none. Without phases all
    belong to one, `run`. A phase that was never sampled has 0 samples and no peaks.
    """
    names = list(dict.fromkeys(name for _, name in phases if name is not None)) or ["run"]
    found: dict[str, tuple[int, dict[str, Peak]]] = {name: (0, {}) for name in names}
    begins = np.array([begin for begin, _ in phases])
    numbers = np.array([-1 if name is None else names.index(name) for _, name in phases] or [0])
    for node in nodes:
        where = np.maximum(np.searchsorted(begins, node.time, side="right") - 1, 0)
        of_sample = numbers[where]
        for number, name in enumerate(names):
            inside = of_sample == number
            count, most = found[name]
            for quantity, values in node.values.items():
                here = values[inside]
                if np.isfinite(here).any() and (quantity not in most or float(np.nanmax(here)) > most[quantity].bytes):
                    most[quantity] = Peak(bytes=float(np.nanmax(here)), node=node.name)
            found[name] = (count + int(inside.sum()), most)
    return found


def section(run_dir: Path) -> str:
    """Draws the plot and returns the report's section on memory, empty if nothing was sampled."""
    folder = run_dir / FOLDER
    nodes = read(folder)
    if not nodes:
        return ""
    phases = read_phases(folder)
    plot(nodes, phases, run_dir / PLOT)
    by_phase = peaks(nodes, phases)
    columns = {name: title for name, title in QUANTITIES.items() if any(name in most for _, most in by_phase.values())}
    rows = [
        [phase, f"{count:,}", *(_peak(most.get(name), len(nodes)) for name in columns)]
        for phase, (count, most) in by_phase.items()
    ]
    least = [min((node.total[name] for node in nodes if name in node.total), default=None) for name in columns]
    rows.append(["there is on a node", "", *("" if size is None else _size(size) for size in least)])
    missed = [phase for phase, (count, _) in by_phase.items() if not count]
    each = f"each {nodes[0].seconds:g} s on {len(nodes)} nodes" if len(nodes) > 1 else f"each {nodes[0].seconds:g} s"
    notes = [f"Peak of each phase on any node, of samples {each}: `{FOLDER}/`."]
    notes.append("Memory that processes share counts once for each of them in their resident memory.")
    if missed:
        notes.append(f"{', '.join(missed).capitalize()}: over before a sample was taken.")
    notes += [f"{node.name}: samples are missing: {error}." for node in nodes for error in node.errors]
    table = markdown_table(["phase", "samples", *columns.values()], rows)
    return f"## Memory\n\n![memory over time]({PLOT})\n\n{table}\n\n{' '.join(notes)}\n"


def plot(nodes: Sequence[Node], phases: Sequence[tuple[float, str | None]], path: Path) -> None:
    """Plots resident memory, /dev/shm and the fullest GPU over time, with shaded phases (PNG or SVG by suffix)."""

    titles = {"rss": "processes, resident", "shm": "/dev/shm", "gpu": "fullest GPU"}
    shown = [name for name in titles if any(np.isfinite(node.values[name]).any() for node in nodes)]
    figure = new_figure(figsize=(9, 2.2 * len(shown) + 0.6))
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    first, last = min(node.time[0] for node in nodes), max(node.time[-1] for node in nodes)
    unit, unit_name = _time_unit(last - first)
    spans = _spans(phases, nodes, first, last)
    for axis, name in zip(axes, shown, strict=True):
        for number, (phase, ranges) in enumerate(spans.items()):
            colour = _COLOURS.get(phase) or _OTHER_COLOURS[number % len(_OTHER_COLOURS)]
            axis.broken_barh(
                [((begin - first) / unit, (end - begin) / unit) for begin, end in ranges],
                (0, 1),
                transform=axis.get_xaxis_transform(),
                facecolor=colour,
                alpha=0.35,
                linewidth=0,
                snap=False,
                zorder=0,
                label=phase,
            )
        having = [node for node in nodes if np.isfinite(node.values[name]).any()]
        size, size_name = _unit(max(float(np.nanmax(node.values[name])) for node in having))
        if len(nodes) <= SINGLE_NODES:
            for node in having:
                times, values = _line(node, name)
                style = {"marker": "."} if len(times) < 20 else {}
                axis.plot((times - first) / unit, values / size, linewidth=1.3, label=node.name, **style)
        else:
            times, bands = _bands(having, name, first, last)
            low, middle, high = bands / size
            axis.fill_between((times - first) / unit, low, high, color="#1f4e8c", alpha=0.3, linewidth=0)
            axis.plot((times - first) / unit, low, color="#1f4e8c", linewidth=0.6)
            axis.plot((times - first) / unit, high, color="#1f4e8c", linewidth=0.6, label=f"{len(having)} nodes")
            axis.plot((times - first) / unit, middle, color="#0b2545", linewidth=1.3, label="median")
        axis.set_ylim(bottom=0)
        axis.set_xlim(0, max((last - first) / unit, 1e-9))
        axis.set_ylabel(size_name)
        axis.set_title(titles[name], loc="left", fontsize=10)
        tidy(axis)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(9, len(labels)), frameon=False, fontsize=8)
    axes[-1].set_xlabel(f"{unit_name} since the first sample")
    save_figure(figure, path)


def _lines(path: Path) -> list[Mapping[str, Any]]:
    """Complete lines of a file, without those cut off by a kill or a full disk."""
    if not path.exists():
        return []
    whole = list[Mapping[str, Any]]()
    for line in path.read_bytes().splitlines():
        try:
            read = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(read, dict):
            whole.append(read)
    return whole


def _quantities(line: Mapping[str, Any]) -> dict[str, float]:
    """Bytes by quantity, for GPUs the maximum over the node's GPUs."""
    values = {name: float(line[name]) for name in QUANTITIES if name != "gpu" and name in line}
    if gpus := [float(value) for value in line.get("gpu", ()) if value is not None]:
        values["gpu"] = max(gpus)
    return values


def _spans(
    phases: Sequence[tuple[float, str | None]], nodes: Sequence[Node], first: float, last: float
) -> dict[str, list[tuple[float, float]]]:
    """Intervals of each phase, clipped to the samples; the longest phase, which is drawn first, comes first.

    A killed run recorded no end: its phase ends where no node has samples any more.
    """
    sampled = sorted(
        (float(node.time[begin]), float(node.time[end - 1]) + node.seconds)
        for node in nodes
        for begin, end in pairwise([*dict.fromkeys((0, *node.starts)), len(node.time)])
        if begin < end
    )
    killed: list[float] = []
    until = sampled[0][1]
    for begin, end in sampled[1:]:
        if begin > until:
            killed.append(until)
        until = max(until, end)
    marks = sorted([*phases, *((end, None) for end in killed)], key=lambda each: each[0])
    spans: dict[str, list[tuple[float, float]]] = {}
    for (begin, phase), (end, _) in pairwise([*marks, (last, None)]):
        if phase is not None and min(end, last) > max(begin, first):
            spans.setdefault(phase, []).append((max(begin, first), min(end, last)))
    # Rare phases stay visible even if narrower than a pixel.
    pixel = (last - first) / 900
    for ranges in spans.values():
        if len(ranges) < 300:
            ranges[:] = [(begin, max(end, begin + pixel)) for begin, end in ranges]
    return dict(sorted(spans.items(), key=lambda each: -sum(end - begin for begin, end in each[1])))


def _line(node: Node, name: str) -> tuple[Values, Values]:
    """Times and values, downsampled to about `POINTS` by maxima, with NaN between two starts."""
    times, values = [], []
    for begin, end in zip(node.starts or (0,), (*node.starts[1:], len(node.time)), strict=True):
        if begin == end:
            continue
        size = max(1, -(-len(node.time) // POINTS))
        cuts = np.arange(begin, end, size)
        times += [*node.time[cuts], node.time[end - 1], node.time[end - 1]]
        values += [*np.fmax.reduceat(node.values[name][:end], cuts), node.values[name][end - 1], np.nan]
    return np.array(times), np.array(values)


def _bands(nodes: Sequence[Node], name: str, first: float, last: float) -> tuple[Values, Values]:
    """Minimum, median and maximum over the nodes of each node's maximum within equal bins of time.

    Returns:
        Times `[bins]`, and values `[3, bins]`, NaN where no node was sampled.
    """
    width = max(2 * max(node.seconds for node in nodes), (last - first) / POINTS, 1e-9)
    bins = int((last - first) / width) + 1
    times: Values = first + width * (np.arange(bins, dtype=np.float64) + 0.5)
    grid: Values = np.full((len(nodes), bins), np.nan)
    for row, node in zip(grid, nodes, strict=True):
        np.fmax.at(row, ((node.time - first) / width).astype(int), node.values[name])
    bands: Values = np.full((3, bins), np.nan)
    some = np.isfinite(grid).any(axis=0)
    bands[:, some] = np.nanmin(grid[:, some], axis=0), np.nanmedian(grid[:, some], axis=0), np.nanmax(grid[:, some], 0)
    return times, bands


def _peak(peak: Peak | None, nodes: int) -> str:
    if peak is None:
        return ""
    return _size(peak.bytes) + (f" ({peak.node})" if nodes > 1 else "")


def _size(value: float) -> str:
    unit, name = _unit(value)
    return f"{value / unit:,.1f} {name}"


def _unit(value: float) -> tuple[float, str]:
    return (2.0**30, "GiB") if value >= 2**30 else (2.0**20, "MiB")


def _time_unit(seconds: float) -> tuple[float, str]:
    for unit, name, least in ((86400.0, "days", 2), (3600.0, "hours", 2), (60.0, "minutes", 3)):
        if seconds >= least * unit:
            return unit, name
    return 1.0, "seconds"
