"""One-page Markdown report on a child: its architecture, its cost, and its loss before and after healing.

Does not import torch.
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
    "child": "the child as chosen",
    "fused": "with FFN blocks fused",
    "healed": "after distillation from the parent",
    "trained on": "after further training",
}


def write_report(workspace: Workspace, chosen: Settings) -> Path:
    """Write `report.md` and its pictures to the child's folder, and return the report's path.

    Raises:
        ValueError: the child has not been evaluated yet.
    """
    folder = workspace.folder
    rows = _read(folder / "evaluation.json")
    comparison = _read(folder / "comparison.json")
    if (folder / "baselines.json").is_file():
        comparison += _read(folder / "baselines.json")
    seq_length = chosen.serving.context
    for model, name in ((workspace.parent, "parent"), (workspace.newest(), "child")):
        architecture = description_of(model).without_prediction().architecture
        draw_blocks(architecture, folder / f"blocks_{name}.png", seq_length=seq_length)
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
        raise ValueError(f"{file} does not exist yet: run the stages before `report` first")
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    return rows


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    parent, last = rows[0], rows[-1]
    share = last["costs"]["parameters"] / parent["costs"]["parameters"]
    words = (
        f"{share:.0%} of the parent's parameters, {last['blocks']} blocks in sequence instead of "
        f"{parent['blocks']}, validation loss {last['loss']:.4f} instead of {parent['loss']:.4f}."
    )
    by_name = {row["name"]: row for row in rows}
    before = by_name.get("fused", by_name["child"])
    lost = before["loss"] - parent["loss"]
    if "healed" in by_name and lost > 0:
        recovered = (before["loss"] - by_name["healed"]["loss"]) / lost
        words += f" Distillation recovered {recovered:.0%} of the {lost:.4f} nats lost."
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
                f"{row['loss'] * row['predicted'] / row['bytes'] / log(2):.3f}" if row.get("bytes") else "-",
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
        "\\* speed relative to the parent by the roofline of `puzzle.serving`. \\*\\* speed of a "
        f"forward pass over {parent['tokens']:,} tokens on this machine, alternating with the parent "
        f"({parent['forward_seconds'] * 1000:.1f} ms): median round and, in brackets, the slowest and the "
        "fastest. Noise: rounds on either side of 1x, or overlapping ranges. "
        "\\*\\*\\* from the parent, on the same sequences, with the 95% interval of a bootstrap over them."
    )


def _with_interval(difference: Mapping[str, Any] | None) -> str:
    """Format a difference between two models' losses, with its confidence interval if known; "" for None."""
    if difference is None:
        return ""
    if difference["interval"] is None:
        return f"{difference['mean']:+.4f}"
    low, high = difference["interval"]
    return f"{difference['mean']:+.4f} ({low:+.4f} to {high:+.4f})"


def _losses(report: Report, states: Sequence[Mapping[str, Any]], tried: Sequence[Mapping[str, Any]]) -> None:
    """Add a plot of the losses above the parent's against the number of parameters, with confidence intervals.

    Args:
        report: the report.
        states: rows of evaluation.json: the child in every state.
        tried: the parent, candidate choices and baselines; of these, only the baselines are shown.
    """
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
    """Format a model's speedup over the parent, with its range over rounds, marked as noise if the range includes 1.

    Both arguments are rows of evaluation results; the parent's own row gives "1x".
    """
    if row is parent:
        return "1x"
    rounds = row.get("speedups")
    if rounds is None:  # older results have no rounds: use the interquartile range of the repetitions
        spread = sum(each["forward_spread"] / each["forward_seconds"] / 2 for each in (parent, row))
        rounds = [parent["forward_seconds"] / row["forward_seconds"] * (1 + sign * spread) for sign in (-1, 0, 1)]
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
            "" if (tested := row.get("from_child")) is None else f"{_with_interval(tested)}, p = {tested['p']:.2g}",
            f"{row['costs'][resource] / parent['costs'][resource]:.1%}" if parent["costs"][resource] else "-",
            "" if "score" not in row else f"{row['score']:.4f}",
        ]
        for row in rows
    ]
    head = ("before fusion and healing", "loss", "from the parent", "from the child", name, "score")
    note = (
        f"The choices satisfy all limits; the baselines and the search limited by {name} alone satisfy only that one. "
        "Differences are paired by sequence, with 95% intervals (bootstrap) and p (permutation of signs); sequences of "
        "one document are not independent."
    )
    report.table("Comparison", head, cells, note)


_PICTURES = {
    "pareto.png": (
        "The front",
        "The best sum of replace-one-block scores under each bound on one resource, with all other limits unchanged "
        "(`pareto.csv`).",
    ),
    "dependency.png": (
        "FFN fusion",
        "Change of each block's contribution without an earlier block (cosine distance, `dependency.jsonl`); fused "
        "blocks are outlined.",
    ),
    "blocks_parent.png": ("Blocks before",),
    "blocks_child.png": ("Blocks after",),
}
"""Mapping from pictures to the title and text of their sections in the report."""


def _blocks(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe the child's blocks in pattern notation, and those before fusion if fusion changed them.

    `rows` are the rows of evaluation.json; the last one is the child's final state.
    """
    last, chosen = rows[-1], next(row for row in rows if row["name"] == "child")
    text = f"{last['blocks']} blocks: `{last['pattern']}`"
    if chosen["pattern"] == last["pattern"]:
        return text
    return f"{text}\n\nBefore fusion, {chosen['blocks']} blocks: `{chosen['pattern']}`"


def _next(workspace: Workspace) -> str:
    newest, folder = workspace.newest(), workspace.realised()
    (model,) = (folder / "model").glob("*.yaml")
    return (
        f"nemo-ext convert from={newest} to={workspace.exported}\n"
        f"nemo-ext describe --config-dir {folder} model={model.stem}\n"
        f"nemo-ext train --config-dir {folder} model={model.stem} "
        f"megatron.pretrained_checkpoint={checkpoints_of(newest)} ..."
    )
