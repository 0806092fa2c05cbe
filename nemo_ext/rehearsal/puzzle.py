"""Rehearsal of Puzzle: memory, FLOPs and communication of its stages and training runs at full size, without GPUs.

Does not import torch.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.description import Description, from_config, to_config
from nemo_ext.checkpoint.start import model_of, with_model_beside
from nemo_ext.job.progress import progress_of
from nemo_ext.job.run_directory import write_config
from nemo_ext.job.settings import prefixed_errors
from nemo_ext.megatron.arguments import world_size
from nemo_ext.puzzle.configs import healing_run, parent_run, stage_config
from nemo_ext.puzzle.job import check
from nemo_ext.puzzle.plan import stage_work
from nemo_ext.puzzle.settings import Settings
from nemo_ext.puzzle.variants import KEEP, variants
from nemo_ext.rehearsal.ranks import rehearse, run
from nemo_ext.rehearsal.settings import STAGES, rehearsed


def rehearse_puzzle(
    config: Mapping[str, Any], folder: Path, stages: str | Sequence[int] = "kinds", *, imbalance: float = 1.0
) -> dict[str, Any]:
    """Rehearse the selected stages of a compression, in order.

    Healing is rehearsed with a child as large as the parent, as the search has not chosen one yet.

    Args:
        config: composed config of `nemo-ext puzzle`.
        folder: folder for logs and records.
        stages: pipeline ranks of the training runs to rehearse, as in `ranks.rehearse`.
        imbalance: imbalance of experts in the training runs, as in `ranks.rehearse`.

    Returns:
        A result like that of `ranks.rehearse`, except that there is no `checkpoint`, that each rank has the name of
        its stage as `name`, and that `work` lists the total work of each stage (`plan.stage_work`). Stages that run
        no model have no rank.

    Raises:
        ValueError: a setting is invalid, or a model or layout cannot be built.
    """
    chosen = check(config)
    if chosen.parent is not None:
        config = {**config, **with_model_beside(config, model_of(chosen.parent, "puzzle.parent"))}
    parent = from_config(config)
    if chosen.mtp == "drop":
        parent = parent.without_prediction()
    folder.mkdir(parents=True, exist_ok=True)
    built = [
        each for block in variants(parent.architecture, chosen.variants) for each in block if each.block is not None
    ]
    distils = chosen.distill.steps and any(variant.name != KEEP for variant in built)
    wanted = [name for name in STAGES if chosen.runs(name) and (name != "distill" or distils)]
    trained = _training(config, chosen, parent, folder)
    ranks = world_size(config)
    aside = ["the teacher's saved tokens, in heal"] if "heal" in trained and chosen.heal.teacher == "cached" else []

    def rehearse_stage(name: str) -> list[dict[str, Any]]:
        if name in trained:
            with prefixed_errors(f"puzzle stage {name}"):
                result = rehearse(trained[name], stages, folder / name, imbalance=imbalance)
            aside.extend(result["set_aside"])
            several = result["pipeline"] > 1
            return [{**rank, "name": f"{name} {rank['stage']}" if several else name} for rank in result["ranks"]]
        changed, without = rehearsed(stage_config(config, parent, ranks))
        aside.extend(without)
        request = {"config": changed, "puzzle": config["puzzle"], "stage": name, "ranks": ranks}
        return [{**run("nemo_ext.rehearsal.puzzle_rank", request, folder, name), "name": name, "stage": 0}]

    work = stage_work(
        parent.architecture,
        variants(parent.architecture, chosen.variants),
        chosen,
        seq_length=int(config["megatron"]["seq_length"]),
        ranks=ranks,
        precision="bf16" if config["megatron"].get("bf16") else "fp32",
    )
    names = [name for name in ("parent", *STAGES, "heal") if name in (*trained, *wanted)]
    records: list[dict[str, Any]] = []
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        progress_of("rehearsed", len(names), unit="stages") as advance,
    ):
        for stage_records in pool.map(rehearse_stage, names):
            records += stage_records
            advance(1)
    return {
        "world": ranks,
        "nodes": int(config["launcher"]["nodes"]),
        "set_aside": sorted(set(aside)),
        "imbalance": imbalance,
        "pipeline": 1,
        "ranks": records,
        "work": [asdict(each) for each in work if each.stage in wanted],
    }


def _training(config: Mapping[str, Any], chosen: Settings, parent: Description, folder: Path) -> dict[str, Any]:
    """Return the configs of a compression's training runs, keyed by stage (`parent` and `heal`).

    Args:
        config: composed config of `nemo-ext puzzle`.
        chosen: settings of the compression; stages that they skip are left out.
        parent: description of the parent.
        folder: folder for the runs, and for the parent's config if the parent is the teacher in healing.
    """
    runs = {}
    if chosen.parent is None and chosen.runs("parent"):
        runs["parent"] = parent_run(config, folder / "parent")
    heal = chosen.heal
    if heal.tokens and chosen.runs("heal"):
        distillation = None
        if heal.teacher == "online":
            write_config(folder, to_config(parent))
            terms = {name: asdict(heal)[name] for name in ("kl_weight", "lm_weight", "temperature", "top_k")}
            distillation = {"teacher": str(folder), **terms}
        runs["heal"] = healing_run(
            config, parent, heal, run_dir=folder / "heal", start=folder, tokens=heal.tokens, distillation=distillation
        )
    return runs
