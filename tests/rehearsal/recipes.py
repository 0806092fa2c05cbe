"""Rehearse every recipe, and write the tables of docs/rehearsal.md and docs/clusters.md.

    python tests/rehearsal/recipes.py                      # all recipes, one after the other, then the tables
    python tests/rehearsal/recipes.py olmo3/7b_pretrain    # only this one
    python tests/rehearsal/recipes.py --missing            # recipes without figures
    python tests/rehearsal/recipes.py --tables             # only the tables

The figures are in recipes.json next to this file, written after every recipe. Recipes that differ only in settings
without effect on shapes (learning rates, lengths, checkpoints) are rehearsed once.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import hydra_conf
from nemo_ext.architecture.cost import TRAINING_FLOPS_FACTOR, per_gpu
from nemo_ext.architecture.layout import Layout
from nemo_ext.architecture.model import Architecture
from nemo_ext.job.config import compose
from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table
from nemo_ext.megatron.arguments import pattern_with_cuts, world_size
from nemo_ext.rehearsal.ranks import rehearse
from nemo_ext.rehearsal.settings import one_phase, rehearsed
from nemo_ext.slurm.rehearse import key_of

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_suffix(".json")
CONFIGS = Path(hydra_conf.__file__).parent / "recipe"
RECIPES = sorted(
    str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "puzzle"
)
BEGIN, END = "<!-- made by tests/rehearsal/recipes.py -->\n", "<!-- end -->\n"
GIB = 2**30


def memory(recipe: str) -> int:
    """GPU memory in GiB that a recipe is written for: Leonardo's A100, otherwise an H100."""
    return 64 if recipe.startswith("domyn_small/") or recipe.endswith("_leonardo") else 80


def teacher_words(recipe: str, folder: Path) -> list[str]:
    """Copy the model file of a recipe's teacher, all that a rehearsal reads; returns arguments that use it."""
    teacher = (compose("train", [f"recipe={recipe}"]).get("distillation") or {}).get("teacher")
    if teacher is None:
        return []
    model = f"{Path(teacher).name}.yaml"
    (folder / "model").mkdir()
    shutil.copyfile(CONFIGS.parent / "model" / model, folder / "model" / model)
    return [f"distillation.teacher={folder}"]


def figures(recipe: str) -> dict[str, Any]:
    """Rehearse a recipe; returns the figures for recipes.json."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as teacher:
        words = [f"recipe={recipe}", *teacher_words(recipe, Path(teacher))]
        result = rehearse(compose("rehearse", words), "kinds", Path(folder))
    seconds = sum(rank["processor_seconds"] for rank in result["ranks"])
    kept = ("stage", "peak_bytes", "peak_phase", "peak", "flops", "memory_bytes")
    ranks = [{key: rank[key] for key in kept} for rank in result["ranks"]]
    return {"world": result["world"], "processor_seconds": round(seconds), "ranks": ranks}


def estimates(recipe: str) -> tuple[list[int], list[float]]:
    """Bytes and FLOPs per step by the cost model, for each pipeline rank."""
    config, _ = rehearsed(compose("rehearse", [f"recipe={recipe}"]))
    world = world_size(config)
    config = {**config, "model": {**config["model"], "pattern": pattern_with_cuts(config)}}
    layout, flags = Layout.from_config(config, world_size=world), config["megatron"]
    length = int(flags["seq_length"])
    architecture = Architecture.from_config(config)
    gpus = per_gpu(architecture, layout, seq_length=length)
    tokens = length * int(flags["global_batch_size"]) // layout.data_parallel
    flops = [TRAINING_FLOPS_FACTOR * gpu.forward_flops_per_token * tokens for gpu in gpus]
    teacher = teacher_bytes(config, layout)
    return [gpu.total_bytes + teacher for gpu in gpus], flops


def teacher_bytes(config: Mapping[str, Any], layout: Layout) -> int:
    """Bytes of a teacher's weights on one GPU; 0 without a teacher."""
    teacher = (config.get("distillation") or {}).get("teacher")
    if teacher is None:
        return 0
    architecture = Architecture.from_config(compose("describe", [f"model={Path(teacher).name}"]))
    return per_gpu(architecture, layout, seq_length=1)[0].weight_bytes


