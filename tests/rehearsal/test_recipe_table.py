"""The figures of docs/rehearsal.md: all recipes have them, and a rehearsal finds them again."""

import json
from pathlib import Path

import pytest

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.rehearsal.job import rehearse

FIGURES = json.loads(Path(__file__).with_name("recipes.json").read_text())


def test_every_recipe_was_rehearsed() -> None:
    recipes = {
        f"{path.parent.name}/{path.stem}"
        for path in Path(hydra_conf.__file__).parent.glob("recipe/*/*.yaml")
        if path.parent.name != "puzzle"
    }
    assert FIGURES.keys() == recipes, "python tests/rehearsal/recipes.py --missing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "stage"),
    [
        ("olmo1/1b", 0),
        ("domyn_small/cpt", 0),
        ("llama_nemotron/ultra_cpt", 1),
        ("olmo3/32b_pretrain", 3),
        ("nemotron3_nano/long_context", 3),
    ],
)
def test_a_rehearsal_finds_its_figures_again(recipe: str, stage: int, tmp_path: Path) -> None:
    (kept,) = (rank for rank in FIGURES[recipe]["ranks"] if rank["stage"] == stage)

    (found,) = rehearse(compose("rehearse", [f"recipe={recipe}"]), [stage], tmp_path)["ranks"]

    assert {key: found[key] for key in ("peak", "flops", "peak_phase")} == {
        key: kept[key] for key in ("peak", "flops", "peak_phase")
    }, f"python tests/rehearsal/recipes.py {recipe}"
    assert found["memory_bytes"] < 2e9
