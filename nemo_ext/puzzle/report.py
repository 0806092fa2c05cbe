"""One-page report of a child: its architecture and cost, the loss it lost and recovered; Markdown with pictures.

No torch.
"""

import json
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from nemo_ext.architecture.draw import draw_blocks
from nemo_ext.checkpoint.start import checkpoints_of, description_of
from nemo_ext.job.report import Report, error_bar, markdown_table, outer_legend, tidy
from nemo_ext.puzzle.settings import Settings
from nemo_ext.puzzle.workspace import Workspace

REPORT, LOSSES = "report.md", "losses.png"
STATES = {
    "parent": "the parent",
    "child": "the child, put together",
    "fused": "with FFN blocks fused",
    "healed": "after distillation from the parent",
    "trained on": "after further training",
}


def write_report(workspace: Workspace, chosen: Settings) -> Path:
    """Write `report.md` and its pictures into the child's folder from the stages' results; returns its path.

    Raises:
        ValueError: the child has not been evaluated yet.
    """
    folder = workspace.folder
    rows = _read(folder / "evaluation.json")
    comparison = _read(folder / "comparison.json")
    if (folder / "baselines.json").is_file():
        comparison += _read(folder / "baselines.json")
    seq_length = chosen.serving.context
    draw_blocks(description_of(workspace.parent).architecture, folder / "blocks_parent.png", seq_length=seq_length)
    draw_blocks(description_of(workspace.newest()).architecture, folder / "blocks_child.png", seq_length=seq_length)
    report = Report(workspace.child, _summary(rows), _states(rows))
    _losses(report, rows, comparison)
    _comparison(report, comparison, json.loads((folder / "choices.json").read_text())["resource"])
    for name, (title, *text) in _PICTURES.items():
        if (folder / name).is_file():
            report.section(title, *text, f"![{name}]({name})")
    report.add(_blocks(rows)).section("Next").code(_next(workspace), "bash")
    return report.write(folder / REPORT)


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise ValueError(f"{file}: not there yet, so there is nothing to report: run the stages before")
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    parent, last = rows[0], rows[-1]
    share = last["costs"]["parameters"] / parent["costs"]["parameters"]
    words = (
        f"{share:.0%} of the parent's parameters, {last['blocks']} blocks one after the other instead of "
        f"{parent['blocks']}, validation loss {last['loss']:.4f} instead of {parent['loss']:.4f}."
    )
    by_name = {row["name"]: row for row in rows}
    before = by_name.get("fused", by_name["child"])
    lost = before["loss"] - parent["loss"]
    if "healed" in by_name and lost > 0:
        back = (before["loss"] - by_name["healed"]["loss"]) / lost
        words += f" Distillation brought back {back:.0%} of the {lost:.4f} nats that were lost."
    return words


def _states(rows: Sequence[Mapping[str, Any]]) -> str:
    parent = rows[0]
    cells = []
    for row in rows:
        costs, whole = row["costs"], parent["costs"]
        cells.append(
            [
                STATES[row["name"]],
                f"{row['loss']:.4f}",
                "" if row is parent else _with_interval(row.get("from_parent")),
                f"{bits:.3f}" if (bits := _bits_per_byte(row)) else "-",
                str(row["blocks"]),
                f"{costs['parameters']:,.0f} ({costs['parameters'] / whole['parameters']:.0%})",
                f"{costs['active_parameters'] / whole['active_parameters']:.0%}",
                f"{costs['cache_bytes'] / whole['cache_bytes']:.0%}" if whole["cache_bytes"] else "-",
                f"{whole['prefill_seconds'] / costs['prefill_seconds']:.2f}x",
                f"{whole['decode_seconds'] / costs['decode_seconds']:.2f}x",
                _measured(row, parent),
                f"{row['tokens'] / row['forward_seconds']:,.0f}" if "forward_seconds" in row else "-",
            ]
        )
    head = ["", "loss", "difference***", "bits per byte", "blocks in sequence", "parameters", "active", "cache"]
    head += ["prefill*", "decode*", "measured**", "tokens/s**"]
    return (
        f"{markdown_table(head, cells)}\n\n"
        "\\* speed beside the parent by the roofline of `puzzle.serving`. \\*\\* speed of a "
        f"forward pass over {parent['tokens']:,} tokens on this machine, in turn with the parent "
        f"({parent['forward_seconds'] * 1000:.1f} ms): the median round and, in brackets, the slowest and the "
        "fastest. Noise: rounds on either side of 1x, or two ranges that overlap. "
        "\\*\\*\\* from the parent, on the same sequences, with the 95% interval of a bootstrap over them."
    )


def _bits_per_byte(row: Mapping[str, Any]) -> float | None:
    """Loss per byte of the text; None where the tokenizer is not known."""
    return row["loss"] * row["predicted"] / row["bytes"] / log(2) if row.get("bytes") else None


