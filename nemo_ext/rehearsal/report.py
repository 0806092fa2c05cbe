"""Report of a rehearsal: tables, rehearsal.json, report.md and a plot of memory use during a step."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_ext.architecture.describe import flop, number, size
from nemo_ext.architecture.gpus import GPUS
from nemo_ext.job.files import write_text
from nemo_ext.job.report import Report, tidy
from nemo_ext.puzzle.plan import REACHED, StageWork
from nemo_ext.rehearsal.search import prediction_text
from nemo_ext.rehearsal.settings import QUANTISED_WEIGHTS, TE_VERSION

COLORS = {
    "weights": "#31688e",
    QUANTISED_WEIGHTS: "#5f7f3f",
    "teacher": "#7ea6c4",
    "variants": "#443a83",
    "gradients": "#35b779",
    "optimizer": "#a5db36",
    "activations": "#f2b134",
    "temporary": "#d95f3b",
}
KINDS = tuple(COLORS)
PUZZLE_NOTE = (
    "Each rank of library, distill, score and compare holds the whole parent, or its shard (`puzzle.fsdp`); compare "
    "also holds a child of the largest variants. FLOPs are per step in distill, per two batches in the other stages. "
    "Healing is rehearsed with parent and a child of the same size."
)
GIB = 2**30


def write(
    folder: Path,
    recipe: str,
    results: Sequence[Mapping[str, Any]],
    *,
    model: str | None = None,
    limit: float | None,
    gpu: str | None = None,
    as_json: bool,
    searched: Mapping[str, Any] | None = None,
    failed: Mapping[str, str] | None = None,
) -> None:
    """Write rehearsal.json, report.md and memory.png, and print the tables or the JSON.

    Args:
        folder: folder for the files.
        recipe: name of the recipe, for the title.
        results: results of rehearsing the config and its changes.
        model: name of the model, which the command line may have changed; None if unknown.
        limit: memory that a GPU offers, in GiB; None if unknown.
        gpu: name of the GPUs; None if unknown.
        as_json: whether to print the JSON.
        searched: summary from `search.search`; None without a search.
        failed: mapping from changes that could not be rehearsed to the reasons.
    """
    failed = failed or {}
    record = {
        "recipe": recipe,
        "model": model,
        "gpu_memory_gib": limit,
        "search": searched,
        "results": results,
        "failed": failed,
    }
    write_text(folder / "rehearsal.json", json.dumps(record, indent=1) + "\n")
    report = Report(f"Rehearsal of {recipe}" + (f" with model {model}" if model else ""))
    if searched is not None:
        _search(report, searched)
    if results:
        _results(report, results, limit, gpu)
        report.add(*(f"Could not be rehearsed: {change}: {why}." for change, why in failed.items()))
    text = report.markdown()
    if results:
        _draw(report, _shown(results, searched), limit)
    path = report.write(folder / "report.md")
    if as_json:
        json.dump(record, sys.stdout)
        print()
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=None if sys.stdout.isatty() else 140).print(Markdown(text))
    print(f"{path}, {folder / 'memory.png'}, {folder / 'rehearsal.json'}")


def _results(report: Report, results: Sequence[Mapping[str, Any]], limit: float | None, gpu: str | None) -> None:
    changes = [f"{result['number']}. {result['change']}" for result in results if result["number"]]
    if changes and not results[0]["number"]:
        report.add("\n".join(["Changes of the config, which is number 0:", "", *changes]))
    ranks = [rank for result in results for rank in result["ranks"]]
    shown = [kind for kind in KINDS if any(rank["peak"].get(kind) for rank in ranks)]
    heading = ["try", _label(ranks), "parameters", *shown, "peak", "cost model", "FLOPs per step", "cost model"]
    rows = []
    for result in results:
        for rank in result["ranks"]:
            estimate, flops = rank.get("estimate"), sum(rank["flops"].values())
            fits = "" if limit is None else (" fits" if rank["peak_bytes"] <= limit * GIB else " TOO MUCH")
            kinds = [size(rank["peak"].get(kind, 0)) for kind in shown]
            row = [result["number"], _name(rank), number(rank["parameters"]), *kinds]
            row.append(f"{size(rank['peak_bytes'])} ({rank['peak_phase']}){fits}")
            row.append(
                "" if estimate is None else f"{size(estimate['bytes'])} ({_off(estimate['bytes'], rank['peak_bytes'])})"
            )
            row += [
                flop(flops),
                "" if estimate is None else f"{flop(estimate['flops'])} ({_off(estimate['flops'], flops)})",
            ]
            rows.append(row)
    report.table("", heading, rows).add(
        "Live bytes at the peak of a step, without the CUDA context, NCCL's buffers and fragmentation of the "
        "allocator.",
        f"Linear layers, FP8 and NVFP4 as in the sources of Transformer Engine {TE_VERSION} (docs/rehearsal.md).",
        "The cost model assumes BF16, without FP8 and NVFP4 copies." if QUANTISED_WEIGHTS in shown else None,
        PUZZLE_NOTE if "name" in ranks[0] else None,
    )
    for result in results:
        if "prediction" in result:
            report.add(_predicted(result))
        if "checkpoint" in result:
            report.add(_saved(result))
        if result.get("work"):
            _work(report, result, gpu)
        if result["set_aside"]:
            report.add(f"Rehearsed without {', '.join(result['set_aside'])} (docs/rehearsal.md).")
    if results[0]["imbalance"] > 1:
        report.add(f"The experts of these ranks receive {results[0]['imbalance']:g} times the mean number of tokens.")
    rows = [
        [_name(rank), sent["group"].lower(), sent["operation"], sent["count"], size(sent["bytes"])]
        for rank in results[0]["ranks"]
        for sent in rank["collectives"]
    ]
    which = f", try {results[0]['number']}" if len(results) > 1 else ""
    heading = [_label(ranks), "group", "operation", "calls", "bytes"]
    report.table(f"Communication per step{which}", heading, rows)


def _name(rank: Mapping[str, Any]) -> str:
    """Name of a rank in tables: the compression stage if there is one, otherwise its pipeline rank."""
    return str(rank.get("name", rank["stage"]))


def _label(ranks: Sequence[Mapping[str, Any]]) -> str:
    return "stage" if "name" in ranks[0] else "pipeline rank"


def _work(report: Report, result: Mapping[str, Any], gpu: str | None) -> None:
    """Add a table of the FLOPs of each compression stage, with GPU hours if `gpu` is a known GPU."""
    heading = ("stage", "FLOPs of all ranks", "gathered per rank", "from host memory", "written", "hours")
    rows = []
    for work in (StageWork(**fields) for fields in result["work"]):
        hours = "" if gpu not in GPUS else f"{work.hours(GPUS[gpu], result['world'], result['nodes']):,.1f}"
        sizes = (work.gathered_bytes, work.host_bytes, work.written_bytes, work.passing_bytes, work.held_bytes)
        texts = [size(count) if count else "" for count in sizes]
        rows.append((work.stage, flop(work.flops), *texts[:3], hours, *texts[3:]))
    on = f" Hours assume {result['world']} {gpu} at {REACHED:.0%} of their peaks." if gpu in GPUS else ""
    which = f", try {result['number']}" if result["number"] else ""
    note = (
        f"By the cost model, without reading data and disk time.{on} Read and written: block inputs between groups of "
        "variants (`puzzle.distill.inputs`) and checkpoints of variants."
    )
    report.table(f"Total work of the stages{which}", (*heading, "read and written", "maximum on disk"), rows, note)


def _predicted(result: Mapping[str, Any]) -> str:
    predicted = result["prediction"]
    estimates = ", ".join(predicted["estimates"])
    note = f" Estimates among the GPU's rates: {estimates} (docs/throughput.md)." if estimates else ""
    try_ = f"{result['number']}: " if result["number"] else ""
    return f"{try_}{prediction_text(predicted)}{note}"


def _saved(result: Mapping[str, Any]) -> str:
    saved = result["checkpoint"]
    lists = ", ".join(f"`{rank['checkpoint']['list']}`" for rank in result["ranks"])
    about = "about " if saved["estimated"] else ""
    sizes = [size(saved[f"{part}bytes"]) for part in ("", "own_", "model_")]
    try_ = f"{result['number']}: " if result["number"] else ""
    return (
        f"{try_}A checkpoint is {about}{sizes[0]}, {sizes[1]} of it written by one of {saved['writers']:,} ranks; "
        f"the model alone is {about}{sizes[2]}. Its tensors: {lists}."
    )


def _search(report: Report, searched: Mapping[str, Any]) -> None:
    """Add the result of a search (the summary from `search.search`): best command, rehearsed layouts, assumptions."""
    gpu, config_layout, tried = searched["gpu"], searched["own"], searched["tried"]
    best = next((line for line in tried if line.get("fits")), None)
    if best is not None:
        command = " ".join(part for part in (shlex.join(searched["command"]), best["words"]) if part)
        report.add(f"Fastest layout that fits, by predicted time: {best['layout']}").code(f"nemo-ext train {command}")
    else:
        report.add("None of the rehearsed layouts fits: use more GPUs.")
    report.add(
        f"{searched['candidates']:,} candidates on {searched['gpus']:,} {gpu['name']}, ordered by predicted time "
        "(docs/throughput.md). The first ones that fit by the cost model were rehearsed; a layout fits if it leaves "
        f"{1 - searched['fill']:.0%} of {gpu['memory_gib']:g} GiB free."
    )
    seconds = [line["seconds"] for line in tried]
    times = [
        name for name in seconds[0] if name != "total" and any(line[name] >= 0.001 * line["total"] for line in seconds)
    ]
    lines = [*([] if config_layout is None else [{**config_layout, "number": "config"}]), *tried]
    rows = []
    for line in lines:
        if "peak_bytes" in line:
            peak = f"{size(line['peak_bytes'])} {'fits' if line['fits'] else 'TOO MUCH'}"
        else:
            peak = "failed" if "error" in line else ""
        seconds = [f"{line['seconds'][name]:.3g}" for name in ("total", *times)]
        speed = [f"{line['tokens_per_second']:,.0f}", f"{line['mfu']:.1%}"]
        rows.append([line["number"], line["layout"], *seconds, *speed, size(line["bytes"]), peak])
    heading = ["", "layout", "step (s)", *(f"{name} (s)" for name in times), "tokens/s per GPU", "MFU"]
    heading += ["bytes: cost model", "bytes: rehearsal"]
    report.table("", heading, rows)
    report.add("\n".join(f"{line['number']}. `{line['words'] or 'no change'}`" for line in tried))
    errors = [f"- {line['number']} failed: {line['error']}" for line in tried if "error" in line]
    reasons = [
        f"- {count:,} faster layouts excluded: {reason}" for reason, count in list(searched["refused"].items())[:5]
    ]
    report.add("\n".join([*errors, *reasons]))


def _shown(results: Sequence[Mapping[str, Any]], searched: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Select the result to plot: of the fastest layout that fits, if a search found one, and otherwise the first."""
    fitting = [line["number"] for line in (searched or {}).get("tried", ()) if line.get("fits")]
    return next((result for result in results if result["number"] in fitting), results[0])


