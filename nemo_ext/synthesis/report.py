"""Dataset card of an output: README.md, report.json, and a picture of the number of rows after each step."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.job.config import hydra_value
from nemo_ext.job.files import write_text
from nemo_ext.job.report import Report, tidy
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
    """Write README.md, report.json and the picture.

    Args:
        folder: output folder.
        recipe: the recipe.
        about: `input`, `license`, `seed`, `nemo_ext` (version), and the numbers of input `rows` and `repeated` ones.
        models: mapping from role to `model` and `checkpoint`.
        steps: mapping from step to its counts.
        outputs: mapping from output file to its counts.
    """
    data = {
        "recipe": recipe.name,
        **about,
        "models": models,
        "steps": {name: counts.record() for name, counts in steps.items()},
        "outputs": {name: counts.record() for name, counts in outputs.items()},
    }
    write_text(folder / DATA, json.dumps(data, indent=1, default=str) + "\n")
    made_by = f"Made by `nemo-ext synthesize recipe={recipe.name}`" + (f": {recipe.about}" if recipe.about else "")
    card = Report(folder.name, made_by)
    if about["license"] is None:
        card.add(
            "No licence was given (`license=`): the licences of the models and of the input may apply to the answers."
        )
    facts = {"input": ", ".join(about["input"]), "input rows": about["rows"]}
    facts |= {"repeated rows": about["repeated"]} if about["repeated"] else {}
    facts |= {"seed": str(about["seed"]), "nemo_ext": about["nemo_ext"]}
    card.table("", ("what", "value"), facts.items())
    _models(card, models, recipe, steps)
    files = [
        (f"{name}.jsonl", counts.made, counts.numbers["words"], counts.dropped.total())
        for name, counts in outputs.items()
    ]
    card.table("Files", ("file", "records", "words", "dropped rows"), files)
    for name, counts in outputs.items():
        file = recipe.outputs[name]
        path = hydra_value(str(folder.absolute() / f"{name}.jsonl"))
        command = READERS[file.kind].format(name=name, path=path, pairing=file.pairing, to=f"data/{name}")
        card.add(f"`{name}.jsonl`, {counts.made:,} {file.kind}: `{command}`")
    _picture(card.section("Steps"), about["rows"], steps)
    rows = []
    for name, counts in steps.items():
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.most_common(4))
        rows.append((name, recipe.steps[name].kind, counts.rows, counts.made, dropped))
    card.table("", ("step", "kind", "rows before", "after", "dropped"), rows)
    judged = [
        f"{name}: accepted {counts.numbers['canaries_fooled']} of {counts.numbers['canaries']} planted faults."
        for name, counts in steps.items()
        if "canaries" in counts.numbers
    ]
    card.section("Judges", "\n".join(judged))
    lines = []
    for name, counts in {**steps, **outputs}.items():
        for reason, count in counts.dropped.most_common():
            total = counts.numbers.get("answers") or counts.rows  # a row may have several answers
            share = f"({count / total:.1%})" if 0 < count <= total else ""
            shown = "; ".join(counts.examples.get(reason, [])[:_SHOWN])
            lines.append(f"- {name}, {reason}: {count:,} {share}: {shown}")
    card.section("Dropped rows").add("\n".join(lines))
    front = [f"license: {about['license'] or 'other'}", "tags: [synthetic]", "configs:"]
    front += [f"- {{config_name: {name}, data_files: {name}.jsonl}}" for name in outputs]
    card.write(folder / CARD, after="\n".join(["---", *front, "---", ""]))


def _models(card: Report, models: Mapping[str, Mapping[str, Any]], recipe: Recipe, steps: Mapping[str, Counts]) -> None:
    """Add a table of the models to the card: role, model, checkpoint, and numbers of answers and tokens.

    Args:
        card: the dataset card.
        models: mapping from role to `model` and `checkpoint`.
        recipe: the recipe.
        steps: mapping from step to its counts.
    """
    rows = []
    for role, model in models.items():
        own = [counts.numbers for name, counts in steps.items() if next(recipe.steps[name].roles(), "") == role]
        keys = ("answers", "prompt_tokens", "completion_tokens")
        sums = [sum(numbers.get(key, 0) for numbers in own) for key in keys]
        rows.append((role, str(model["model"]), str(model["checkpoint"] or "")[:12], *sums))
    card.table("Models", ("role", "model", "checkpoint", "answers", "prompt tokens", "answer tokens"), rows)


def _picture(card: Report, first: int, steps: Mapping[str, Counts]) -> None:
    names, values = ["input", *steps], [first, *(counts.made for counts in steps.values())]
    (axes,) = card.picture("rows after each step", PICTURE, 8, 1.2 + 0.35 * len(names))
    bars = axes.barh(names, values, height=0.7, color="#4477aa")
    axes.bar_label(bars, [f"{value:,}" for value in values], padding=3, fontsize=8)
    axes.invert_yaxis()
    tidy(axes, grid="x", xlabel="rows after each step", xlim=(0, max(*values, 1) * 1.12))
