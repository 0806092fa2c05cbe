"""Report of a sweep: the loss of each block in FP8 or NVFP4, the proposed plan, and a comparison of plans."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import yaml

from nemo_ext.architecture.blocks import NAMES
from nemo_ext.architecture.draw import COLOURS
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import HEAD, LOW, Plan, Rule, misfits
from nemo_ext.job.files import write_text
from nemo_ext.job.records import read_lines
from nemo_ext.job.report import Report, tidy
from nemo_ext.job.run_directory import REPORT
from nemo_ext.sensitivity.settings import Settings
from nemo_ext.sensitivity.units import Unit, average_bits, bf16_rules, in_precisions, named_rule, units, with_rules
from nemo_ext.sensitivity.workspace import EVERYTHING, LOWEST, NANO, REFERENCE, Sensitivity, Workspace, lost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "scores.png"
LABELS = {
    REFERENCE: "the unchanged model",
    EVERYTHING: "the given plan",
    LOWEST: LOWEST,
    "proposed": "proposed",
    NANO: "attention and the blocks before it in BF16",
    "proposed turned round": "the least sensitive units in BF16",
}
_KEPT, _HEAD = "#22262b", "#5b6470"


def write_report(workspace: Workspace, chosen: Settings, config: Mapping[str, Any], architecture: Architecture) -> Path:
    """Write report.md, its picture and the proposed plan, and return the report's path."""
    plan = Plan.from_config(config["precision_plan"])
    every = units(plan, architecture, chosen.per)
    scores = {line.name: line for line in read_lines(workspace.scores, Sensitivity, what="a score")}
    result = json.loads(workspace.result.read_text())
    if chosen.bits is not None:
        return _write_within_bits(workspace, chosen, config, architecture, scores, result)
    low = set(result["tried"][-1]["fp8"])
    in_bf16 = [unit for unit in every if unit.selector not in low]
    named = named_rule(in_bf16, plan, architecture) if in_bf16 else None
    rules = [Rule.parse(f"{selector} bf16") for selector in named] if named else bf16_rules(in_bf16)
    proposed = [rule.text for rule in with_rules(plan, rules).rules]
    _write_proposal(workspace.proposal, {**config["precision_plan"], "rules": proposed}, chosen)
    losses = {name: lost(score, scores[REFERENCE], chosen.metric) for name, score in scores.items()}
    groups: dict[str, list[float]] = {}
    for unit in every:
        groups.setdefault(unit.group, []).append(losses[unit.selector])
    metric, where = "KL" if chosen.metric == "kl" else "loss", "BF16" if config["megatron"].get("bf16") else "FP32"
    report = Report(f"FP8 sensitivity of {chosen.model}", _summary(result, in_bf16, every, named, chosen))
    report.add(f"`nemo-ext train --config-dir {workspace.run_dir} precision=proposed ...` trains with it.")
    report.code(workspace.proposal.read_text(), "yaml")
    size = (min(24.0, max(9.0, 4.5 + 0.22 * len(every))), 4.2)
    layout: Any = {"columns": 2, "width_ratios": [max(2.0, len(every) / 14), 1.6]}
    left, right = report.picture(f"{metric} of each {chosen.per} in FP8", PICTURE, *size, **layout)
    _draw_units(left, every, in_bf16, [losses[unit.selector] for unit in every])
    tidy(left, grid="y", xlabel=f"{chosen.per} in FP8 alone, from 0", ylabel=f"{metric}, nats per token", legend=True)
    _draw_plans(right, result["plans"], chosen)
    about = f"On validation data; weights not in FP8 were measured in {where}."
    report.section("Comparison of plans", about)
    _plans(report, result["plans"])
    about = (
        f"{metric} in nats per token on calibration data, of each {chosen.per} alone and of all of a group together."
    )
    report.section("By group", about)
    _groups(report, groups, losses, every)
    report.add(_finding(groups, chosen))
    ranked = sorted(every, key=lambda unit: -losses[unit.selector])[:12]
    rows = [_row(unit, scores, "BF16" if unit in in_bf16 else "FP8") for unit in ranked]
    report.table("The most sensitive", (chosen.per, "kind", "KL", "loss", "bytes in BF16", "proposed"), rows)
    return report.write(workspace.run_dir / REPORT)