def _off(estimate: float, measured: float) -> str:
    return f"{100 * (estimate / measured - 1):+.0f} %" if measured else "-"


def _draw(report: Report, result: Mapping[str, Any], limit: float | None) -> None:
    """Plot each rank's memory over the step as a line, and next to it each rank's peak as a bar divided by kind.

    The memory `limit` in GiB, if known, is a dashed line.
    """
    ranks = result["ranks"]
    axes, bars = report.picture("memory", "memory.png", 11, 4, columns=2, sharey=True, width_ratios=(2, 1))
    for rank in ranks:
        label = _name(rank) if "name" in rank else f"pipeline rank {rank['stage']}"
        curve = [(point[0], point[2] / GIB) for point in rank["curve"]]
        axes.plot(*zip(*curve, strict=True), label=label, linewidth=1.2)
    below = [0.0] * len(ranks)
    places = range(len(ranks))
    for kind in KINDS:
        heights = [rank["peak"].get(kind, 0) / GIB for rank in ranks]
        if any(heights):
            bars.bar(places, heights, 0.7, bottom=below, label=kind, color=COLORS[kind])
            below = [low + height for low, height in zip(below, heights, strict=True)]
    for each in (axes, bars):
        if limit is not None:
            each.axhline(limit, color="black", linestyle="--", linewidth=1, label="limit" if each is axes else None)
    bars.set_xticks(places, [_name(rank) for rank in ranks], rotation=30 if "name" in ranks[0] else 0)
    handles, names = bars.get_legend_handles_labels()
    legend = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}
    tidy(axes, xlabel="operations of the rehearsed part of a step", ylabel="GiB", xlim=(0, 1), legend=legend)
    legend = {"handles": handles[::-1], "labels": names[::-1], "loc": "center left", "bbox_to_anchor": (1, 0.5)}
    width = max(len(ranks), 3) - 0.4
    tidy(bars, xlabel=f"{_label(ranks)}: bytes at its peak", xlim=(-0.6, width), legend=legend)
    axes.set_ylim(0, 1.08 * max([*below, limit or 0]))
