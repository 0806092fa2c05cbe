"""Picture of loss and accuracy against parameters in the real model's pipeline: parent, children, baselines.

    python benchmarks/real_model_picture.py RUN_DIR docs/images/real_model.png

RUN_DIR is the run directory of `nemo-ext pipeline pipeline=smollm2_135m`. Bars are 95 % intervals: of losses above the
parent's on the same sequences, and of the mean accuracy over benchmarks.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from nemo_ext.job.report import new_figure, save_figure, tidy

MARKS = {
    "parent": ("o", "black", "parent"),
    "child": ("o", "tab:orange", "Puzzle's child"),
    "healed": ("o", "tab:green", "the child, healed"),
    "uniform width pruning": ("s", "tab:blue", "uniform width"),
    "greedy dropping": ("^", "tab:blue", "greedy dropping"),
    "random choice": ("x", "tab:gray", "random choices"),
    "last blocks dropped": ("v", "tab:gray", "last blocks dropped"),
}


def rows_of(run_dir: Path) -> list[tuple[str, dict[str, Any]]]:
    """Kinds and figures of all models with a measured loss, with the parent once."""
    rows = {}
    for folder in sorted((run_dir / "puzzle").glob("child_*")):
        for file in ("evaluation.json", "baselines.json"):
            for row in json.loads((folder / file).read_text()) if (folder / file).is_file() else []:
                kind = next((kind for kind in MARKS if row["name"].startswith(kind)), None)
                if kind is not None:
                    rows[row["name"] if kind == "parent" else f"{folder.name} {row['name']}"] = (kind, row)
    return list(rows.values())


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("picture", type=Path, metavar="PICTURE")
    arguments = parser.parse_args()
    run_dir, millions = arguments.run_dir, {"evaluate_parent": 0.0}
    figure = new_figure(figsize=(10, 4.2))
    losses, accuracy = figure.subplots(1, 2)
    labelled = set()
    for kind, row in rows_of(run_dir):
        mark, colour, label = MARKS[kind]
        size, difference = row["costs"]["parameters"] / 1e6, row["from_parent"]
        millions |= {"evaluate_parent": size} if kind == "parent" else {}
        above, (low, high) = difference["mean"], difference["interval"] or (difference["mean"],) * 2
        name = None if kind in labelled else label
        losses.errorbar(
            size, above, yerr=[[above - low], [high - above]], fmt=mark, color=colour, label=name, capsize=3
        )
        labelled.add(kind)
    for folder in (file.parent for file in sorted((run_dir / "puzzle").glob("child_*/evaluation.json"))):
        child = json.loads((folder / "evaluation.json").read_text())[-1]
        millions[folder.name.replace("child", "evaluate")] = child["costs"]["parameters"] / 1e6
    for name, size in millions.items():
        if not (run_dir / name / "results.json").is_file():
            continue
        mean = json.loads((run_dir / name / "results.json").read_text())["mean"]
        value, (low, high) = 100 * mean["accuracy"], mean["interval"]
        colour = "black" if name == "evaluate_parent" else "tab:green"
        accuracy.errorbar(
            size, value, yerr=[[value - 100 * low], [100 * high - value]], fmt="o", color=colour, capsize=3
        )
    losses.set_yscale("symlog", linthresh=0.1)
    losses.set_ylabel("loss above the parent's, nats per token")
    losses.legend(fontsize=8, frameon=False)
    accuracy.set_ylabel("mean accuracy of four benchmarks, %")
    accuracy.set_ylim(0)
    for axes in (losses, accuracy):
        axes.set_xlabel("parameters, millions")
        tidy(axes)
    save_figure(figure, arguments.picture)


if __name__ == "__main__":
    main()
