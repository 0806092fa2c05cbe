"""The pages of the papers are what the configs say, and our numbers are the papers' where they state them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

PLACE = Path(__file__).with_name("pages.py")
PAPERS: dict[str, Any] = yaml.safe_load(PLACE.with_name("stages.yaml").read_text())


def pages() -> ModuleType:
    if "paper_pages" not in sys.modules:
        spec = importlib.util.spec_from_file_location("paper_pages", PLACE)
        assert spec is not None and spec.loader is not None
        sys.modules["paper_pages"] = made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    return sys.modules["paper_pages"]


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_is_what_the_configs_make_of_it(paper: str) -> None:
    made = pages()

    assert (made.FOLDER / f"{paper}.md").read_text() == made.page(paper), "python tests/papers/pages.py"


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_what_a_paper_states_is_what_we_have(paper: str) -> None:
    made = pages()

    for stage in PAPERS[paper]["stages"]:
        config = made.composed(stage) if stage["numbers"] else {}
        for path, given in stage["numbers"].items():
            if isinstance(number := made.stated(given), int | float):
                assert made.value_at(config, path) == pytest.approx(number), f"{stage['stage']}: {path}"
