"""Estimates of the nodes, hours and storage that a pipeline's stages need, made before they are queued.

Does not import torch.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from nemo_ext.architecture.cost import peak_of, total_params, train_flops_per_token
from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint.beside import CONFIG, read_json
from nemo_ext.checkpoint.description import to_config
from nemo_ext.checkpoint.formats import read
from nemo_ext.data.blends.hierarchy import read_tree
from nemo_ext.data.training import data_sections
from nemo_ext.slurm.cluster import duration
from nemo_ext.slurm.jobs import CHECKPOINT_BYTES, checkpoints_of, makes, nodes_and_gpus
from nemo_ext.slurm.submit import Submission

MFU = 0.35
"""Assumed model FLOPs utilisation, as Domyn-Small reports it (section 3.2)."""
TOKEN_BYTES = 4
"""Bytes per token in tokenised data, for a vocabulary of more than 65,536 ids."""
MODEL_BYTES = 2
"""Bytes per parameter of a model in bf16."""
LEGEND = (
    f"Hours of training at {MFU:.0%} of the GPUs' peak by exact FLOPs, without a teacher's. *: per hour, as the "
    "time of "
    "other jobs depends on answers and data. Core-hours count the cores that a job reserves, as sites do; a node-hour "
    "counts all cores of a node. TB: for training, the checkpoints that retention keeps and the one being written, at "
    f"{CHECKPOINT_BYTES} bytes per parameter; for RL, a checkpoint and a model; for tokenising, at most {TOKEN_BYTES} "
    "bytes per token that training reads. -: unknown, or none."
)
_HOURLY = ("node-hours", "core-hours", "GPU-hours")


def needs_of(submissions: Mapping[str, Submission]) -> Table:
    """Tabulate the stages' nodes, GPUs, starts, hours, checkpoints and TB, with totals."""
    table = Table("stage", "job", box=None, pad_edge=False, header_style="bold", caption=LEGEND, caption_justify="left")
    for name in ("nodes", "GPUs", "starts", "hours", *_HOURLY, "checkpoints", "TB"):
        table.add_column(name, justify="right")
    totals, totals_per_hour, stored = Counter[str](), Counter[str](), 0.0
    for name, submission in submissions.items():
        job, settings = submission.settings.job, submission.settings
        node, tasks = settings.cluster.node, len(submission.records)
        nodes, gpus_per_node = nodes_and_gpus(job, submission.config, settings)
        gpus = nodes * gpus_per_node * tasks
        hours = _hours(submission, None if node is None else node.gpu, gpus)
        cores = submission.cores
        amounts: dict[str, float | None] = {
            "node-hours": nodes * tasks if node is None or cores is None else nodes * tasks * cores / node.cpus,
            "core-hours": None if cores is None else nodes * tasks * cores,
            "GPU-hours": gpus or None,
        }
        sums = totals_per_hour if hours is None else totals
        sums.update({key: amount * (hours or 1) for key, amount in amounts.items() if amount})
        size = _bytes(submission, submissions)
        stored += size or 0
        limit = settings.time or (settings.cluster.limit.time if settings.cluster.limit else None)
        starts = math.ceil(hours * 3600 / duration(limit).total_seconds()) if hours and limit else None
        star = "*" if hours is None else ""
        table.add_row(
            *(name, job, str(nodes * tasks), str(gpus or "-"), _shown(starts), _shown(hours, ".1f")),
            *(f"{_shown(amount and amount * (hours or 1))}{star if amount else ''}" for amount in amounts.values()),
            _shown(checkpoints_of(submission.config)[0] if _counts_steps(submission) else None),
            _shown(size and size / 1e12, ".1f"),
        )
    total_parts = [[(totals[key], ""), (totals_per_hour[key], "*")] for key in _HOURLY]
    total_cells = [
        " + ".join(f"{_shown(amount)}{star}" for amount, star in pair if amount) or "-" for pair in total_parts
    ]
    table.add_row("total", "", "", "", "", "", *total_cells, "", _shown(stored and stored / 1e12, ".1f"), style="bold")
    return table


def _shown(amount: float | None, digits: str = ".0f") -> str:
    """Format a number with one decimal if it is below one, otherwise with the format `digits`; "-" for 0 or None."""
    return f"{amount:,{'.1f' if amount < 1 else digits}}" if amount else "-"


def _counts_steps(submission: Submission) -> bool:
    """Return whether the job is a training run that sets its number of steps (`train_iters`)."""
    return submission.settings.job == "train" and bool(submission.config["megatron"].get("train_iters"))


def _tokens(config: Mapping[str, Any]) -> float:
    """Total number of tokens in a training run."""
    flags = config["megatron"]
    return float(flags["train_iters"]) * int(flags["global_batch_size"]) * int(flags["seq_length"])


def _hours(submission: Submission, gpu: str | None, gpus: int) -> float | None:
    """Estimate the hours of a training run; None for other jobs, or if the GPU's peak is unknown."""
    peak = peak_of(gpu or "")
    if peak is None or not _counts_steps(submission):
        return None
    flags, architecture = submission.config["megatron"], Architecture.from_config(submission.config)
    frozen = bool(flags.get("freeze_all_layers"))
    mtp_only = bool((submission.config.get("train") or {}).get("mtp_only"))
    flops = train_flops_per_token(architecture, seq_length=int(flags["seq_length"]), frozen=frozen, mtp_only=mtp_only)
    return _tokens(submission.config) * flops / (peak * MFU) / 3600 / gpus


def _bytes(submission: Submission, submissions: Mapping[str, Submission]) -> float | None:
    """Return an upper bound on the bytes of a job's output; None if unknown.

    `submissions` has every job of the pipeline: the training runs that read a tokenised file bound its size.
    """
    job, config = submission.settings.job, submission.config
    if _counts_steps(submission):
        count, size = checkpoints_of(config)
        return count * size
    if job == "rl":
        file = Path(str(config["policy"])).expanduser() / CONFIG
        model = submission.model_to_come or (read_json(file) if file.is_file() else None)
        try:
            parts = None if model is None else to_config(read(model)[1])
        except ValueError:  # an architecture that Megatron does not have
            return None
        each = CHECKPOINT_BYTES + MODEL_BYTES
        return None if parts is None else float(each * total_params(Architecture.from_config(parts)))
    if job != "tokenize":
        return None
    made = {place.resolve() for place in makes(job, config)}
    readers = [each for each in submissions.values() if _counts_steps(each) and _prefixes(each.config) & made]
    return sum(_tokens(each.config) for each in readers) * TOKEN_BYTES or None


def _prefixes(config: Mapping[str, Any]) -> set[Path]:
    """Prefixes of the tokenised files that a training run reads."""
    sections = [data for data in data_sections(config) if data.get("blend") or data.get("streams")]
    return {leaf.prefix.resolve() for data in sections for leaf in read_tree(data).leaves()}