def _write_within_bits(
    workspace: Workspace,
    chosen: Settings,
    config: Mapping[str, Any],
    architecture: Architecture,
    scores: Mapping[str, Sensitivity],
    result: Mapping[str, Any],
) -> Path:
    """Write the report and the proposed plan for a budget of bits, and return the report's path.

    Args:
        workspace, chosen, config, architecture: as for `write_report`.
        scores: scores of single units, keyed by name.
        result: content of the workspace's `result`.
    """
    plan = Plan.from_config(config["precision_plan"])
    every, (tried,) = units(plan, architecture, chosen.per), result["tried"]
    choice = {unit: tried["precisions"][unit.selector] for unit in every}
    proposed = in_precisions(plan, choice, architecture)
    rules = [rule.text for rule in proposed.rules]
    _write_proposal(workspace.proposal, {**config["precision_plan"], "rules": rules}, chosen)
    total = sum(unit.parameters for unit in every)
    used = average_bits(proposed, every, architecture)
    counts = ", ".join(
        f"{sum(unit.parameters for unit in every if choice[unit] == low) / total:.1%} of the weights in {low.upper()}"
        for low in ("nvfp4", "fp8", "bf16")
    )
    report = Report(
        f"Precisions of {chosen.model} within {chosen.bits:g} bits",
        f"{used:.4g} bits per weight, including scales: {counts}; {tried['measured']:.3g} nats per token "
        f"({chosen.metric}) measured on the calibration set, {tried['added']:.3g} as the sum of the single losses. "
        "The average is over the weights that the given plan quantises.",
    )
    words = f"--config-dir {workspace.run_dir} precision=proposed ..."
    if unsupported := misfits(proposed, architecture):
        report.add(f"`nemo-ext quantize {words}` uses it; training requires other sizes ({unsupported[0]}).")
    else:
        report.add(f"`nemo-ext train {words}` and `quantize` use it.")
    report.code(workspace.proposal.read_text(), "yaml")
    rows: list[tuple[object, ...]] = []
    for row in result["plans"]:
        stored = sum(size for low, size in row["bytes"].items() if low in LOW)
        loss = f"{row['loss'] - result['plans'][0]['loss']:+.4f}"
        name = LABELS.get(row["name"], row["name"])
        rows.append((name, f"{row['kl']:.3g}", loss, f"{row['bits']:.4g}", stored, sum(row["bytes"].values())))
    columns = ("plan", "KL, nats per token", "loss", "bits per weight", "bytes in NVFP4 and FP8", "of all matrices")
    report.section("Comparison of plans", "On validation data; random plans use up the same bits.")
    report.table("", columns, rows)
    alone = [(unit, [scores.get(f"{unit.selector} {low}") for low in ("nvfp4", "fp8")]) for unit in every]
    losses = {
        unit: max((lost(s, scores[REFERENCE], chosen.metric) for s in single if s is not None), default=0.0)
        for unit, single in alone
    }
    alone.sort(key=lambda entry: -losses[entry[0]])
    ranked = [
        (
            *(unit.selector, _group_name(unit.group)),
            *("" if s is None else f"{lost(s, scores[REFERENCE], chosen.metric):.2e}" for s in single),
            *(unit.parameters, choice[unit].upper()),
        )
        for unit, single in alone
    ]
    report.section("Every unit", f"Loss ({chosen.metric}) of each {chosen.per} alone, in nats per token.")
    report.table("", (chosen.per, "kind", "NVFP4", "FP8", "parameters", "proposed"), ranked)
    return report.write(workspace.run_dir / REPORT)


def _write_proposal(file: Path, section: Mapping[str, Any], chosen: Settings) -> None:
    text = yaml.safe_dump({"megatron": {"bf16": True}, "precision_plan": dict(section)}, sort_keys=False, width=120)
    write_text(file, f"# @package _global_\n# Proposed by nemo-ext sensitivity from {chosen.model}.\n{text}")


def _summary(
    result: Mapping[str, Any],
    kept: Sequence[Unit],
    every: Sequence[Unit],
    named: Sequence[str] | None,
    chosen: Settings,
) -> str:
    best = result["tried"][-1]
    what = "everything can be in FP8"
    if kept:
        names = f" (`{'`, `'.join(named)}`)" if named else ""
        what = f"{len(kept)} of {len(every)} {chosen.per}s stay in BF16{names}"
    return (
        f"Within a budget of {result['budget']:.3g} nats per token ({chosen.metric}), {what}: "
        f"{best['measured']:.3g} nats measured on the calibration set, {best['added']:.3g} as the sum of the single "
        f"losses; {len(result['tried'])} plans were measured."
    )


