"""The card of an output: README.md, report.json, and a picture of what is left after each step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.job.config import hydra_value
from nemo_ext.job.files import write_text
from nemo_ext.job.report import markdown_table, new_figure, save_figure, tidy
from nemo_ext.synthesis.context import Counts
from nemo_ext.synthesis.outputs import READERS
from nemo_ext.synthesis.settings import Recipe

CARD, DATA, PICTURE = "README.md", "report.json", "rows.png"
_SHOWN = 5


def write(
    folder: Path,
    recipe: Recipe,
    *,
    about: Mapping[str, Any],
    models: Mapping[str, Mapping[str, Any]],
    steps: Mapping[str, Counts],
    outputs: Mapping[str, Counts],
) -> None:
    """Write all three.

    Args:
        folder: folder of the output.
        recipe: the recipe.
        about: input, licence, seed and rows of the input.
        models: model and checkpoint by role.
        steps: counts of each step.
        outputs: counts of each file.
    """
    data = {
        "recipe": recipe.name,
        **about,
        "models": models,
        "steps": {name: counts.record() for name, counts in steps.items()},
        "outputs": {name: counts.record() for name, counts in outputs.items()},
    }
    write_text(folder / DATA, json.dumps(data, indent=1, default=str) + "\n")
    _picture(about["rows"], steps, folder / PICTURE)
    write_text(folder / CARD, _card(folder, recipe, about, models, steps, outputs))


def _card(
    folder: Path,
    recipe: Recipe,
    about: Mapping[str, Any],
    models: Mapping[str, Mapping[str, Any]],
    steps: Mapping[str, Counts],
    outputs: Mapping[str, Counts],
) -> str:
    licence = about["license"]
    parts = [
        "---",
        f"license: {licence or 'other'}",
        "tags: [synthetic]",
        "configs:",
        *(f"- {{config_name: {name}, data_files: {name}.jsonl}}" for name in outputs),
        "---",
        "",
        f"# {folder.name}",
        "",
        f"Made by `nemo-ext synthesize recipe={recipe.name}`" + (f": {recipe.about}" if recipe.about else ""),
        "",
    ]
    if licence is None:
        parts += [
            "No licence was given (`license=`): answers may be bound by the licences of the models and of the input.",
            "",
        ]
    rows = [("input", ", ".join(about["input"])), ("rows of the input", f"{about['rows']:,}")]
    rows += [("repeated rows", f"{about['repeated']:,}")] if about["repeated"] else []
    rows += [("seed", str(about["seed"])), ("nemo_ext", str(about["nemo_ext"]))]
    parts += [markdown_table(("what", "value"), rows), ""]
    if models:
        parts += ["## Models", "", _models(models, recipe, steps), ""]
    parts += ["## Files", "", _files(outputs), ""]
    for name, counts in outputs.items():
        file = recipe.outputs[name]
        path = hydra_value(str(folder.absolute() / f"{name}.jsonl"))
        command = READERS[file.kind].format(name=name, path=path, pairing=file.pairing, to=f"data/{name}")
        parts += [f"`{name}.jsonl`, {counts.made:,} {file.kind}: `{command}`", ""]
    parts += ["## Steps", "", f"![rows after each step]({PICTURE})", "", _steps(recipe, steps), ""]
    judged = [(name, each.numbers) for name, each in steps.items() if "canaries" in each.numbers]
    if judged:
        parts += ["## Judges", ""]
        parts += [
            f"{name}: {numbers['canaries_fooled']} of {numbers['canaries']} planted faults were taken for right."
            for name, numbers in judged
        ]
        parts += [""]
    parts += ["## What left", ""]
    for name, counts in {**steps, **outputs}.items():
        for reason, count in counts.dropped.most_common():
            of = counts.numbers.get("answers") or counts.rows  # several answers may be asked for a row
            share = f"{count / of:.1%}" if 0 < count <= of else ""
            shown = "; ".join(counts.examples.get(reason, [])[:_SHOWN])
            parts += [f"- {name}, {reason}: {count:,} {f'({share})' if share else ''}: {shown}"]
    return "\n".join(parts) + "\n"


def _models(models: Mapping[str, Mapping[str, Any]], recipe: Recipe, steps: Mapping[str, Counts]) -> str:
    """Models with the tokens that each was asked for: what the data cost."""
    rows = []
    for role, model in models.items():
        own = [counts.numbers for name, counts in steps.items() if next(recipe.steps[name].roles(), "") == role]
        sums = [sum(each.get(key, 0) for each in own) for key in ("answers", "prompt_tokens", "completion_tokens")]
        rows.append((role, str(model["model"]), str(model["checkpoint"] or "")[:12], *(f"{each:,}" for each in sums)))
    return markdown_table(("role", "model", "checkpoint", "answers", "tokens of prompts", "of answers"), rows)


def _files(outputs: Mapping[str, Counts]) -> str:
    rows = [
        (f"{name}.jsonl", f"{counts.made:,}", f"{counts.numbers['words']:,}", f"{counts.dropped.total():,}")
        for name, counts in outputs.items()
    ]
    return markdown_table(("file", "records", "words", "rows that gave none"), rows)


def _steps(recipe: Recipe, steps: Mapping[str, Counts]) -> str:
    rows = []
    for name, counts in steps.items():
        left = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.most_common(4))
        rows.append((name, recipe.steps[name].kind, f"{counts.rows:,}", f"{counts.made:,}", left))
    return markdown_table(("step", "kind", "rows before", "after", "left"), rows)


def _picture(first: int, steps: Mapping[str, Counts], path: Path) -> None:
    names, values = ["input", *steps], [first, *(counts.made for counts in steps.values())]
    figure = new_figure(figsize=(8, 1.2 + 0.35 * len(names)))
    axes = figure.subplots()
    axes.barh(names, values, height=0.7, color="#4477aa")
    for place, value in enumerate(values):
        axes.text(value, place, f" {value:,}", va="center", fontsize=8)
    axes.set_xlim(0, max(*values, 1) * 1.12)
    axes.invert_yaxis()
    axes.set_xlabel("rows after each step")
    tidy(axes, grid="x")
    save_figure(figure, path)
