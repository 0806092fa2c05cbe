"""The list of mutations fits the source: a refactoring that takes one's text away shows here, and not at night."""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run() -> dict[str, Any]:
    """Globals of run.py."""
    return runpy.run_path(str(Path(__file__).with_name("run.py")))["read"].__globals__


def test_sixty_different_slips_fit_todays_source(run: dict[str, Any]) -> None:
    mutations = run["read"]()

    assert len({(each["file"], each["before"]) for each in mutations}) == len(mutations) == 60
    for each in mutations:
        source = (run["ROOT"] / "nemo_ext" / each["file"]).read_text()
        mutated = source.replace(each["before"], each["after"])
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), each["what"]


def test_a_slip_whose_text_or_tests_have_gone_is_refused(run: dict[str, Any], tmp_path: Path) -> None:
    run["LIST"] = tmp_path / "list.toml"
    run["LIST"].write_text(
        '[[mutation]]\nwhat = "a slip"\nfile = "job/seeds.py"\nbefore = "no such text"\nafter = "x"\n'
        'tests = ["tests/job/test_none.py::test_it"]\n'
    )

    with pytest.raises(SystemExit, match=r"1 \(a slip\): nemo_ext/job/seeds.py has its text 0 times") as refused:
        run["read"]()

    assert "tests/job/test_none.py: name the tests that catch it now" in str(refused.value)
