"""Report of SFT data: tasks, modes and languages as in Domyn's tables 2 to 4, what was left out and why."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nemo_ext.chat.reasoning import ReasoningReport
from nemo_ext.data.packs.packed_files import PackedManifest
from nemo_ext.data.sft.settings import SftSettings
from nemo_ext.data.sft.shards import MODES
from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy

if TYPE_CHECKING:
    from nemo_ext.data.sft.choice import Chosen, Table

PLOT = "report.png"
_SHOWN = 30
"""Largest number of rows of a table; the rest is one row."""


def write_report(settings: SftSettings, table: "Table", chosen: "Chosen", packed: Mapping[str, PackedManifest]) -> Path:
    """Write report.md and its plot into the output folder; returns the report's path."""
    rows = chosen.train
    groups = {
        "Tasks": (table.tasks, table.task_names),
        "Modes": (table.modes, list(MODES)),
        "Languages": (table.languages, table.language_names),
    }
    shares = [f"## Shares of thinking\n\n{_shares(chosen)}"] if chosen.shares else []
    preset = f", preset {settings.preset}" if settings.preset else ""
    sections = [
        f"# {settings.output.name}: SFT data{preset}\n\n{_contents(packed)}",
        f"## Sources\n\n{_sources(settings, table, chosen)}",
        *(f"## {title}\n\n{_counts(table, rows, of, names)}" for title, (of, names) in groups.items()),
        *shares,
        f"## Left out\n\n{_left_out(chosen)}",
        f"## Reasoning\n\n{_reasoning(table, chosen)}",
        f"## Lengths\n\n![lengths of samples, mixture of tasks]({PLOT})",
    ]
    _plot(table, chosen, settings, settings.output / PLOT)
    path = settings.output / "report.md"
    write_text(path, "\n\n".join(sections) + "\n")
    return path


def _contents(packed: Mapping[str, PackedManifest]) -> str:
    return "\n".join(f"- {name}: {manifest.contents()}" for name, manifest in packed.items())


def _sources(settings: SftSettings, table: "Table", chosen: "Chosen") -> str:
    read = {number: report.records for number, report in table.reports.items()}
    used = np.bincount(table.sources[table.samples[chosen.train]], minlength=len(settings.sources))
    tokens = np.bincount(
        table.sources[table.samples[chosen.train]], weights=table.lengths[chosen.train], minlength=len(settings.sources)
    )
    lines = [
        [source.name, f"{read.get(number, 0):,}", f"{passes:.2f}", f"{used[number]:,}", f"{int(tokens[number]):,}"]
        for number, (source, passes) in enumerate(zip(settings.sources, chosen.passes, strict=True))
    ]
    return markdown_table(["source", "records read", "passes", "texts trained on", "tokens"], lines)


def _counts(table: "Table", rows: npt.NDArray[np.int64], of: npt.NDArray[np.int64], names: Sequence[str]) -> str:
    weights = (None, table.lengths[rows], table.trained[rows])
    amounts = np.stack([np.bincount(of[rows], weights=each, minlength=len(names)) for each in weights]).astype(np.int64)
    order = [int(number) for number in np.argsort(-amounts[1], kind="stable") if amounts[0, number]]
    groups = [(names[number] or "not said", [number]) for number in order[:_SHOWN]]
    if rest := order[_SHOWN:]:
        groups.append((f"{len(rest)} others", rest))
    lines, tokens = [], int(table.lengths[rows].sum())
    for name, members in groups:
        count, size, learnt = amounts[:, members].sum(axis=1).tolist()
        shares = f"{count / len(rows):.1%}", f"{size / tokens:.1%}"
        lines.append([name, f"{count:,}", shares[0], f"{size:,}", shares[1], f"{learnt:,}"])
    return markdown_table(["", "texts", "share", "tokens", "share of tokens", "tokens with loss"], lines)


def _left_out(chosen: "Chosen") -> str:
    report = chosen.left_out
    lines = [
        [reason, f"{count:,}", "; ".join(place[:400] for place in report.examples.get(reason, [])[:3])]
        for reason, count in Counter(report.skipped).most_common()
    ]
    text = markdown_table(["reason", "how many", "the first ones"], lines) if lines else "Nothing."
    if report.ignored:
        text += "\n\nKeys of messages that mean nothing here: " + ", ".join(
            f"{key} ({count:,})" for key, count in report.ignored.most_common()
        )
    return text


def _shares(chosen: "Chosen") -> str:
    lines = [
        [task or "not said", f"{target:.1%}", f"{on / (on + off):.1%}" if on + off else "", f"{on:,}", f"{off:,}"]
        for task, (target, on, off) in chosen.shares.items()
    ]
    return markdown_table(["task", "target", "reached", "samples on", "off"], lines)


def _reasoning(table: "Table", chosen: "Chosen") -> str:
    report = ReasoningReport(counts=chosen.changed + chosen.left_out.changed)
    for shard in table.shards:
        report.counts.update(shard.reasoning.counts)
        report.truncated.update({int(budget): count for budget, count in shard.reasoning.truncated.items()})
    return report.markdown() if report.counts else "As it came."


def _plot(table: "Table", chosen: "Chosen", settings: SftSettings, path: Path) -> None:
    """Plot a histogram of the texts' lengths, and each task's tokens by mode."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    rows = chosen.train
    figure = new_figure(figsize=(10, 4.2))
    lengths, tasks = figure.subplots(1, 2, width_ratios=(1.2, 1))
    most = int(table.lengths[rows].max())
    bins = np.geomspace(max(1, int(table.lengths[rows].min())), most + 1, 50)
    lengths.hist(table.lengths[rows], bins=bins, color="#1f4e8c", alpha=0.85)
    lengths.axvline(settings.packing.capacity, color="#d1495b", linewidth=1.2, label="a pack")
    lengths.set_xscale("log")
    lengths.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    lengths.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    lengths.xaxis.set_minor_formatter(NullFormatter())
    lengths.set_xlabel("tokens of a text")
    lengths.set_ylabel("texts")
    lengths.set_title("Lengths", loc="left", fontsize=11)
    lengths.legend(frameon=False)
    sizes = np.bincount(table.tasks[rows], weights=table.lengths[rows], minlength=len(table.task_names))
    order = np.argsort(sizes)[-12:]
    left = np.zeros(len(order))
    for mode, (name, colour) in enumerate(zip(MODES, ("#edae49", "#1f4e8c"), strict=True)):
        of_mode = rows[table.modes[rows] == mode]
        if not len(of_mode):
            continue
        amount = np.bincount(table.tasks[of_mode], weights=table.lengths[of_mode], minlength=len(sizes))[order] / 1e6
        names = [table.task_names[number] or "not said" for number in order]
        tasks.barh(names, amount, left=left, color=colour, label=f"thinking {name}")
        left += amount
    tasks.set_xlabel("million tokens")
    tasks.set_title("Tasks", loc="left", fontsize=11)
    tasks.legend(frameon=False)
    for axis in (lengths, tasks):
        tidy(axis, grid=None)
    save_figure(figure, path, dpi=130)
