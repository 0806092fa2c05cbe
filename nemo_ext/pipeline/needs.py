"""What a pipeline's stages will take of a cluster: nodes, hours and storage, before they are queued. No torch."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from nemo_ext.architecture.cost import peak_of, total_params, train_flops_per_token
from nemo_ext.architecture.model import Architecture
from nemo_ext.slurm.jobs import nodes_and_gpus
from nemo_ext.slurm.submit import Submission

MFU = 0.35
"""Share of a GPU's peak that is taken to be used: what Domyn-Small reports (section 3.2)."""
CHECKPOINT_BYTES = 14
"""Bytes of a parameter in a checkpoint: bf16 weights, fp32 weights and Adam's two states."""
LEGEND = (
    f"Hours of training at {MFU:.0%} of the GPUs' peak by exact FLOPs, without a teacher's; those of other jobs depend "
    "on answers and data. TB of training's checkpoints alone: 14 bytes a parameter, all of them kept."
)


def needs_of(submissions: Mapping[str, Submission]) -> Table:
    """A table of stages with nodes, GPUs, hours, GPU-hours, checkpoints and their TB, with their sums."""
    table = Table("stage", "job", box=None, pad_edge=False, header_style="bold", caption=LEGEND, caption_justify="left")
    for name in ("nodes", "GPUs", "hours", "GPU-hours", "checkpoints", "TB"):
        table.add_column(name, justify="right")
    hours, stored = 0.0, 0.0
    for name, submission in submissions.items():
        job = submission.settings.job
        nodes, each = nodes_and_gpus(job, submission.config, submission.settings)
        node = submission.settings.cluster.node
        gpus = nodes * each * len(submission.records)
        cells = ["", "", "", ""]
        if job == "train" and submission.config["megatron"].get("train_iters"):  # else it counts samples
            spent = _gpu_hours(submission.config, None if node is None else node.gpu)
            count, size = _checkpoints(submission.config)
            cells = ["-", "-", f"{count:,}", f"{size / 1e12:,.1f}"]
            stored += size
            if spent is not None:
                cells[:2] = [f"{spent / gpus:,.1f}", f"{spent:,.0f}"]
                hours += spent
        table.add_row(name, job, str(nodes * len(submission.records)), str(gpus or "-"), *cells)
    table.add_row("together", "", "", "", "", f"{hours:,.0f}", "", f"{stored / 1e12:,.1f}", style="bold")
    return table


def _gpu_hours(config: Mapping[str, Any], gpu: str | None) -> float | None:
    """Hours of one GPU for all tokens of a training; None if the GPU's peak is unknown."""
    peak = peak_of(gpu or "")
    if peak is None:
        return None
    flags, architecture = config["megatron"], Architecture.from_config(config)
    length = int(flags["seq_length"])
    tokens = float(flags["train_iters"]) * int(flags["global_batch_size"]) * length
    flops = train_flops_per_token(architecture, seq_length=length, frozen=bool(flags.get("freeze_all_layers")))
    return tokens * flops / (peak * MFU) / 3600


def _checkpoints(config: Mapping[str, Any]) -> tuple[int, float]:
    """Number of a training's checkpoints, and the bytes of all."""
    flags = config["megatron"]
    steps, interval = int(flags["train_iters"]), flags.get("save_interval")
    count = -(-steps // int(interval)) if interval else 1
    return count, float(count) * CHECKPOINT_BYTES * total_params(Architecture.from_config(config))
