"""Audit of a blend: a table, a page with a plot, and the blend in trainers' formats. Does not import torch."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemo_ext.data.blends.hierarchy import Leaf
from nemo_ext.data.blends.plan import BlendPlan, Part
from nemo_ext.job.files import write_text
from nemo_ext.job.report import Report, tidy

_UNITS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))


def print_table(plan: BlendPlan, console: Console) -> None:
    """Print a table of the share, tokens, size and epochs of every group and stream."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stream", overflow="fold")
    for name in ("share", "tokens", "available", "epochs"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("divided by", overflow="fold")
    for part in plan.parts:
        style = "red" if plan.too_often(part) else None if isinstance(part.node, Leaf) else "bold"
        table.add_row("  " * part.depth + _label(part), *_cells(part), _rule(part), style=style)
    console.print(table)


def write_blend(plan: BlendPlan, folder: Path, *, title: str) -> Path:
    """Write the audit and the blend's files to a folder; return the audit's path.

    - `report.md`, `blend.png`: the audit.
    - `blend.json`: lists for train, valid and test. Megatron-LM and Megatron-Bridge read it as
      `--per-split-data-args-path` or `per_split_data_args_path` (checked: megatron-core 0.19.2, Bridge's
      `data/loaders.py` of 2026).
    - `blend.txt`: only the training list, for `--data-args-path`, or to paste after `--train-data-path`.
    - `nemo_paths.json`: the same lists under the keys of NeMo 2's `PreTrainingDataModule(paths=...)`.

    Raises:
        ValueError: A prefix has white space, at which Megatron would split `blend.txt`.
    """
    for leaf in plan.root.leaves():
        if len(str(leaf.prefix).split()) != 1:
            raise ValueError(
                f"{leaf.where}: the prefix {str(leaf.prefix)!r} contains whitespace, which Megatron's data path lists "
                "do not support; rename its files and set another prefix"
            )
    train, valid = plan.megatron_words("train"), plan.megatron_words("valid")
    pairs = [f"{weight} {prefix}" for weight, prefix in zip(train[::2], train[1::2], strict=True)]
    write_text(folder / "blend.txt", "\n".join(pairs) + "\n")
    # Both readers require every key, although we do not have a test split.
    write_text(folder / "blend.json", json.dumps({"train": train, "valid": valid, "test": None}, indent=1) + "\n")
    paths = {"train": train, "validation": valid, "test": valid}
    write_text(folder / "nemo_paths.json", json.dumps(paths, indent=1) + "\n")
    return page(plan, title).write(folder / "report.md")


def page(plan: BlendPlan, title: str) -> Report:
    """Build the audit's report: warnings, notes, the plot, and a table of shares."""
    length = "a run of unknown length" if plan.tokens is None else f"{plan.tokens:,} tokens"
    report = Report(title, f"{sum(isinstance(part.node, Leaf) for part in plan.parts)} streams for {length}.")
    if warning := plan.warning():
        report.add(f"**Warning:** {warning}.")
    report.add("\n".join(f"- {note}" for note in plan.notes()))
    _plot(report, plan, title)
    names = [_label(part) if isinstance(part.node, Leaf) else f"**{_label(part)}**" for part in plan.parts]
    rows = [
        (f"{'&emsp;' * part.depth}{name}", *_cells(part), _rule(part))
        for name, part in zip(names, plan.parts, strict=True)
    ]
    note = (
        f"Epochs are passes over a stream's training tokens, with a warning above {plan.max_epochs:g}: up to four, "
        "repeated text is about as good as new text (Muennighoff et al. 2023, arXiv 2305.16264). * marks an assumed "
        "size, † a share at its cap."
    )
    return report.table("Shares", ("stream", "share:", "tokens:", "available:", "epochs:", "divided by"), rows, note)


def _plot(report: Report, plan: BlendPlan, title: str) -> None:
    """Draw shares as bars in the order of the tree and, if any are known, epochs next to them."""
    parts = plan.parts[1:]
    epochs = any(part.epochs is not None for part in parts)
    size = (10 if epochs else 7, 1.4 + 0.24 * len(parts))
    axes = report.picture("shares and epochs", "blend.png", *size, columns=2 if epochs else 1, sharey=True)
    rows = range(len(parts))
    leaf = [isinstance(part.node, Leaf) for part in parts]
    colours = ["#1f4e8c" if is_leaf else "#c3cedd" for is_leaf in leaf]
    bars = axes[0].barh(rows, [100 * float(part.share) for part in parts], color=colours, height=0.7)
    axes[0].bar_label(bars, [f"{100 * float(part.share):.3g} %" for part in parts], padding=3, fontsize=8)
    axes[0].set_xlabel("share of tokens (%)")
    axes[0].margins(x=0.16)
    labels = ["    " * (part.depth - 1) + _label(part) for part in parts]
    axes[0].set_yticks(rows, labels, fontsize=8.5, ha="left")
    axes[0].set_ylim(len(parts) - 0.4, -0.6)
    # Left-aligned names, so that the indentation shows the tree.
    axes[0].tick_params(axis="y", length=0, pad=5.6 * max(map(len, labels)))
    for label, is_leaf in zip(axes[0].get_yticklabels(), leaf, strict=True):
        label.set_fontweight("normal" if is_leaf else "bold")
    if epochs:
        colours = ["#d1495b" if plan.too_often(p) else colour for p, colour in zip(parts, colours, strict=True)]
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        bars = axes[1].barh(rows, [part.epochs or 0 for part in parts], color=colours, height=0.7)
        axes[1].bar_label(bars, [_cells(part)[3] for part in parts], padding=3, fontsize=8, bbox=white)
        # Drawn behind the numbers, to keep them legible.
        axes[1].axvline(plan.max_epochs, color="#d1495b", linewidth=1, linestyle="--", zorder=0.5)
        axes[1].margins(x=0.16)
        axes[1].set_xlabel(f"epochs (dashed: warning above {plan.max_epochs:g})")
        axes[1].tick_params(axis="y", length=0)
    axes[0].figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    tidy(*axes, grid="x")


def _cells(part: Part) -> tuple[str, str, str, str]:
    """Return the share, tokens, size and epochs of a group or stream as cells of a table."""
    size = "?" if part.size is None else _tokens(part.size) + ("*" if part.assumed else "")
    epochs = "?" if part.epochs is None else f"{part.epochs:.3g}" if part.epochs < 1000 else f"{part.epochs:,.0f}"
    return (
        f"{100 * float(part.share):.4g} %" + ("†" if part.capped else ""),
        "?" if part.tokens is None else _tokens(part.tokens),
        size,
        epochs,
    )


def _tokens(number: float) -> str:
    unit, name = next((entry for entry in _UNITS if number >= entry[0]), (1.0, ""))
    return f"{number / unit:.4g}{name}"


def _label(part: Part) -> str:
    return part.node.name if isinstance(part.node, Leaf) else part.node.key or "all"


def _rule(part: Part) -> str:
    if isinstance(part.node, Leaf):
        return ""
    setting = {"temperature": "alpha", "tiers": "decay"}.get(part.node.by)
    return part.node.by if setting is None else f"{part.node.by}, {setting} {float(part.node.setting or 0):g}"
