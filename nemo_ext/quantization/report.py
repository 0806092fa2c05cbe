"""Report of a quantisation: bytes by precision against the plan, losses before and after, and how to serve it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.quantization.calibration import CalibrationData, CalibrationSettings
from nemo_ext.quantization.comparison import Comparison
from nemo_ext.quantization.generation import serve_words

JSON, MARKDOWN = "quantization.json", "quantization.md"
SERVE = "serve it with"
_ROWS = {"fp8": "FP8", "bf16": "BF16", "fp32": "FP32", "scales": "scales", "others": "norms, biases, other vectors"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """All figures of a quantisation.

    Attributes:
        source: the checkpoint that was quantised.
        to: folder that was written.
        architecture: Hugging Face class.
        plan: precision plan of the weights.
        predicted: bytes of the matrices by precision, as the plan predicts.
        sizes: bytes on disk `before` and `after`, by planned precision.
        data: calibration data.
        calibration: settings of the calibration data.
        comparison: comparison on held-out samples; None without any.
        remarks: remarks for the user.
    """

    source: str
    to: Path
    architecture: str
    plan: Plan
    predicted: Mapping[str, int]
    sizes: Mapping[str, Mapping[str, int]]
    data: CalibrationData
    calibration: CalibrationSettings
    comparison: Comparison | None
    remarks: Sequence[str]


def write(folder: Path, report: Report) -> None:
    """Write `quantization.json` and `quantization.md`."""
    (folder / JSON).write_text(json.dumps(_values(report), indent=2) + "\n")
    (folder / MARKDOWN).write_text(_page(report))


def _values(report: Report) -> dict[str, Any]:
    rules = [rule.text for rule in report.plan.rules]
    return {
        "from": report.source,
        "architecture": report.architecture,
        "precision_plan": {**asdict(report.plan), "rules": rules},
        "bytes": {"predicted": dict(report.predicted), **{key: dict(value) for key, value in report.sizes.items()}},
        "calibration": {
            **asdict(report.calibration),
            "available": report.data.available,
            "tokens": report.data.tokens,
        },
        "held_out": None if report.comparison is None else asdict(report.comparison),
        "serve": serve_words(report.to, report.plan),
        "remarks": list(report.remarks),
    }


def _page(report: Report) -> str:
    before, after = report.sizes["before"], report.sizes["after"]
    plan, data = report.plan, report.data
    rules = ", ".join(f"`{rule.text}`" for rule in plan.rules) or "none"
    lines = [
        f"# {report.to.name}: {report.architecture} in FP8",
        "",
        f"From `{report.source}`; default {plan.default}, recipe {plan.recipe}, KV cache {plan.kv_cache}, "
        f"rules {rules}.",
        f"Scales from {len(data.samples):,} of {data.available:,} samples of `{report.calibration.data}`, "
        f"{data.tokens:,} tokens, seed {report.calibration.seed}.",
        "",
        "| bytes | by the plan | before | after |",
        "|:--|--:|--:|--:|",
    ]
    for key, name in _ROWS.items():
        if any(key in column for column in (before, after)):
            planned = f"{report.predicted[key]:,}" if key in report.predicted else ""
            lines.append(f"| {name} | {planned} | {before.get(key, 0):,} | {after.get(key, 0):,} |")
    whole, left = sum(before.values()), sum(after.values())
    lines += [f"| all | | {whole:,} | {left:,} ({left / whole:.1%}) |", ""]
    if (found := report.comparison) is not None:
        first, last = found.perplexities
        lines += [
            f"On {len(data.held_out):,} held-out samples ({found.tokens:,} predicted tokens):",
            "",
            "| | before | after |",
            "|:--|--:|--:|",
            f"| loss | {found.loss_before:.4f} | {found.loss_after:.4f} |",
            f"| perplexity | {first:.4g} | {last:.4g} |",
            f"| KL from before | | {found.divergence:.3g} |",
            f"| same likeliest token | | {found.agreement:.2%} |",
            "",
        ]
    lines += ["```shell", " ".join(serve_words(report.to, plan)), "```"]
    lines += ["", *(f"- {remark}" for remark in report.remarks)] if report.remarks else []
    return "\n".join(lines) + "\n"
