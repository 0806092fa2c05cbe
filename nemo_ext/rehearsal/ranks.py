"""Ranks of a training config, each rehearsed by a process of its own. No torch."""

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
from nemo_ext.rehearsal.saved import summed, whole
from nemo_ext.rehearsal.settings import rehearsed
from nemo_ext.rehearsal.teacher import with_teacher


def rehearse(
    config: Mapping[str, Any], asked: str | Sequence[int], folder: Path, *, imbalance: float = 1.0
) -> dict[str, Any]:
    """Records of a config's ranks, one for each pipeline rank asked for, each from a process of its own.

    Returns:
        world (number of ranks), set_aside (settings that are not rehearsed), imbalance (of experts), pipeline (number
        of its ranks), checkpoint (`saved.whole`); `ranks`: of each, the record of `rank.rehearse` with `stage` (its
        pipeline rank) and `estimate` (the cost model's).

    Raises:
        ValueError: a layout that the model does not fit, or Megatron's own reason.
    """
    from nemo_ext.megatron.check import check_layout

    changed, aside = rehearsed(config)
    check_layout(changed)
    if (config.get("distillation") or {}).get("teacher") is not None:
        changed["teacher"] = with_teacher(changed)
        if changed["transformer_engine"]["precision_plan"] is not None:  # it numbers the student's blocks
            changed["transformer_engine"] = {**changed["transformer_engine"], "precision_plan": None}
            aside.append("FP8, beside a teacher")
    world = world_size(changed)
    cut = {**changed, "model": {**changed["model"], "pattern": pattern_with_cuts(changed)}}
    layout, architecture = Layout.from_config(cut, world_size=world), Architecture.from_config(cut)
    length = int(changed["megatron"]["seq_length"])
    estimates = per_gpu(architecture, layout, seq_length=length)
    stages = _stages(asked, [each.total_bytes for each in estimates])
    folder.mkdir(parents=True, exist_ok=True)

    def one(stage: int) -> dict[str, Any]:
        asked = {
            "config": changed,
            "rank": stage * world // layout.pipeline_parallel,
            "world": world,
            "micro_batches": _micro_batches(layout, stage),
            "imbalance": imbalance,
        }
        record = run("nemo_ext.rehearsal.rank", asked, folder, f"stage_{stage}")
        guess = estimates[stage]
        tokens = length * layout.micro_batch_size * record["micro_batches"]
        record["stage"] = stage
        tensors = record["checkpoint"].pop("tensors")
        listed = folder / f"stage_{stage}.checkpoint.json"
        write_text(listed, json.dumps(tensors, indent=1) + "\n")
        record["checkpoint"] |= {**summed(tensors), "names": [line["name"] for line in tensors], "list": str(listed)}
        record["estimate"] = {
            "parameters": guess.parameters,
            "bytes": guess.total_bytes,
            "weights": guess.weight_bytes,
            "gradients": guess.gradient_bytes,
            "optimizer": guess.optimizer_bytes,
            "activations": guess.activation_bytes,
            "flops": round(TRAINING_FLOPS_FACTOR * guess.forward_flops_per_token * tokens),
        }
        return record

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool, progress_of("rehearsed", len(stages), unit="ranks") as advance:
        records = []
        for record in pool.map(one, stages):
            records.append(record)
            advance(1)
    share = sum(each.parameters for each in estimates) / sum(estimates[stage].parameters for stage in stages)
    return {
        "world": world,
        "set_aside": aside,
        "imbalance": imbalance,
        "pipeline": layout.pipeline_parallel,
        "checkpoint": whole([record["checkpoint"] for record in records], share),
        "ranks": records,
    }


def _micro_batches(layout: Layout, stage: int) -> int:
    """Enough for as many in flight as in a whole step, and one more; the interleaved schedule wants whole rounds."""
    if layout.virtual_stages > 1:
        return 2 * layout.pipeline_parallel
    return layout.pipeline_parallel - stage + 1


def run(module: str, asked: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    """Record of a rank, from a module's process that takes ASKED.json and writes RECORD.json; `name` is of its files.

    Raises:
        ValueError: the process failed; gives the last line that it said.
    """
    words, record, log = (folder / f"{name}.{ending}" for ending in ("asked.json", "json", "log"))
    write_text(words, json.dumps(asked))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as output:
        command = [sys.executable, "-W", "ignore", "-m", module, str(words), str(record)]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"code {code}"
        raise ValueError(f"{name.replace('_', ' ')} cannot be built or stepped: {why} ({log})")
    made: dict[str, Any] = json.loads(record.read_text())
    return made


def _stages(asked: str | Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Pipeline ranks to rehearse: the first, the last and the largest between, or as asked."""
    last = len(sizes) - 1
    if asked == "all":
        return list(range(last + 1))
    if asked == "kinds":
        middle = max(range(1, last), key=sizes.__getitem__, default=0)
        return sorted({0, middle, last})
    if not asked or max(map(int, asked)) > last:
        raise ValueError(f"rehearse.stages={list(asked)}: the layout has pipeline ranks 0 to {last}")
    return sorted(set(map(int, asked)))
