"""Figures of docs/rehearsal.md, reproduced by a rehearsal."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

import hydra_conf
from nemo_ext.job.config import compose
from nemo_ext.rehearsal.ranks import rehearse

CONFIGS = Path(hydra_conf.__file__).parent / "recipe"
FIGURES = json.loads(Path(__file__).with_name("recipes.json").read_text())
QUICK = {"llama_nemotron/ultra_sft", "olmo1/1b"}
"""A model found by Puzzle, and one whose norms have no weights."""


def script() -> ModuleType:
    """Module that computes the figures, recipes.py."""
    spec = importlib.util.spec_from_file_location("rehearsed_recipes", Path(__file__).with_name("recipes.py"))
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_recipe_has_figures() -> None:
    recipes = {f"{path.parent.name}/{path.stem}" for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "puzzle"}
    assert FIGURES.keys() == recipes, "python tests/rehearsal/recipes.py --missing; remove those of deleted recipes"


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.deep) for name in FIGURES],
)
def test_a_rehearsal_reproduces_the_figures_of_the_fullest_rank(recipe: str, tmp_path: Path) -> None:
    kept = max(FIGURES[recipe]["ranks"], key=lambda rank: rank["peak_bytes"])

    (tmp_path / "teacher").mkdir()
    words = [f"recipe={recipe}", *script().teacher_words(recipe, tmp_path / "teacher")]

    (found,) = rehearse(compose("rehearse", words), [kept["stage"]], tmp_path / "ranks")["ranks"]

    assert found["peak_bytes"] == pytest.approx(kept["peak_bytes"], rel=0.001), f"recipes.py {recipe}"
    assert sum(found["flops"].values()) == pytest.approx(sum(kept["flops"].values()), rel=0.01)
    assert found["memory_bytes"] < 2e9
