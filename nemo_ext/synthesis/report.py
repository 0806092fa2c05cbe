"""The card of an output: README.md, report.json, and a picture of what is left after each step."""

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
    front = [f"license: {about['license'] or 'other'}", "tags: [synthetic]", "configs:"]
    front += [f"- {{config_name: {name}, data_files: {name}.jsonl}}" for name in outputs]
    card = _card(folder, recipe, about, models, steps, outputs)
    card.write(folder / CARD, after="\n".join(["---", *front, "---", ""]))


def _card(
    folder: Path,
    recipe: Recipe,
    about: Mapping[str, Any],
    models: Mapping[str, Mapping[str, Any]],
    steps: Mapping[str, Counts],
    outputs: Mapping[str, Counts],
) -> Report:
    made_by = f"Made by `nemo-ext synthesize recipe={recipe.name}`" + (f": {recipe.about}" if recipe.about else "")
    card = Report(folder.name, made_by)
    if about["license"] is None:
        card.add(
            "No licence was given (`license=`): answers may be bound by the licences of the models and of the input."
        )
    facts = {"input": ", ".join(about["input"]), "rows of the input": about["rows"]}
    facts |= {"repeated rows": about["repeated"]} if about["repeated"] else {}
    facts |= {"seed": str(about["seed"]), "nemo_ext": about["nemo_ext"]}
    card.table("", ("what", "value"), facts.items())
    _models(card, models, recipe, steps)
    files = [(f"{name}.jsonl", of.made, of.numbers["words"], of.dropped.total()) for name, of in outputs.items()]
    card.table("Files", ("file", "records", "words", "rows that gave none"), files)
    for name, counts in outputs.items():
        file = recipe.outputs[name]
        path = hydra_value(str(folder.absolute() / f"{name}.jsonl"))
        command = READERS[file.kind].format(name=name, path=path, pairing=file.pairing, to=f"data/{name}")
        card.add(f"`{name}.jsonl`, {counts.made:,} {file.kind}: `{command}`")
    _picture(card.section("Steps"), about["rows"], steps)
    rows = []
    for name, counts in steps.items():
        left = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.most_common(4))
        rows.append((name, recipe.steps[name].kind, counts.rows, counts.made, left))
    card.table("", ("step", "kind", "rows before", "after", "left"), rows)
    judged = [
        f"{name}: {of.numbers['canaries_fooled']} of {of.numbers['canaries']} planted faults were taken for right."
        for name, of in steps.items()
        if "canaries" in of.numbers
    ]
    card.section("Judges", "\n".join(judged))
    lines = []
    for name, counts in {**steps, **outputs}.items():
        for reason, count in counts.dropped.most_common():
            of = counts.numbers.get("answers") or counts.rows  # several answers may be asked for a row
            share = f"({count / of:.1%})" if 0 < count <= of else ""
            shown = "; ".join(counts.examples.get(reason, [])[:_SHOWN])
            lines.append(f"- {name}, {reason}: {count:,} {share}: {shown}")
    return card.section("What left").add("\n".join(lines))


def _models(card: Report, models: Mapping[str, Mapping[str, Any]], recipe: Recipe, steps: Mapping[str, Counts]) -> None:
    """Adds the models with the tokens that each was asked for: what the data cost."""
    rows = []
    for role, model in models.items():
        own = [counts.numbers for name, counts in steps.items() if next(recipe.steps[name].roles(), "") == role]
        sums = [sum(of.get(key, 0) for of in own) for key in ("answers", "prompt_tokens", "completion_tokens")]
        rows.append((role, str(model["model"]), str(model["checkpoint"] or "")[:12], *sums))
    card.table("Models", ("role", "model", "checkpoint", "answers", "tokens of prompts", "of answers"), rows)


def _picture(card: Report, first: int, steps: Mapping[str, Counts]) -> None:
    names, values = ["input", *steps], [first, *(counts.made for counts in steps.values())]
    (axes,) = card.picture("rows after each step", PICTURE, 8, 1.2 + 0.35 * len(names))
    bars = axes.barh(names, values, height=0.7, color="#4477aa")
    axes.bar_label(bars, [f"{value:,}" for value in values], padding=3, fontsize=8)
    axes.invert_yaxis()
    tidy(axes, grid="x", xlabel="rows after each step", xlim=(0, max(*values, 1) * 1.12))
