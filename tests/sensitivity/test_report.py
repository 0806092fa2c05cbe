"""Reports on sweeps within a number of bits."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.job.config import compose
from nemo_ext.job.records import append_lines
from nemo_ext.sensitivity.job import _check_budget
from nemo_ext.sensitivity.report import write_report
from nemo_ext.sensitivity.settings import read_settings
from nemo_ext.sensitivity.units import precisions, units
from nemo_ext.sensitivity.workspace import EVERYTHING, REFERENCE, Sensitivity, Workspace, as_json


def test_a_unit_whose_sizes_fit_no_low_precision(tmp_path: Path) -> None:
    """Its rows have no measurements; the least number of bits in the message is accepted."""
    config = compose(
        "sensitivity", ["sensitivity.model=x", f"run_dir={tmp_path}", "sensitivity.bits=12", "sensitivity.per=part"]
    )
    config["precision_plan"] = {"default": "nvfp4", "recipe": "tensorwise", "rules": ["head bf16"]}
    model = Architecture.from_config(compose("describe", ["model=nemotron3_super_tiny"])).with_pattern("-{ffn=40}E*M")
    chosen, plan, workspace = read_settings(config), Plan.from_config(config["precision_plan"]), Workspace(tmp_path)
    every = units(plan, model, "part")
    lowest = {unit.selector: precisions(unit, plan)[0] for unit in every}
    assert "bf16" in lowest.values() and "nvfp4" in lowest.values()
    scores = [Sensitivity(REFERENCE, 0.0, 2.0, 10), Sensitivity(EVERYTHING, 0.1, 2.1, 10)]
    scores += [
        Sensitivity(f"{unit.selector} {low}", 0.01, 2.01, 10)
        for unit in every
        for low in precisions(unit, plan)
        if low != "bf16"
    ]
    append_lines(workspace.scores, scores, Sensitivity, what="a score")
    tried = [{"precisions": lowest, "measured": 0.1, "added": 0.1}]
    rows = [
        {**as_json(Sensitivity(name, 0.1, 2.0, 10), of, model), "bits": 8.0}
        for name, of in ((REFERENCE, None), ("proposed", plan))
    ]
    workspace.result.write_text(json.dumps({"bits": 12, "tried": tried, "plans": rows}))

    page = write_report(workspace, chosen, config, model).read_text()

    assert "training requires other sizes" in page and "| BF16 |" in page
    with pytest.raises(ValueError, match="need at least") as told:
        _check_budget(replace(chosen, bits=4.5), plan, model)
    found = re.search(r"at least ([\d.]+) bits", str(told.value))
    assert found is not None
    _check_budget(replace(chosen, bits=float(found[1])), plan, model)
