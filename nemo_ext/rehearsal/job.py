"""`nemo-ext rehearse`: ranks of a full-size training job, stepped here before it queues."""

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
from nemo_ext.job.config import compose
from nemo_ext.job.files import write_text
from nemo_ext.job.progress import notice, progress_of
from nemo_ext.job.settings import checked
from nemo_ext.megatron.arguments import pattern_with_cuts, world_size
from nemo_ext.rehearsal.saved import summed, whole
from nemo_ext.rehearsal.search import gpu_of, search
from nemo_ext.rehearsal.settings import Settings, is_own, rehearsed
from nemo_ext.rehearsal.teacher import with_teacher


def job(config: dict[str, Any]) -> None:
    """Rehearses a training config and what `rehearse.try` changes in it; prints and writes the figures.

    Raises:
        ValueError: a setting, or a layout that the model does not fit; gives the reason.
    """
    from hydra.core.hydra_config import HydraConfig

    from nemo_ext.rehearsal.report import write

    settings = checked(Settings, config["rehearse"], "rehearse")
    if config["format"] not in ("table", "json"):
        raise ValueError(f"format={config['format']}: expected table or json")
    running = HydraConfig.get()
    own = [f"--config-dir={each.path}" for each in running.runtime.config_sources if each.schema == "file"]
    words = [*own, *running.overrides.task]
    folder = Path(config["run_dir"])
    name, limit = _gpu(settings, config)
    folder.mkdir(parents=True, exist_ok=True)

    def one(each: Mapping[str, Any], number: int) -> dict[str, Any]:
        return rehearse(each, settings.stages, folder / "ranks" / str(number), imbalance=settings.imbalance)

    def changed(change: list[str], number: int) -> dict[str, Any]:
        return one(compose("rehearse", [*words, *change]), number)

    searched, failed = None, dict[str, str]()
    if settings.search:
        searched, results = search(config, *gpu_of(name, limit), settings.best, changed)
        searched["command"] = [word.removeprefix("++") for word in words if not is_own(word)]
        limit = searched["fill"] * searched["gpu"]["memory_gib"]
    else:
        variants = [("", config)]
        variants += [(change, compose("rehearse", [*words, *change.split()])) for change in settings.variants]
        results = []
        for number, (change, each) in enumerate(variants):
            try:
                results.append({"change": change, "number": number, **one(each, number)})
            except ValueError as error:
                if not number:
                    raise
                failed[change] = str(error)
                notice(f"rehearse.try: {change}: {error}")
    write(
        folder,
        config["recipe"],
        results,
        limit=limit,
        searched=searched,
        failed=failed,
        as_json=config["format"] == "json",
    )


def _gpu(settings: Settings, config: Mapping[str, Any]) -> tuple[str | None, float | None]:
    """Name and memory in GiB of the GPUs, as far as the settings and the site say them.

    Raises:
        ValueError: there is no such GPU, or the site's nodes have fewer than the config starts ranks on.
    """
    site = config.get("cluster") or {}
    node, per_node = site.get("node") or {}, int(config["launcher"]["nproc_per_node"])
    if node and per_node > node["gpus"]:
        raise ValueError(
            f"launcher.nproc_per_node={per_node}: a node of {site['name']} has {node['gpus']} GPUs; set it and "
            "launcher.nodes"
        )
    memory = settings.gpu_memory_gib
    if settings.gpu is not None:
        memory = gpu_of(settings.gpu, memory)[1].memory_gib
    return settings.gpu or node.get("gpu"), memory


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
        record = _run(asked, folder, f"stage_{stage}")
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


def _run(asked: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    words, record, log = (folder / f"{name}.{ending}" for ending in ("asked.json", "json", "log"))
    write_text(words, json.dumps(asked))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as output:
        command = [sys.executable, "-W", "ignore", "-m", "nemo_ext.rehearsal.rank", str(words), str(record)]
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
