"""What outsiders meet first: workflows, issue forms, the citation, the site's pages."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_ext import __version__

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
NAMED = ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")
TARGETS = set(re.findall(r"^([a-z_]+):", (ROOT / "Makefile").read_text(), re.M))


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(path.read_text(), yaml.BaseLoader)  # `on` is a word there, not true
    return loaded


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_make_targets_that_exist(path: Path) -> None:
    called = {word for step in steps(path) for word in re.findall(r"\bmake ([a-z_]+)", step.get("run", ""))}

    assert called <= TARGETS


def test_together_they_run_all_that_must_pass() -> None:
    """Every step of .ci/run, and both files of a release."""
    called = {word for path in WORKFLOWS for step in steps(path) for word in step.get("run", "").split()}
    wanted = re.findall(r"^step make (\w+)", (ROOT / ".ci" / "run").read_text(), re.M)

    assert wanted and {*wanted, "dist", "docs"} <= called


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_read_alone_and_end(path: Path) -> None:
    """Only the job that publishes may ask for an identity."""
    workflow = read(path)
    granted = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}

    assert workflow["permissions"] == {"contents": "read"}
    assert granted == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    assert "concurrency" in workflow
    assert all(re.fullmatch(r"[\w/.-]+@(v\d+|release/v1)", step["uses"]) for step in steps(path) if "uses" in step)


def test_the_deep_tests_are_split_into_as_many_groups_as_there_are_jobs() -> None:
    deep = read(GITHUB / "workflows" / "nightly.yml")["jobs"]["deep"]
    groups = deep["strategy"]["matrix"]["group"]
    (run,) = (step["run"] for step in deep["steps"] if step.get("run", "").startswith("make deep"))

    assert groups == [str(number + 1) for number in range(len(groups))]
    assert f"--splits {len(groups)} " in run


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms(path: Path) -> None:
    form = read(path)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]

    assert form["name"] and form["description"] and len(set(ids)) == len(ids)
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)


def test_a_bug_is_told_with_what_is_installed_first() -> None:
    fields = [field for field in read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"] if field["type"] != "markdown"]

    assert "`nemo-ext doctor --install`" in fields[0]["attributes"]["description"]
    assert fields[0]["validations"]["required"] == "true"


def test_dependabot_looks_after_packages_and_actions() -> None:
    updates = read(GITHUB / "dependabot.yml")["updates"]

    assert {(each["package-ecosystem"], each["schedule"]["interval"]) for each in updates} == {
        ("pip", "weekly"),
        ("github-actions", "weekly"),
    }


def test_the_citation_is_of_this_version_or_of_none() -> None:
    assert read(ROOT / "CITATION.cff").get("version", __version__) == __version__


def test_the_site_has_every_page_once() -> None:
    def pages(nav: Any) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)]

    wanted = [*ROOT.glob("docs/**/*.md"), *(ROOT / f"{name}.md" for name in NAMED)]
    assert sorted(pages(read(ROOT / "mkdocs.yml")["nav"])) == sorted(str(path.relative_to(ROOT)) for path in wanted)


def test_the_tools_that_make_targets_call_are_in_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[<>=\[]", line)[0] for extra in ("dev", "docs") for line in extras[extra]}
    called = set(re.findall(r"\$\(VENV\)/bin/([\w-]+)", (ROOT / "Makefile").read_text())) - {"python", "nemo-ext"}

    assert called <= names