def _plans(report: Report, plans: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            LABELS[plan["name"]],
            f"{plan['kl']:.3g}",
            f"{plan['loss'] - plans[0]['loss']:+.4f}",
            plan["bytes"]["bf16"],
            sum(plan["bytes"].values()),
        )
        for plan in plans
    ]
    report.table("", ("plan", "KL, nats per token", "loss", "bytes in BF16", "bytes of all matrices"), rows)


def _group_name(group: str) -> str:
    if group == HEAD:
        return "output layer"
    kind, _, feeds = group.partition(">")
    return f"{NAMES[kind]}{' before attention' if feeds else ''} (`{group}`)"


def _groups(
    report: Report, groups: Mapping[str, Sequence[float]], losses: Mapping[str, float], every: Sequence[Unit]
) -> None:
    rows = []
    for group, alone in groups.items():
        together = losses[f"all {group}"]
        per_megabyte = together / sum(unit.bytes for unit in every if unit.group == group) * 1e6
        figures = (median(alone), max(alone), together, per_megabyte)
        rows.append((_group_name(group), len(alone), *(f"{figure:.2e}" for figure in figures)))
    report.table("", ("group", "number", "median", "largest", "together", "together, per MB of BF16"), rows)


def _finding(groups: Mapping[str, Sequence[float]], chosen: Settings) -> str:
    """Compare this model's losses, in words, with Nemotron 3 Nano's choice of BF16 blocks; empty without such blocks.

    `groups` maps each group of units (see `Unit.group`) to the losses of its units, each alone in FP8.
    """
    if not {"*", "M>*", "M"} <= set(groups):
        return ""
    others = [loss for group, losses in groups.items() if group not in ("*", "M>*") for loss in losses]
    attention, feeding = median(groups["*"]), median(groups["M>*"])

    def ratio(value: float, other: float) -> str:
        return f"{value / other:.1f} times" if other > 0 else "more than the zero of"

    return (
        "Nemotron 3 Nano keeps attention and the Mamba blocks before it in BF16. Here the median "
        f"loss of an attention {chosen.per} is {ratio(attention, median(others))} the median of all others, that of a "
        f"Mamba {chosen.per} before attention {ratio(feeding, median(groups['M']))} the median of other Mamba "
        f"{chosen.per}s."
    )


def _row(unit: Unit, scores: Mapping[str, Sensitivity], proposed: str) -> tuple[object, ...]:
    score, loss = scores[unit.selector], scores[unit.selector].loss - scores[REFERENCE].loss
    return unit.selector, _group_name(unit.group), f"{score.kl:.2e}", f"{loss:+.2e}", unit.bytes, proposed


def _draw_units(axes: "Axes", every: Sequence[Unit], kept: Sequence[Unit], losses: Sequence[float]) -> None:
    seen: set[str] = set()
    for number, (unit, loss) in enumerate(zip(every, losses, strict=True)):
        kind = unit.group[0] if unit.group != HEAD else HEAD
        label = None if kind in seen else ("output layer" if kind == HEAD else NAMES[kind])
        seen.add(kind)
        edge = _KEPT if unit in kept else "none"
        axes.bar(number, loss, color=COLOURS.get(kind, _HEAD), edgecolor=edge, linewidth=1.6, label=label)
    if kept:
        axes.bar(0, 0, color="none", edgecolor=_KEPT, linewidth=1.6, label="proposed: BF16")
    if min(losses) > 0 and max(losses) > 30 * min(losses):
        axes.set_yscale("log")
    axes.set_xticks(range(len(every)), [unit.selector for unit in every], fontsize=7, rotation=90)


def _draw_plans(axes: "Axes", rows: Sequence[Mapping[str, Any]], chosen: Settings) -> None:
    reference = rows[0]["loss"]
    whole = rows[0]["bytes"]["bf16"]
    for row, marker in zip(rows, itertools.cycle("osD^v")):
        value = row["kl"] if chosen.metric == "kl" else row["loss"] - reference
        axes.plot(row["bytes"]["bf16"] / whole, value, marker, markersize=8, label=LABELS[row["name"]])
    tidy(axes, grid="y", xlabel="fraction of bytes in BF16, validation data", legend={"fontsize": 7})
