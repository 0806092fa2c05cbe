"""Every recipe rehearsed: the tables of docs/rehearsal.md and docs/clusters.md.

    python tests/rehearsal/recipes.py                  # all recipes, one after the other, then both tables
    python tests/rehearsal/recipes.py olmo3/7b_pretrain # these anew, the rest as it was
    python tests/rehearsal/recipes.py --tables          # the tables alone

The figures are kept in recipes.json beside this file.
"""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.rehearsal.job import rehearse

RESULTS = Path(__file__).with_suffix(".json")
CONFIGS = Path(hydra_conf.__file__).parent / "recipe"
RECIPES = sorted(
    str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "puzzle"
)


def figures(recipe: str, folder: Path) -> dict[str, Any]:
    """What is kept of a recipe's rehearsal; seconds are this machine's."""
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = rehearse(compose("rehearse", [f"recipe={recipe}"]), "kinds", folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    kept = ("stage", "parameters", "peak_bytes", "peak", "peak_phase", "flops", "memory_bytes", "estimate")
    return {
        "world": result["world"],
        "pipeline": result["pipeline"],
        "set_aside": result["set_aside"],
        "seconds": round(time.monotonic() - began),
        "processor_seconds": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime),
        "ranks": [{key: rank[key] for key in kept} for rank in result["ranks"]],
    }


def main(words: list[str]) -> None:
    made: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    os.environ["OMP_NUM_THREADS"] = "1"
    failed = []
    for recipe in words or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                made[recipe] = figures(recipe, Path(folder))
            except ValueError as error:
                failed.append(recipe)
                print(f"{recipe}: {error}", flush=True)
                continue
        RESULTS.write_text(json.dumps({name: made[name] for name in sorted(made)}, indent=1) + "\n")
        for rank in made[recipe]["ranks"]:
            print(recipe, rank["stage"], f"{rank['peak_bytes'] / 2**30:.1f} {rank['estimate']['bytes'] / 2**30:.1f}",
                  rank["peak_phase"], rank["peak"], rank["estimate"], rank["flops"], round(rank["memory_bytes"]/2**30,2), flush=True)
        print(made[recipe]["seconds"], made[recipe]["processor_seconds"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
