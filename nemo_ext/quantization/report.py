"""Report of a quantisation: bytes by precision against the plan, losses before and after, and the serve command."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.job.report import Report
from nemo_ext.quantization.calibration import CalibrationData, CalibrationSettings
from nemo_ext.quantization.comparison import Comparison
from nemo_ext.quantization.generation import serve_words

JSON, MARKDOWN = "quantization.json", "quantization.md"
SERVE = "serve it with"
_ROWS = {
    **{"nvfp4": "NVFP4", "fp8": "FP8", "bf16": "BF16", "fp32": "FP32", "scales": "scales"},
    **{"mtp": "multi-token prediction", "others": "norms, biases, other vectors"},
}


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """Results of a quantisation.

    Attributes:
        source: the checkpoint that was quantised.
        to: output directory.
        architecture: Hugging Face model class.
        plan: precision plan of the weights.
        predicted: bytes of the matrices as predicted by the plan, keyed by precision.
        sizes: bytes on disk `before` and `after`, keyed by planned precision.
        data: calibration data.
        calibration: settings of the calibration data.
        comparison: comparison on held-out samples; None without held-out samples.
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


def write(folder: Path, report: Quantized) -> None:
    """Write `quantization.json` and `quantization.md`, which hold the results, to a folder."""
    (folder / JSON).write_text(json.dumps(_values(report), indent=2) + "\n")
    _page(report).write(folder / MARKDOWN)


def _values(report: Quantized) -> dict[str, Any]:
    rules = [rule.text for rule in report.plan.rules]
    return {
        "from": report.source,
        "architecture": report.architecture,
        "precision_plan": {**asdict(report.plan), "rules": rules},
        "bytes": {"predicted": dict(report.predicted), **{key: dict(value) for key, value in report.sizes.items()}},
        "calibration": {**asdict(report.calibration), "available": report.data.available, "tokens": report.data.tokens},
        "held_out": None if report.comparison is None else asdict(report.comparison),
        "serve": serve_words(report.to, report.plan),
        "remarks": list(report.remarks),
    }


def _page(report: Quantized) -> Report:
    before, after = report.sizes["before"], report.sizes["after"]
    plan, data = report.plan, report.data
    low = [name for name, used in (("NVFP4", plan.uses_nvfp4), ("FP8", plan.uses_fp8)) if used]
    rules = ", ".join(f"`{rule.text}`" for rule in plan.rules) or "none"
    page = Report(
        f"{report.to.name}: {report.architecture} in {' and '.join(low)}",
        f"From `{report.source}`; default {plan.default}, recipe {plan.recipe}, KV cache {plan.kv_cache}, "
        f"rules {rules}.\n"
        f"Scales from {len(data.samples):,} of {data.available:,} samples of `{report.calibration.data}`, "
        f"{data.tokens:,} tokens, seed {report.calibration.seed}.",
    )
    rows: list[tuple[object, ...]] = [
        (name, report.predicted.get(key), before.get(key, 0), after.get(key, 0))
        for key, name in _ROWS.items()
        if key in before or key in after
    ]
    whole, left = sum(before.values()), sum(after.values())
    rows.append(("all", None, whole, f"{left:,} ({left / whole:.1%})"))
    page.table("", ("bytes", "by the plan:", "before:", "after:"), rows)
    if (comparison := report.comparison) is not None:
        first, last = comparison.perplexities
        page.add(f"On {len(data.held_out):,} held-out samples ({comparison.tokens:,} predicted tokens):")
        figures = [
            ("loss", f"{comparison.loss_before:.4f}", f"{comparison.loss_after:.4f}"),
            ("perplexity", f"{first:.4g}", f"{last:.4g}"),
            ("KL from before", "", f"{comparison.divergence:.3g}"),
            ("same likeliest token", "", f"{comparison.agreement:.2%}"),
        ]
        page.table("", ("", "before:", "after:"), figures)
    page.code(" ".join(serve_words(report.to, plan)), "shell")
    return page.add("\n".join(f"- {remark}" for remark in report.remarks))
