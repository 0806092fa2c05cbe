"""Report on SFT data: tasks, modes and languages as in Domyn's tables 2 to 4, and skipped records by reason."""

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
from nemo_ext.job.report import Report, tidy

if TYPE_CHECKING:
    from nemo_ext.data.sft.choice import Chosen, Table

PLOT = "report.png"
_SHOWN = 30
"""Maximum number of rows in a table; further entries are summed in one row."""


def write_report(settings: SftSettings, table: "Table", chosen: "Chosen", packed: Mapping[str, PackedManifest]) -> Path:
    """Write report.md and its plot to the output folder; return the report's path."""
    rows = chosen.train
    preset = f", preset {settings.preset}" if settings.preset else ""
    contents = "\n".join(f"- {name}: {manifest.contents()}" for name, manifest in packed.items())
    report = Report(f"{settings.output.name}: SFT data{preset}", contents)
    read = ("source", "records read", "passes", "texts trained on", "tokens")
    report.table("Sources", read, _sources(settings, table, chosen))
    heading = ("", "texts", "share", "tokens", "share of tokens", "tokens with loss")
    report.table("Tasks", heading, _counts(table, rows, table.tasks, table.task_names))
    report.table("Modes", heading, _counts(table, rows, table.modes, MODES))
    report.table("Languages", heading, _counts(table, rows, table.languages, table.language_names))
    shares = [
        [task or "(none)", f"{target:.1%}", f"{on / (on + off):.1%}" if on + off else "", f"{on:,}", f"{off:,}"]
        for task, (target, on, off) in chosen.shares.items()
    ]
    report.table("Shares of thinking", ("task", "target", "reached", "samples on", "off"), shares)
    _skipped(report, chosen)
    report.section("Reasoning", _reasoning(table, chosen))
    _lengths(report, table, chosen, settings)
    return report.write(settings.output / "report.md")


def _sources(settings: SftSettings, table: "Table", chosen: "Chosen") -> list[list[str]]:
    read = {number: report.records for number, report in table.reports.items()}
    sources, count = table.sources[table.samples[chosen.train]], len(settings.sources)
    used = np.bincount(sources, minlength=count)
    tokens = np.bincount(sources, weights=table.lengths[chosen.train], minlength=count)
    return [
        [source.name, f"{read.get(number, 0):,}", f"{passes:.2f}", f"{used[number]:,}", f"{int(tokens[number]):,}"]
        for number, (source, passes) in enumerate(zip(settings.sources, chosen.passes, strict=True))
    ]


def _counts(
    table: "Table", rows: npt.NDArray[np.int64], groups_of: npt.NDArray[np.int64], names: Sequence[str]
) -> list[list[str]]:
    """Return a table's lines for groups of rows, such as tasks: name, texts, share, tokens, share, trained tokens.

    Args:
        rows: indices of the rows to count.
        groups_of: [all rows] each row's group, as an index into `names`.
        names: names of the groups.
    """
    weights, count = (None, table.lengths[rows], table.trained[rows]), len(names)
    amounts = np.stack([np.bincount(groups_of[rows], weight, count) for weight in weights]).astype(np.int64)
    order = [int(number) for number in np.argsort(-amounts[1], kind="stable") if amounts[0, number]]
    groups = [(names[number] or "(none)", [number]) for number in order[:_SHOWN]]
    if rest := order[_SHOWN:]:
        groups.append((f"{len(rest)} others", rest))
    lines, tokens = [], int(table.lengths[rows].sum())
    for name, members in groups:
        count, size, learnt = amounts[:, members].sum(axis=1).tolist()
        shares = f"{count / len(rows):.1%}", f"{size / tokens:.1%}"
        lines.append([name, f"{count:,}", shares[0], f"{size:,}", shares[1], f"{learnt:,}"])
    return lines


def _skipped(report: Report, chosen: "Chosen") -> None:
    skipped = chosen.all_skipped
    rows = [
        [reason, f"{count:,}", "; ".join(place[:400] for place in skipped.examples.get(reason, [])[:3])]
        for reason, count in Counter(skipped.skipped).most_common()
    ]
    report.section("Skipped").table("", ("reason", "count", "first examples"), rows)
    ignored = ", ".join(f"{key} ({count:,})" for key, count in skipped.ignored.most_common())
    report.add("" if rows else "Nothing.", ignored and f"Ignored keys of messages: {ignored}")


def _reasoning(table: "Table", chosen: "Chosen") -> str:
    report = ReasoningReport(counts=chosen.changed + chosen.all_skipped.changed)
    for shard in table.shards:
        report.counts.update(shard.reasoning.counts)
        report.truncated.update({int(budget): count for budget, count in shard.reasoning.truncated.items()})
    return report.markdown() if report.counts else "Unchanged."


def _lengths(report: Report, table: "Table", chosen: "Chosen", settings: SftSettings) -> None:
    """Draw a histogram of text lengths, and each task's tokens by mode."""
    from matplotlib.ticker import LogLocator, NullFormatter

    rows = chosen.train
    report.section("Lengths")
    caption = "lengths of samples, mixture of tasks"
    lengths, tasks = report.picture(caption, PLOT, 10, 4.2, columns=2, width_ratios=(1.2, 1))
    longest = int(table.lengths[rows].max())
    bins = np.geomspace(max(1, int(table.lengths[rows].min())), longest + 1, 50).tolist()
    lengths.hist(table.lengths[rows], bins=bins, color="#1f4e8c", alpha=0.85)
    lengths.axvline(settings.packing.capacity, color="#d1495b", linewidth=1.2, label="a pack")
    tidy(lengths, grid=None, xlabel="tokens of a text", ylabel="texts", xscale="log", title="Lengths", legend=True)
    locator = LogLocator(subs=(1.0, 2.0, 5.0))
    lengths.xaxis.set(major_locator=locator, major_formatter="{x:,.0f}", minor_formatter=NullFormatter())
    sizes = np.bincount(table.tasks[rows], weights=table.lengths[rows], minlength=len(table.task_names))
    order = np.argsort(sizes)[-12:]
    names, left = [table.task_names[number] or "(none)" for number in order], np.zeros(len(order))
    for mode, (name, colour) in enumerate(zip(MODES, ("#edae49", "#1f4e8c"), strict=True)):
        of_mode = rows[table.modes[rows] == mode]
        amount = np.bincount(table.tasks[of_mode], weights=table.lengths[of_mode], minlength=len(sizes))[order] / 1e6
        if amount.any():
            tasks.barh(names, amount, left=left, color=colour, label=f"thinking {name}")
        left += amount
    tidy(tasks, grid=None, xlabel="million tokens", title="Tasks", legend=True)
