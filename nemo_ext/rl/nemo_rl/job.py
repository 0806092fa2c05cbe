"""`nemo-ext rl engine=nemo_rl`: turns the composed config into NeMo-RL's master config and our adapter's settings."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.job.config import INTERRUPTED
from nemo_ext.job.made_of import flat
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import CHECKPOINTS, METRICS, write_config, write_versions
from nemo_ext.job.settings import checked
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.draft import Draft, put, section_of
from nemo_ext.rl.nemo_rl.export import FINISHED, MODEL, finished_step, has_model, leave_model, saved_in
from nemo_ext.rl.nemo_rl.layout import description_of, plan, put_layout, stated
from nemo_ext.rl.nemo_rl.render import render
from nemo_ext.rl.precision import Precision
from nemo_ext.rl.settings import NemoRl


def run(config: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Train with the NeMo-RL that NEMO_RL_ROOT or PYTHONPATH names and leave the model in `RUN_DIR/model`.

    A run directory with a checkpoint is resumed from it; a finished one without its model gets it. If NeMo-RL ended at
    its time limit (`checkpointing.checkpoint_must_save_by`), the exit code is that of an interrupted run.

    Raises:
        ValueError: NeMo-RL is not installed, lacks a key or cannot do what the algorithm says, or the tasks or pairs
            are invalid, or the model has Python files and `trust_remote_code` is not set.
    """
    checkout = Checkout(os.environ.get("NEMO_RL_ROOT"))
    given, master = settings_of(config, algorithm, checkout)
    for name in dict.fromkeys((master["policy"]["model_name"], master["policy"]["tokenizer"]["name"])):
        may_run_code(str(name), config)  # NeMo-RL's workers do not ask
    section, run_dir = section_of(algorithm), Path(config["run_dir"])
    write_config(run_dir, config)
    write_versions(run_dir, sys.argv)
    step = finished_step(run_dir, master, section)
    if step is not None and has_model(run_dir, step, master, section):
        notice(f"{run_dir / MODEL}: this run is finished; more steps go on, another run_dir=... begins anew")
        return
    if step is None:
        try:
            from nemo_ext.rl.nemo_rl.run import run as train
        except ImportError as error:
            raise ValueError(f"engine=nemo_rl: {error}: docs/rl/nemo_rl.md says what it needs") from None
        (run_dir / FINISHED).unlink(missing_ok=True)
        notice(f"NeMo-RL: {algorithm.algorithm}, {run_dir}")
        end = train({**given, "nemo_rl": master}, metrics=run_dir / METRICS)
        if end.stopped:
            saved = saved_in(Path(master["checkpointing"]["checkpoint_dir"]))
            goes_on = "the same command goes on" if saved and saved[-1].step == end.step else "it has no checkpoint"
            steps = master[section]["max_num_steps"]
            notice(f"stopped at step {end.step} of {steps} as checkpoint_must_save_by told it; {goes_on}")
            sys.exit(INTERRUPTED)
        step = end.step
    leave_model(run_dir, step, master, section, checkout.root, config["template"], config)


def settings_of(
    config: Mapping[str, Any], algorithm: Algorithm, checkout: Checkout
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of `nemo_ext.rl.nemo_rl.run.run` besides the master config, and the master config.

    Raises:
        ValueError: as `run`.
    """
    asked = checked(NemoRl, config["nemo_rl"], "nemo_rl")
    if isinstance(algorithm, PolicyGradient) and algorithm.steps is None:
        raise ValueError("rl.schedule.steps=null: say how many steps to train")
    of_user = flat(asked.set or {})
    precision = Precision.from_config(config, asked.fp8_in)
    rendered = render(algorithm, checkout, backend=asked.backend, precision=precision)
    _lay_out(config, asked, algorithm, rendered, of_user)
    rendered.settled(config["on_inexpressible"])
    section, run_dir = section_of(algorithm), Path(config["run_dir"])
    own: dict[str, Any] = {
        section: {"seed": config["seed"]},
        "policy": {
            "model_name": config["policy"],
            "tokenizer": {"name": config["policy"]},
        },
        "checkpointing": {"enabled": True, "checkpoint_dir": str(run_dir / CHECKPOINTS)},
        "logger": {"log_dir": str(run_dir / "logs")},
    }
    if not config["tasks" if isinstance(algorithm, PolicyGradient) else "pairs"].get("validation"):
        # The version's example, and many an algorithm, would validate; with validation that is when it saves, too.
        never = {"val_period": 0, "val_at_start": False, "val_at_end": False}
        keys = checkout.keys(section)
        own[section] |= {key: value for key, value in never.items() if keys.missing(f"{section}.{key}") is None}
        own["checkpointing"] |= {"metric_name": None, "save_period": config["save_every"]}
        if algorithm.validation.every is not None:
            notice("nothing to validate on is given: tasks.validation.path=FILE, or pairs.validation=FILE")
    changes: dict[str, Any] = {}
    for path, value in of_user.items():
        put(changes, path, value)
    master = checkout.config(section, rendered.settings, own, changes)
    master = checkout.config(section, rendered.settings, own, _save_format(master["policy"], checkout), changes)
    given = {key: value for key, value in rendered.adapter.items() if key not in ("data", "validation")}
    given["template"] = config["template"]
    if isinstance(algorithm, PolicyGradient):
        given["tasks"] = {key: value for key, value in config["tasks"].items() if value}
    else:
        given["pairs"] = {key: value for key, value in config["pairs"].items() if value}
    return given, master


def on_cluster(
    config: Mapping[str, Any], nodes: int, gpus_per_node: int, gpu_memory_gib: float | None
) -> dict[str, Any]:
    """The config with the sizes of a cluster, where it does not give them."""
    given = config["nemo_rl"]
    sizes = {"cluster.num_nodes": nodes, "cluster.gpus_per_node": gpus_per_node}
    memory = given.get("gpu_memory_gib") or gpu_memory_gib
    return {
        **config,
        "nemo_rl": {**given, "set": {**sizes, **flat(given["set"] or {})}, "gpu_memory_gib": memory},
    }


def _lay_out(
    config: Mapping[str, Any], asked: NemoRl, algorithm: Algorithm, draft: Draft, of_user: Mapping[str, Any]
) -> None:
    """Write the layout into a draft of the settings, and tell it."""
    wanted = stated(asked.layout, of_user, asked.backend, asked.gpu_memory_gib)
    model = description_of(config["policy"])
    fp8 = draft.settings["policy"].get("generation", {}).get("vllm_cfg", {}).get("precision") == "fp8"
    found = plan(
        algorithm,
        model,
        wanted,
        backend=asked.backend,
        micro_batch=config["micro_batch"],
        generation_bytes=1 if fp8 else 2,
    )
    put_layout(draft, found, model, algorithm, asked.backend)
    notice(found.told())


def _save_format(policy: Mapping[str, Any], checkout: Checkout) -> dict[str, Any]:
    """Save format of DTensor's workers from which the last checkpoint can become `RUN_DIR/model`."""
    dtensor = policy.get("dtensor_cfg") or {}
    if not dtensor.get("enabled"):
        return {}
    if not dtensor.get("_v2"):
        # DTensor's first version has one format, and requires that none is named.
        return {"checkpointing": {"model_save_format": None}}
    if checkout.converts_dtensor_v2:
        return {"checkpointing": {"model_save_format": "torch_save"}}
    return {"checkpointing": {"model_save_format": "safetensors", "save_consolidated": True}}
