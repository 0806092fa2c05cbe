"""The sensitivity job: measures on this machine's ranks, then writes the report. The same command resumes it."""

import sys
from pathlib import Path
from typing import Any

from nemo_ext.architecture.precision_plan import Plan
from nemo_ext.blockwise.rank import check_machine, start
from nemo_ext.checkpoint.beside import is_hugging_face
from nemo_ext.checkpoint.start import as_checkpoint, description_of
from nemo_ext.checkpoint.torch_dist import checkpoint_folder
from nemo_ext.data.training import tokenize_streams, with_data
from nemo_ext.job.files import only_run_in
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import write_config, write_versions
from nemo_ext.sensitivity.report import write_report
from nemo_ext.sensitivity.settings import read_settings
from nemo_ext.sensitivity.units import units
from nemo_ext.sensitivity.workspace import Workspace

DEFAULT_PLAN = {"default": "fp8", "recipe": "tensorwise", "rules": ["head bf16"]}
"""Precision plan for a config without one."""


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
    config = as_checkpoint(config, model)
    if config["precision_plan"] is None:
        config["precision_plan"] = DEFAULT_PLAN
    # Measured with torch's FP8 products everywhere, even where Transformer Engine is installed.
    config["model"]["backend"] = "local"
    config["megatron"]["moe_grouped_gemm"] = False
    check_backend(config, "local")
    architecture = description_of(model).architecture
    units(Plan.from_config(config["precision_plan"]), architecture, chosen.per)
    workspace = Workspace(Path(config["run_dir"]))
    with only_run_in(workspace.run_dir):
        workspace.begin(config, checkpoint_folder(model))
        config = with_data(config)
        write_config(workspace.run_dir, config)
        write_versions(workspace.run_dir, sys.argv)
        tokenize_streams(config.get("data"))
        start("nemo_ext.sensitivity.rank", workspace.config, ranks=int(config["launcher"]["nproc_per_node"]))
        notice(f"report: {write_report(workspace, chosen, config, architecture)}")