def _with_interval(difference: Mapping[str, Any] | None) -> str:
    """A paired difference with its interval; nothing where it was not measured."""
    if difference is None:
        return ""
    if difference["interval"] is None:
        return f"{difference['mean']:+.4f}"
    low, high = difference["interval"]
    return f"{difference['mean']:+.4f} ({low:+.4f} to {high:+.4f})"


def _tested(difference: Mapping[str, Any] | None) -> str:
    """A paired difference with its interval and p."""
    return "" if difference is None else f"{_with_interval(difference)}, p = {difference['p']:.2g}"


def _losses(report: Report, states: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]) -> None:
    """Draws loss above the parent's against parameters, with intervals: the child's states and the baselines."""
    from matplotlib import colormaps

    (axes,) = report.picture("loss against parameters", LOSSES, 8, 4.5)
    known = [("o", row) for row in states] + [("s", row) for row in tried[1:]]
    shown = [pair for pair in known if "from_parent" in pair[1] and not pair[1]["name"].startswith("choice")]
    for number, (marker, row) in enumerate(shown):
        mean, bars = row["from_parent"]["mean"], error_bar(row["from_parent"]["mean"], row["from_parent"]["interval"])
        looks: Any = {"marker": marker, "linestyle": "", "capsize": 3, "color": colormaps["tab20"](number % 20)}
        axes.errorbar(row["costs"]["parameters"] / 1e6, mean, yerr=bars, label=row["name"], **looks)
    axes.set_yscale("symlog", linthresh=0.1)
    tidy(axes, xlabel="parameters, millions", ylabel="loss above the parent's, nats per token")
    outer_legend([axes], "right upper", columns=1)


def _measured(row: Mapping[str, Any], parent: Mapping[str, Any]) -> str:
    """The speedup over the parent with its spread over rounds, marked where it may be noise."""
    if row is parent:
        return "1x"
    rounds = row.get("speedups")
    if rounds is None:  # measured before rounds were kept: use the middle half of the repetitions
        doubt = sum(each["forward_spread"] / each["forward_seconds"] / 2 for each in (parent, row))
        rounds = [parent["forward_seconds"] / row["forward_seconds"] * (1 + sign * doubt) for sign in (-1, 0, 1)]
    noise = ", noise" if min(rounds) <= 1 <= max(rounds) else ""
    return f"{median(rounds):.2f}x ({min(rounds):.2f} to {max(rounds):.2f}{noise})"


def _comparison(report: Report, rows: Sequence[Mapping[str, Any]], resource: str) -> None:
    parent, name = rows[0], resource.replace("_", " ")
    cells = [
        [row["name"], row["cannot"], "", "", "", ""]
        if "cannot" in row
        else [
            row["name"],
            f"{row['loss']:.4f}",
            _with_interval(row.get("from_parent")) or f"{row['loss'] - parent['loss']:+.4f}",
            _tested(row.get("from_child")),
            f"{row['costs'][resource] / parent['costs'][resource]:.1%}" if parent["costs"][resource] else "-",
            "" if "score" not in row else f"{row['score']:.4f}",
        ]
        for row in rows
    ]
    head = ("before fusion and healing", "loss", "from the parent", "from the child", name, "score")
    note = (
        f"The choices keep to all limits; pruning, dropping and the search beside them to that on {name} alone. "
        "Differences are paired by sequence, with 95% intervals (bootstrap) and p (permutation of signs); sequences of "
        "one document are not independent."
    )
    report.table("What was tried", head, cells, note)


_PICTURES = {
    "pareto.png": (
        "The front",
        "The best score within every bound on one resource, all other limits kept, by the sum of replace-one-block "
        "scores (`pareto.csv`).",
    ),
    "dependency.png": (
        "FFN fusion",
        "How much each block's contribution changes without an earlier one (cosine distance, `dependency.jsonl`); what "
        "was fused, if anything, is outlined.",
    ),
    "blocks_parent.png": ("Blocks before",),
    "blocks_child.png": ("Blocks after",),
}
"""Sections of pictures that stages draw: title, and text."""


def _blocks(rows: Sequence[Mapping[str, Any]]) -> str:
    """The child's notation now, and as the search chose it if fusion changed it."""
    last, chosen = rows[-1], next(row for row in rows if row["name"] == "child")
    text = f"{last['blocks']} blocks: `{last['pattern']}`"
    if chosen["pattern"] == last["pattern"]:
        return text
    return f"{text}\n\nBefore fusion, {chosen['blocks']} blocks: `{chosen['pattern']}`"


def _next(workspace: Workspace) -> str:
    newest, made = workspace.newest(), workspace.realised()
    (model,) = (made / "model").glob("*.yaml")
    return (
        f"nemo-ext convert from={newest} to={workspace.exported}\n"
        f"nemo-ext describe --config-dir {made} model={model.stem}\n"
        f"nemo-ext train --config-dir {made} model={model.stem} "
        f"megatron.pretrained_checkpoint={checkpoints_of(newest)} ..."
    )
