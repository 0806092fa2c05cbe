"""What a rehearsal found: tables, rehearsal.json, report.md and a picture of memory over the step."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.architecture.describe import flop, number, size
from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy
from nemo_ext.rehearsal.settings import FP8_WEIGHTS, TE_VERSION

KINDS = ("weights", "gradients", "optimizer", "activations", "temporary")
GIB = 2**30


def write(
    folder: Path, recipe: str, results: Sequence[Mapping[str, Any]], *, limit: float | None, as_json: bool
) -> None:
    """Writes rehearsal.json, report.md and memory.png; prints the tables, or the JSON."""
    made = {"recipe": recipe, "gpu_memory_gib": limit, "results": results}
    write_text(folder / "rehearsal.json", json.dumps(made, indent=1) + "\n")
    _draw(folder / "memory.png", results[0], limit)
    text = "\n\n".join([f"# Rehearsal of {recipe}", *tables(results, limit), "![memory](memory.png)"]) + "\n"
    write_text(folder / "report.md", text)
    if as_json:
        json.dump(made, sys.stdout)
        print()
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=None if sys.stdout.isatty() else 140).print(Markdown(text.rpartition("![")[0]))
    print(f"{folder / 'report.md'}, {folder / 'memory.png'}, {folder / 'rehearsal.json'}")


def tables(results: Sequence[Mapping[str, Any]], limit: float | None) -> list[str]:
    """The report's parts in Markdown."""
    parts = []
    changes = [f"{place}. {result['change']}" for place, result in enumerate(results) if place]
    if changes:
        parts.append("\n".join(["Tried beside the config as it is (0):", "", *changes]))
    ranks = [rank for result in results for rank in result["ranks"]]
    shown = [*KINDS, *([FP8_WEIGHTS] if any(FP8_WEIGHTS in rank["peak"] for rank in ranks) else [])]
    heading = ["try", "pipeline rank", "parameters", *shown, "peak", "cost model", "FLOPs a step", "cost model"]
    rows = []
    for place, result in enumerate(results):
        for rank in result["ranks"]:
            guess, flops = rank["estimate"], sum(rank["flops"].values())
            fits = "" if limit is None else (" fits" if rank["peak_bytes"] <= limit * GIB else " TOO MUCH")
            kinds = [size(rank["peak"].get(kind, 0)) for kind in shown]
            row = [str(place), str(rank["stage"]), number(rank["parameters"]), *kinds]
            row.append(f"{size(rank['peak_bytes'])} ({rank['peak_phase']}){fits}")
            row.append(f"{size(guess['bytes'])} ({_off(guess['bytes'], rank['peak_bytes'])})")
            rows.append([*row, flop(flops), f"{flop(guess['flops'])} ({_off(guess['flops'], flops)})"])
    parts.append(markdown_table(heading, rows))
    parts.append(
        "Bytes that live at the peak of a step, without the CUDA context, NCCL's buffers and what the allocator wastes."
    )
    parts.append(f"Linear layers and FP8 as in Transformer Engine {TE_VERSION}'s sources (docs/rehearsal.md).")
    if FP8_WEIGHTS in shown:
        parts.append("The cost model's bytes are those of BF16, without FP8 copies.")
    for result in results:
        if result["set_aside"]:
            parts.append(f"Rehearsed without {', '.join(result['set_aside'])} (docs/rehearsal.md).")
    if results[0]["imbalance"] > 1:
        parts.append(f"Experts of these ranks get {results[0]['imbalance']:g} times the mean number of tokens.")
    sent = [
        [str(rank["stage"]), each["group"].lower(), each["operation"], f"{each['count']:,}", size(each["bytes"])]
        for rank in results[0]["ranks"]
        for each in rank["collectives"]
    ]
    if sent:
        parts.append("## Communication of a step")
        parts.append(markdown_table(["pipeline rank", "group", "operation", "calls", "bytes"], sent))
    return parts


def _off(guess: float, found: float) -> str:
    return f"{100 * (guess / found - 1):+.0f} %" if found else "-"


def _draw(path: Path, result: Mapping[str, Any], limit: float | None) -> None:
    figure = new_figure(figsize=(9, 4))
    axes = figure.add_subplot()
    for rank in result["ranks"]:
        axes.plot(
            [point[0] for point in rank["curve"]],
            [point[2] / GIB for point in rank["curve"]],
            label=f"pipeline rank {rank['stage']}",
            linewidth=1.2,
        )
    if limit is not None:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="GPU")
    axes.set(xlabel="operations of the rehearsed part of a step", ylabel="GiB", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    tidy(axes)
    save_figure(figure, path)
