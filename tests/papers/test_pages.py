"""The pages of the papers are what the configs say, and our numbers are the papers' where they state them."""

import importlib.util
import sys
from collections import Counter
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
def test_the_differences_of_all_papers_are_on_one_page() -> None:
    made = pages()

    assert (made.FOLDER / "differences.md").read_text() == made.differences(), "python tests/papers/pages.py"


def test_every_method_has_a_verdict_and_differences_say_how() -> None:
    for paper in PAPERS.values():
        for method, section, verdict, how in paper.get("methods") or ():
            assert verdict in ("exact", "differs", "partly", "not here") and method and section and how, (
                method,
                verdict,
            )


def test_differences_are_counted_and_have_all_methods() -> None:
    page = (pages().FOLDER / "differences.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    counts = Counter(row[2] for row in rows)

    assert (
        f"{counts['not here']} rows are not here, {counts['partly']} are here partly, {counts['differs']} differ"
        in page
    )
    for paper in PAPERS.values():
        methods = [row for row in paper.get("methods") or () if row[2] != "exact"]
        assert all([*map(str, row)] in rows for row in methods), paper["title"]


def test_stages_that_can_be_run_are_not_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pages()
    monkeypatch.setattr(made, "composed", lambda stage: {"not_reproduced": ["a part of it"]})

    for paper in PAPERS:
        methods = {row[0] for row in PAPERS[paper].get("methods") or ()}
        absent = {row[0] for row in made.differing(paper) if row[2] == "not here"}
        assert absent <= methods, paper
        assert "partly" in {row[2] for row in made.differing(paper)}, paper


def test_every_recipe_of_a_paper_is_a_stage_or_a_method_of_its_page() -> None:
    for path in Path(__file__).parents[2].glob("hydra_conf/synthesize/*.yaml"):
        about = yaml.safe_load(path.read_text())["about"]
        for paper, name in (("nemotron3_nano", "Nano"), ("llama_nemotron", "Llama-Nemotron")):
            if name in about:
                assert path.stem in yaml.safe_dump(PAPERS[paper], width=10_000), f"{path.stem}: {paper}"


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_what_a_paper_states_is_what_we_have(paper: str) -> None:
    made = pages()

    for stage in PAPERS[paper]["stages"]:
        config = made.composed(stage) if stage["numbers"] else {}
        for path, given in stage["numbers"].items():
            if isinstance(number := made.stated(given), int | float):
                assert made.value_at(config, path) == pytest.approx(number), f"{stage['stage']}: {path}"
