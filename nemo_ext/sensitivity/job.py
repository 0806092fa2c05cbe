"""The sensitivity job: measures on this machine's ranks, then writes the report. The same command resumes it."""

import math
import sys
from pathlib import Path
from typing import Any

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.checkpoint.beside import is_hugging_face
from nemo_ext.checkpoint.start import as_checkpoint, description_of, with_main_model
from nemo_ext.checkpoint.torch_dist import checkpoint_folder
from nemo_ext.data.training import tokenize_streams, with_data
from nemo_ext.job.files import only_run_in
from nemo_ext.job.progress import notice
from nemo_ext.job.rank import check_machine, start
from nemo_ext.job.run_directory import write_config, write_versions
from nemo_ext.sensitivity.report import write_report
from nemo_ext.sensitivity.settings import Settings, read_settings
from nemo_ext.sensitivity.units import precisions, units
from nemo_ext.sensitivity.workspace import Workspace

DEFAULT_PLAN = {"default": "fp8", "recipe": "tensorwise", "rules": ["head bf16"]}
"""Precision plan for a config without one."""
DEFAULT_WITH_BITS = {**DEFAULT_PLAN, "default": "nvfp4"}
"""The same with `sensitivity.bits`."""


def run(config: dict[str, Any]) -> None:
    """Measure, choose and compare plans, resuming from earlier results, and write the report.

    Args:
        config: composed config, from `compose("sensitivity", ...)`.

    Raises:
        ValueError: the config is invalid.
        SystemExit: a rank failed.
    """
    from nemo_ext.megatron.fp8 import check_backend

    chosen = read_settings(config)
    check_machine(config)
    model = Path(chosen.model)
    if not model.exists():
        raise ValueError(f"sensitivity.model={model}: expected an existing run directory or Megatron checkpoint")
    if is_hugging_face(model):
        raise ValueError(
            f"sensitivity.model={model} is a Hugging Face folder: convert it first with `nemo-ext convert from={model} "
            "to=...`"
        )
    config, description = as_checkpoint(config, model), description_of(model)
    if description.prediction:
        notice("only the main model is measured: plans keep multi-token prediction in BF16")
        config = with_main_model(config, description, config["model"]["name"])
    if config["precision_plan"] is None:
        config["precision_plan"] = DEFAULT_PLAN if chosen.bits is None else DEFAULT_WITH_BITS
    # Measured with torch's FP8 products everywhere, even where Transformer Engine is installed.
    config["model"]["backend"] = "local"
    config["megatron"]["moe_grouped_gemm"] = False
    check_backend(config, "local")
    architecture = description.without_prediction().architecture
    _check_budget(chosen, Plan.from_config(config["precision_plan"]), architecture)
    workspace = Workspace(Path(config["run_dir"]))
    with only_run_in(workspace.run_dir):
        workspace.begin(config, checkpoint_folder(model))
        config = with_data(config)
        write_config(workspace.run_dir, config)
        write_versions(workspace.run_dir, sys.argv)
        tokenize_streams(config.get("data"))
        start("nemo_ext.sensitivity.rank", workspace.config, ranks=int(config["launcher"]["nproc_per_node"]))
        notice(f"report: {write_report(workspace, chosen, config, architecture)}")


def _check_budget(chosen: Settings, plan: Plan, architecture: Architecture) -> None:
    """Reject a plan without units, and a missing, unsupported or too small budget of bits."""
    every = units(plan, architecture, chosen.per)
    if chosen.bits is None:
        if plan.uses_nvfp4:
            raise ValueError(
                "precision_plan uses NVFP4, which needs a bit budget: set sensitivity.bits, for example "
                "sensitivity.bits=4.75"
            )
        return
    if plan.recipe == "delayed":
        raise ValueError(
            "precision_plan.recipe=delayed needs Transformer Engine, but the sweep runs without it: set it to "
            "tensorwise"
        )
    bits = sum(unit.parameters * plan.bits(precisions(unit, plan)[0]) for unit in every)
    least = bits / sum(unit.parameters for unit in every)
    if chosen.bits < least:
        raise ValueError(
            f"sensitivity.bits={chosen.bits}: the weights that the plan quantises need at least "
            f"{math.ceil(least * 1000) / 1000} bits, as "
            "the sizes of some may not fit NVFP4: raise sensitivity.bits, or exclude weights with precision_plan.rules"
        )