def table(figures_by_recipe: Mapping[str, Any]) -> str:
    """Table of all ranks, compared with the cost model; seconds are the total over a recipe's ranks."""
    heading = [
        "recipe",
        "GPUs",
        "rank",
        "peak, GiB",
        "cost model",
        "FLOPs per step",
        "cost model",
        "memory here",
        "seconds",
    ]
    rows = []
    for recipe in (name for name in RECIPES if name in figures_by_recipe):
        sizes, flops = estimates(recipe)
        for rank in figures_by_recipe[recipe]["ranks"]:
            stage, peak, done = rank["stage"], rank["peak_bytes"], sum(rank["flops"].values())
            over = " of 64: too much" if peak > memory(recipe) * GIB else ""
            rows.append(
                [
                    *(recipe, f"{figures_by_recipe[recipe]['world']:,}", str(stage), f"{peak / GIB:.1f}{over}"),
                    f"{sizes[stage] / GIB:.1f} ({100 * (sizes[stage] / peak - 1):+.0f} %)",
                    f"{done:.2e}".replace("e+", "e"),
                    f"{flops[stage]:.2e} ({100 * (flops[stage] / done - 1):+.0f} %)".replace("e+", "e"),
                    f"{rank['memory_bytes'] / GIB:.1f} GiB",
                    f"{figures_by_recipe[recipe]['processor_seconds']}"
                    if rank is figures_by_recipe[recipe]["ranks"][0]
                    else "",
                ]
            )
    return markdown_table(heading, rows)


def write_tables(figures_by_recipe: Mapping[str, Any]) -> None:
    """Update the table in docs/rehearsal.md, and the memory in that of docs/clusters.md."""
    page = ROOT / "docs" / "rehearsal.md"
    before, rest = page.read_text().split(BEGIN)
    write_text(page, f"{before}{BEGIN}\n{table(figures_by_recipe)}\n\n{END}{rest.split(END, 1)[1]}")
    page = ROOT / "docs" / "clusters.md"
    lines = page.read_text().splitlines()
    for place, line in enumerate(lines):
        recipe = line.split("|")[1].strip() if line.count("|") == 4 else ""
        if recipe in RECIPES:
            known = recipe in figures_by_recipe
            peak = max(
                [rank["peak_bytes"] for rank in figures_by_recipe[recipe]["ranks"]] if known else estimates(recipe)[0]
            )
            lines[place] = re.sub(r"\d+ GiB", f"{peak / GIB:.0f} GiB", line)
    write_text(page, "\n".join(lines) + "\n")


def main(words: Iterable[str]) -> int:
    arguments = list(words)
    all_figures: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    recipes = [name for name in arguments if not name.startswith("--")]
    if "--missing" in arguments:
        recipes = [name for name in RECIPES if name not in all_figures]
    elif not arguments:
        recipes = RECIPES
    if unknown := [name for name in recipes if name not in RECIPES]:
        raise SystemExit(f"unknown recipe {unknown[0]}; known: {', '.join(RECIPES)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    known: dict[str, Any] = {}
    failed = 0
    for recipe in recipes:
        key = key_of(one_phase(compose("rehearse", [f"recipe={recipe}"])))
        try:
            known[key] = all_figures[recipe] = known.get(key) or figures(recipe)
        except ValueError as error:
            failed += 1
            print(f"{recipe}: {error}", flush=True)
            continue
        FIGURES.write_text(json.dumps({name: all_figures[name] for name in sorted(all_figures)}, indent=1) + "\n")
        peaks = [f"{rank['peak_bytes'] / GIB:.1f} GiB" for rank in all_figures[recipe]["ranks"]]
        print(recipe, *peaks, flush=True)
    write_tables(all_figures)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
