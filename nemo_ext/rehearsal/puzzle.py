"""Puzzle's stages rehearsed: those that run the parent, and its training runs. No torch."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.description import Description, from_config, to_config
from nemo_ext.job.progress import progress_of
from nemo_ext.job.run_directory import write_config
from nemo_ext.megatron.arguments import world_size
from nemo_ext.puzzle.configs import healing_run, parent_run, stage_config
from nemo_ext.puzzle.job import check
from nemo_ext.puzzle.plan import stage_work
from nemo_ext.puzzle.settings import Settings
from nemo_ext.puzzle.variants import KEEP, variants
from nemo_ext.rehearsal.ranks import rehearse, run
from nemo_ext.rehearsal.settings import STAGES, rehearsed
from nemo_ext.rehearsal.teacher import model_of


def rehearse_puzzle(
    config: Mapping[str, Any], folder: Path, asked: str | Sequence[int] = "kinds", *, imbalance: float = 1.0
) -> dict[str, Any]:
    """Records of the stages that a compression's config asks for, in order.

    Healing is rehearsed with a child as large as the parent, since the search has not chosen one yet.

    Args:
        config: composed config of `nemo-ext puzzle`.
        folder: folder for logs and records.
        asked: pipeline ranks of the training runs.
        imbalance: as for `rehearse`, of the training runs.

    Returns:
        What `ranks.rehearse` returns without `checkpoint`; ranks have `name`, the stage's. None for stages that are not
        rehearsed. `work` is what stages do in all (`plan.stage_work`).

    Raises:
        ValueError: a setting, or a model or layout that cannot be built; names the stage.
    """
    chosen = check(config)
    parent = _parent(config, chosen)
    folder.mkdir(parents=True, exist_ok=True)
    own = [each for block in variants(parent.architecture, chosen.variants) for each in block if each.block is not None]
    distils = chosen.distill.steps and any(each.name != KEEP for each in own)
    wanted = [name for name in STAGES if _wants(chosen, name) and (name != "distill" or distils)]
    trained = _training(config, chosen, parent, folder)
    ranks = world_size(config)
    aside = ["the teacher's saved tokens, in heal"] if "heal" in trained and chosen.heal.teacher == "cached" else []

    def one(name: str) -> list[dict[str, Any]]:
        if name in trained:
            try:
                made = rehearse(trained[name], asked, folder / name, imbalance=imbalance)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            aside.extend(made["set_aside"])
            several = made["pipeline"] > 1
            return [{**rank, "name": f"{name} {rank['stage']}" if several else name} for rank in made["ranks"]]
        own, without = rehearsed(stage_config(config, parent, ranks))
        aside.extend(without)
        words = {"config": own, "puzzle": config["puzzle"], "stage": name, "ranks": ranks}
        return [{**run("nemo_ext.rehearsal.puzzle_rank", words, folder, name), "name": name, "stage": 0}]

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
        for made in pool.map(one, names):
            records += made
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


def _wants(chosen: Settings, stage: str) -> bool:
    return chosen.stages is None or stage in chosen.stages


def _parent(config: Mapping[str, Any], chosen: Settings) -> Description:
    """The parent's model, with or without weights: that of the folder, or the one that the recipe trains."""
    return from_config(config if chosen.parent is None else model_of(chosen.parent, "puzzle.parent"))


def _training(config: Mapping[str, Any], chosen: Settings, parent: Description, folder: Path) -> dict[str, Any]:
    """Configs of the training runs, by stage."""
    made = {}
    if chosen.parent is None and _wants(chosen, "parent"):
        made["parent"] = parent_run(config, folder / "parent")
    heal = chosen.heal
    if heal.tokens and _wants(chosen, "heal"):
        distillation = None
        if heal.teacher == "online":
            write_config(folder, to_config(parent))
            terms = {name: asdict(heal)[name] for name in ("kl_weight", "lm_weight", "temperature", "top_k")}
            distillation = {"teacher": str(folder), **terms}
        made["heal"] = healing_run(
            config, parent, heal, run_dir=folder / "heal", start=folder, tokens=heal.tokens, distillation=distillation
        )
    return made
