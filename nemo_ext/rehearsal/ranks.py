"""Rehearsal of a training config, with one process per rehearsed rank. Does not import torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_ext.architecture.cost import TRAINING_FLOPS_FACTOR, per_gpu
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import progress_of
from nemo_ext.megatron.arguments import pattern_with_cuts, world_size
from nemo_ext.rehearsal.saved import combine, sum_tensors
from nemo_ext.rehearsal.settings import rehearsed
from nemo_ext.rehearsal.teacher import with_teacher


def rehearse(
    config: Mapping[str, Any], stages: str | Sequence[int], folder: Path, *, imbalance: float = 1.0
) -> dict[str, Any]:
    """Rehearse the first rank of each requested pipeline rank, each in its own process.

    Args:
        config: composed training config.
        stages: pipeline ranks to rehearse: `kinds`, `all` or their numbers, as in `settings.Settings`.
        folder: folder for logs and records.
        imbalance: imbalance of experts, as in `settings.Settings`.

    Returns:
        A dict with world (number of ranks), set_aside (settings that are not rehearsed), imbalance, pipeline (number of
        pipeline ranks), checkpoint (from `saved.combine`), and ranks: records from `rank.rehearse` with `stage`
        (pipeline rank) and `estimate` (by the cost model).

    Raises:
        ValueError: the model does not fit the layout, or a rank cannot be built or stepped.
    """
    from nemo_ext.megatron.check import check_layout

    changed, aside = rehearsed(config)
    check_layout(changed)
    if (config.get("distillation") or {}).get("teacher") is not None:
        changed["teacher"] = with_teacher(changed)
        if changed["transformer_engine"]["precision_plan"] is not None:  # the plan numbers the student's blocks
            changed["transformer_engine"] = {**changed["transformer_engine"], "precision_plan": None}
            aside.append("FP8, with a teacher")
    world = world_size(changed)
    with_cuts = {**changed, "model": {**changed["model"], "pattern": pattern_with_cuts(changed)}}
    layout, architecture = Layout.from_config(with_cuts, world_size=world), Architecture.from_config(with_cuts)
    length = int(changed["megatron"]["seq_length"])
    estimates = per_gpu(architecture, layout, seq_length=length)
    chosen = _stages(stages, [estimate.total_bytes for estimate in estimates])
    folder.mkdir(parents=True, exist_ok=True)

    def rehearse_stage(stage: int) -> dict[str, Any]:
        request = {
            "config": changed,
            "rank": stage * world // layout.pipeline_parallel,
            "world": world,
            "micro_batches": _micro_batches(layout, stage),
            "imbalance": imbalance,
        }
        record = run("nemo_ext.rehearsal.rank", request, folder, f"stage_{stage}")
        estimate = estimates[stage]
        tokens = length * layout.micro_batch_size * record["micro_batches"]
        record["stage"] = stage
        tensors = record["checkpoint"].pop("tensors")
        listed = folder / f"stage_{stage}.checkpoint.json"
        write_text(listed, json.dumps(tensors, indent=1) + "\n")
        record["checkpoint"] |= {
            **sum_tensors(tensors),
            "names": [line["name"] for line in tensors],
            "list": str(listed),
        }
        record["estimate"] = {
            "parameters": estimate.parameters,
            "bytes": estimate.total_bytes,
            "weights": estimate.weight_bytes,
            "gradients": estimate.gradient_bytes,
            "optimizer": estimate.optimizer_bytes,
            "activations": estimate.activation_bytes,
            "flops": round(TRAINING_FLOPS_FACTOR * estimate.forward_flops_per_token * tokens),
        }
        return record

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool, progress_of("rehearsed", len(chosen), unit="ranks") as advance:
        records = []
        for record in pool.map(rehearse_stage, chosen):
            records.append(record)
            advance(1)
    share = sum(each.parameters for each in estimates) / sum(estimates[stage].parameters for stage in chosen)
    return {
        "world": world,
        "set_aside": aside,
        "imbalance": imbalance,
        "pipeline": layout.pipeline_parallel,
        "checkpoint": combine([record["checkpoint"] for record in records], share),
        "ranks": records,
    }


def _micro_batches(layout: Layout, stage: int) -> int:
    """Return how many micro-batches to run on a pipeline rank, `stage`, to reach the peak memory of a whole step.

    This is one more than the number in flight or, with virtual stages, two rounds of the interleaved schedule.
    """
    if layout.virtual_stages > 1:
        return 2 * layout.pipeline_parallel
    return layout.pipeline_parallel - stage + 1


def run(module: str, request: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Run a module as a process that reads a request and writes a record, and return the record.

    Args:
        module: name of the module.
        request: arguments for the function that the module runs.
        folder: folder for request, record and log.
        name: base name of these files.

    Raises:
        ValueError: the process failed; the message contains the last line of its log.
    """
    request_file, record, log = (folder / f"{name}.{ending}" for ending in ("asked.json", "json", "log"))
    write_text(request_file, json.dumps(request))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as output:
        command = [sys.executable, "-W", "ignore", "-m", module, str(request_file), str(record)]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"code {code}"
        raise ValueError(f"{name.replace('_', ' ')} cannot be built or stepped: {why}; see {log}")
    made: dict[str, Any] = json.loads(record.read_text())
    return made


def _stages(requested: str | Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Select the pipeline ranks to rehearse.

    Args:
        requested: `all`, `kinds` (first, last and largest in between), or the numbers of the ranks.
        sizes: estimated bytes on a GPU of each pipeline rank.

    Returns:
        Sorted numbers of pipeline ranks, from 0.

    Raises:
        ValueError: no number is given, or one is not a pipeline rank.
    """
    last = len(sizes) - 1
    if requested == "all":
        return list(range(last + 1))
    if requested == "kinds":
        middle = max(range(1, last), key=sizes.__getitem__, default=0)
        return sorted({0, middle, last})
    if not requested or max(map(int, requested)) > last:
        raise ValueError(f"rehearse.stages={list(requested)}: expected pipeline ranks of the layout, from 0 to {last}")
    return sorted(set(map(int, requested)))
