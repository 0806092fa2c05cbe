"""The pages docs/papers/*.md: stages and methods of the papers, our numbers next to theirs (stages.yaml and configs).

differences.md has everything that differs, of all papers.

python tests/papers/pages.py          # writes them
"""

import shlex
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.job.config import compose
from nemo_ext.job.report import markdown_table
from nemo_ext.rl.nemo_rl import layout

FOLDER = Path(__file__).parents[2] / "docs" / "papers"
PAPERS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("stages.yaml").read_text())
OF_SUBMIT = ("cluster=", "cluster.", "slurm.", "job=")


def composed(stage: Mapping[str, Any]) -> dict[str, Any]:
    """The config that a stage's command composes."""
    return _composed(stage["config"], stage["command"])


@cache
def _composed(kind: str, command: str) -> dict[str, Any]:
    words = [word for word in shlex.split(command)[2:] if not word.startswith(OF_SUBMIT)]
    if kind == "rl":  # the preset as it is: judges' addresses are the user's
        (preset,) = (word.removeprefix("preset=") for word in words if word.startswith("preset="))
        return {"rl": yaml.safe_load((files("hydra_conf") / "rl" / f"{preset}.yaml").read_text())}
    return compose(kind, words)


def stated(value: Any) -> Any:
    """What the paper states: a number, which YAML reads as text where its exponent has no sign, a text, or None."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path of a config."""
    found: Any = config
    for key in path.split("."):
        found = found[key]
    return found


def shown(value: Any) -> str:
    """A number as a reader writes it."""
    if isinstance(value, bool | str) or value is None:
        return str(value)
    number = float(value)
    if abs(number) >= 1e8:
        return f"{number:.4g}".replace("e+0", "e").replace("e+", "e")
    return f"{number:,.0f}" if number == int(number) else f"{number:.6g}".replace("e-0", "e-")


def rows(stage: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, the paper's number and ours, for every number of a stage; and how its GPUs are divided."""
    made = []
    config = composed(stage) if stage["numbers"] else {}
    for path, given in stage["numbers"].items():
        paper = stated(given)
        ours = shown(value_at(config, path))
        made.append(
            (
                f"`{path}`",
                "not stated" if paper is None else shown(paper),
                f"{ours} (choice)" if paper is None else ours,
            )
        )
    if (name := stage.get("split")) is not None:
        sizes = layout.load(name)
        generating = f", {sizes.generation_nodes} of them for generation" if sizes.generation_nodes else ""
        told = f"{sizes.nodes} nodes of {sizes.gpus_per_node} GPUs{generating}"
        made.append((f"`nemo_rl.layout={name}`", "the same", told))
    return made


def page(paper: str) -> str:
    """One page."""
    given = PAPERS[paper]
    stages = given["stages"]
    parts = [
        f"# {given['title']}, stage by stage",
        f"Source: {given['source']}.",
        "After this page you can run each stage of the paper. The tables compare the paper's numbers with our configs; "
        "numbers that the paper does not state are marked (choice). "
        "This page is written by `python tests/papers/pages.py`.",
        markdown_table(
            ("stage", "section", "command"), [(s["stage"], str(s["section"]), f"`{s['command']}`") for s in stages]
        ),
        given["left_out"],
    ]
    for stage in stages:
        if not stage["numbers"]:
            continue
        parts.append(f"## {stage['stage']}")
        parts.append(markdown_table(("key", "paper", "here"), rows(stage)))
        config = composed(stage)
        parts += [f"- Differs: {what}." for what in stage.get("differs") or ()]
        parts += [f"- Not reproduced: {what}." for what in config.get("not_reproduced") or ()]
    if methods := given.get("methods"):
        parts += ["## Methods without numbers", markdown_table(("method", "section", "here", "how"), methods)]
    return "\n\n".join(parts) + "\n"


def differing(paper: str) -> list[tuple[str, str, str, str]]:
    """Stage or method, section, `differs`, `partly` or `not here`, and how, of all that is not exact."""
    given, made = PAPERS[paper], []
    for stage in given["stages"]:
        config = composed(stage) if stage["numbers"] else {}
        told = [("differs", what) for what in stage.get("differs") or ()]
        told += [("partly", what) for what in config.get("not_reproduced") or ()]
        made += [(stage["stage"], str(stage["section"]), *each) for each in told]
    return made + [tuple(row) for row in given.get("methods") or () if row[2] != "exact"]


def differences() -> str:
    """The page with everything that is not exact, of all papers."""
    tables = {paper: differing(paper) for paper in PAPERS}
    verdicts = Counter(row[2] for rows in tables.values() for row in rows)
    parts = [
        "# What differs from the papers",
        "After this page you know every stage and method that is not as in its paper: "
        f"{verdicts['not here']} rows are not here, {verdicts['partly']} are here partly, {verdicts['differs']} differ."
        " Stages that are not listed have the paper's numbers; numbers that a paper does not state are marked (choice) "
        "on its page. How benchmarks differ is in [evaluation data](../evaluation_data.md). "
        "This page is written by `python tests/papers/pages.py`.",
    ]
    for paper, rows in tables.items():
        given = PAPERS[paper]
        parts += [f"## {given['title']}", f"[Stage by stage]({paper}.md). {given['left_out']}"]
        parts.append(markdown_table(("stage or method", "section", "here", "how"), rows))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in PAPERS:
        (FOLDER / f"{name}.md").write_text(page(name))
    (FOLDER / "differences.md").write_text(differences())
