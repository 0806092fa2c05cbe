"""`nemo-ext rl engine=nemo_rl`: converts the composed config to NeMo-RL's master config, trains and exports."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.job.config import INTERRUPTED
from nemo_ext.job.files import write_text
from nemo_ext.job.made_of import flat
from nemo_ext.job.progress import notice
from nemo_ext.job.run_directory import CHECKPOINTS, METRICS, write_config, write_versions
from nemo_ext.job.settings import checked
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient
from nemo_ext.rl.lora import FUSED, check_targets
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.draft import Draft, put, section_of
from nemo_ext.rl.nemo_rl.export import FINISHED, MODEL, finished_step, has_model, leave_model, saved_in
from nemo_ext.rl.nemo_rl.gym import own_servers, plays_in_gym, put_gym
from nemo_ext.rl.nemo_rl.layout import PATHS, description_of, plan, put_layout, stated
from nemo_ext.rl.nemo_rl.render import Backend, render
from nemo_ext.rl.precision import Precision
from nemo_ext.rl.report import write_report
from nemo_ext.rl.settings import Lora, NemoRl
from nemo_ext.rl.teachers import check_vocabulary

TEACHER = "on_policy_distillation.non_colocated_teachers.default_teacher_cfg"
"""Path of the sizes of each teacher in NeMo-RL's config."""


def run(config: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Train with NeMo-RL from NEMO_RL_ROOT or PYTHONPATH, and export the model to `RUN_DIR/model`.

    If the run directory has a checkpoint, the run is resumed. If the run is finished but has no model, only the model
    is exported. If NeMo-RL ended at its time limit (`checkpointing.checkpoint_must_save_by`), the process exits as if
    interrupted.

    Raises:
        ValueError: NeMo-RL is not installed, does not have a key or cannot express the algorithm; or tasks or pairs are
            invalid; or the model has Python files and `trust_remote_code` is not set.
    """
    checkout = Checkout(os.environ.get("NEMO_RL_ROOT"))
    adapter, master = settings_of(config, algorithm, checkout)
    for name in dict.fromkeys((master["policy"]["model_name"], master["policy"]["tokenizer"]["name"])):
        may_run_code(str(name), config)  # NeMo-RL's workers do not check
    _check_teachers(config, algorithm)
    section, run_dir = section_of(algorithm), Path(config["run_dir"])
    write_config(run_dir, config)
    write_versions(run_dir, sys.argv)
    step = finished_step(run_dir, master, section)
    if step is not None and has_model(run_dir, step, master, section):
        notice(
            f"{run_dir / MODEL}: this run is finished; add steps to continue, or set another run_dir=... to start over"
        )
        return
    if step is None:
        try:
            from nemo_ext.rl.nemo_rl.run import run as train
        except ImportError as error:
            raise ValueError(
                f"engine=nemo_rl cannot be imported ({error}); install its requirements (docs/rl/nemo_rl.md)"
            ) from None
        (run_dir / FINISHED).unlink(missing_ok=True)
        if isinstance(algorithm, PolicyGradient) and plays_in_gym(algorithm):
            for path, text in own_servers(algorithm, config).items():
                write_text(path, text)
        notice(f"training with NeMo-RL by {algorithm.algorithm} in {run_dir}")
        end = train({**adapter, "nemo_rl": master}, metrics=run_dir / METRICS)
        if end.stopped:
            saved = saved_in(Path(master["checkpointing"]["checkpoint_dir"]))
            resumable = saved and saved[-1].step == end.step
            advice = (
                "the same command resumes"
                if resumable
                else "this step has no checkpoint, so the same command repeats it"
            )
            steps = master[section]["max_num_steps"]
            notice(f"stopped at step {end.step} of {steps} by checkpoint_must_save_by; {advice}")
            write_report(run_dir, algorithm)
            sys.exit(INTERRUPTED)
        step = end.step
    leave_model(run_dir, step, master, section, checkout.root, config["template"], config)
    write_report(run_dir, algorithm)


def _check_teachers(config: Mapping[str, Any], algorithm: Algorithm) -> None:
    """Raise ValueError for a teacher whose Python files may not run or whose vocabulary differs from the policy's."""
    if not isinstance(algorithm, PolicyGradient) or algorithm.distillation is None:
        return
    policy = str(config["policy"])
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(
        policy, trust_remote_code=may_run_code(policy, config)
    )
    for name, place in algorithm.distillation.places.items():
        trusted = may_run_code(place, config)
        check_vocabulary(name, Path(place).expanduser(), tokenizer, trust_remote_code=trusted)


def settings_of(
    config: Mapping[str, Any], algorithm: Algorithm, checkout: Checkout
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the adapter settings and the master config for `nemo_ext.rl.nemo_rl.run.run`.

    Raises:
        ValueError: a setting is invalid, or NeMo-RL does not have a key or cannot express the algorithm.
    """
    settings = checked(NemoRl, config["nemo_rl"], "nemo_rl")
    if isinstance(algorithm, PolicyGradient) and algorithm.steps is None:
        raise ValueError("rl.schedule.steps=null: set it to the number of training steps")
    user_values = flat(settings.set or {})
    precision = Precision.from_config(config, settings.fp8_in)
    rendered = render(algorithm, checkout, backend=settings.backend, precision=precision)
    _lay_out(config, settings, algorithm, rendered, user_values)
    if isinstance(algorithm, PolicyGradient) and plays_in_gym(algorithm):
        put_gym(rendered, algorithm, checkout, config)
    if config.get("lora") is not None:
        put_lora(rendered, checked(Lora, config["lora"], "lora"), settings.backend)
    rendered.settled(config["on_inexpressible"])
    section, run_dir = section_of(algorithm), Path(config["run_dir"])
    run_values: dict[str, Any] = {
        section: {"seed": config["seed"]},
        "policy": {"model_name": config["policy"], "tokenizer": {"name": config["policy"]}},
        "checkpointing": {"enabled": True, "checkpoint_dir": str(run_dir / CHECKPOINTS)},
        "logger": {"log_dir": str(run_dir / "logs")},
    }
    if not config["tasks" if isinstance(algorithm, PolicyGradient) else "pairs"].get("validation"):
        # The version's example and many algorithms would validate. With validation, checkpoints are saved after it.
        never = {"val_period": 0, "val_at_start": False, "val_at_end": False}
        keys = checkout.keys(section)
        run_values[section] |= {key: value for key, value in never.items() if keys.missing(f"{section}.{key}") is None}
        run_values["checkpointing"] |= {"metric_name": None, "save_period": config["save_every"]}
        if algorithm.validation.every is not None:
            notice(
                f"rl.validation.every={algorithm.validation.every} has no effect without validation data; set "
                "tasks.validation.path=FILE, or pairs.validation=FILE"
            )
    changes: dict[str, Any] = {}
    for path, value in user_values.items():
        put(changes, path, value)
    master = checkout.config(section, rendered.settings, run_values, changes)
    save_format = _save_format(master["policy"], checkout)
    master = checkout.config(section, rendered.settings, run_values, save_format, changes)
    if isinstance(algorithm, PolicyGradient) and algorithm.logits is not None:
        master["teacher"] = _teacher(algorithm, master["policy"], changes.get("teacher", {}), settings.backend)
    adapter = {key: value for key, value in rendered.adapter.items() if key != "validation"}
    adapter["template"] = config["template"]
    if isinstance(algorithm, PolicyGradient):
        adapter["tasks"] = {key: value for key, value in config["tasks"].items() if value}
    else:
        adapter["pairs"] = {key: value for key, value in config["pairs"].items() if value}
    return adapter, master


def _teacher(
    algorithm: PolicyGradient, policy: Mapping[str, Any], changes: Mapping[str, Any], backend: Backend
) -> dict[str, Any]:
    """Return NeMo-RL's section `teacher`: the policy's settings without adapters, and the user's `changes`."""
    assert algorithm.distillation is not None
    (place,) = set(algorithm.distillation.places.values())
    own: dict[str, Any] = {"model_name": place, "hf_config_overrides": {}}
    put(own, f"{LORA[backend].removeprefix('policy.')}.enabled", False)
    merged = OmegaConf.to_container(OmegaConf.merge(dict(policy), own, dict(changes)))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def on_cluster(
    config: Mapping[str, Any], nodes: int, gpus_per_node: int, gpu_memory_gib: float | None
) -> dict[str, Any]:
    """Return the config with a cluster's nodes, GPUs per node and GPU memory filled in where it does not set them."""
    section = config["nemo_rl"]
    sizes = {"cluster.num_nodes": nodes, "cluster.gpus_per_node": gpus_per_node}
    memory = section.get("gpu_memory_gib") or gpu_memory_gib
    return {**config, "nemo_rl": {**section, "set": {**sizes, **flat(section["set"] or {})}, "gpu_memory_gib": memory}}


def _lay_out(
    config: Mapping[str, Any], settings: NemoRl, algorithm: Algorithm, draft: Draft, user_values: Mapping[str, Any]
) -> None:
    """Plan which GPUs train and generate, and with which parallel sizes; write this into the draft and print it."""
    fixed = stated(settings.layout, user_values, settings.backend, settings.gpu_memory_gib)
    model = description_of(config["policy"])
    if algorithm.router.replay and model is not None:
        _check_replay(model)
    fp8 = draft.settings["policy"].get("generation", {}).get("vllm_cfg", {}).get("precision") == "fp8"
    teachers = _teacher_nodes(algorithm, user_values)
    if teachers:
        nodes = fixed.nodes or 1
        if nodes <= teachers:
            raise ValueError(
                f"nemo_rl.set.{PATHS['nodes']}={nodes} is too small: rl.distillation.teachers use {teachers} nodes, "
                f"which leaves none for training and generation; use at least {teachers + 1} nodes"
            )
        fixed = replace(fixed, nodes=nodes - teachers)
    layout = plan(
        algorithm,
        model,
        fixed,
        backend=settings.backend,
        micro_batch=config["micro_batch"],
        generation_bytes=1 if fp8 else 2,
    )
    put_layout(draft, layout, model, algorithm, settings.backend)
    notice(layout.describe())
    if teachers and layout.generation is not None:
        # A teacher is assumed to be about as large as the policy.
        sizes = {
            "gpus_per_node": layout.gpus_per_node,
            "tensor_model_parallel_size": min(layout.generation.tensor_parallel, layout.gpus_per_node),
        }
        draft.put_all("distillation", TEACHER, sizes)
        draft.put("distillation", PATHS["nodes"], layout.nodes + teachers)
        notice(f"the teachers use {teachers} more nodes of {layout.gpus_per_node} GPUs")


def _check_replay(model: Description) -> None:
    """Raise ValueError if vLLM cannot return the experts that it selects in this model, or the model has no experts."""
    selected = sorted({block.size("topk") for block in model.blocks if block.kind == "E" and not block.is_linear})
    if not selected:
        raise ValueError("rl.router.replay=true, but the model has no MoE blocks; set it to false")
    if len(selected) > 1:
        raise ValueError(
            f"rl.router.replay=true, but the model's MoE blocks select different numbers of experts per token "
            f"({', '.join(map(str, selected))}), and vLLM returns the same number for all; set it to false"
        )


LORA = {"dtensor": "policy.dtensor_cfg.lora_cfg", "megatron": "policy.megatron_cfg.peft"}
"""Sections of low-rank adapters, by backend."""
MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Default targets with Megatron: the linear layers of attention and MLPs."""


def put_lora(draft: Draft, lora: Lora, backend: Backend) -> None:
    """Set the keys for low-rank adapters; NeMo-RL merges them into the weights that generate."""
    values: dict[str, Any] = {"enabled": True, "dim": lora.rank, "alpha": lora.scale, "dropout": lora.dropout}
    if backend == "megatron":
        # The example's lora_dtype is the text None.
        values |= {"target_modules": list(lora.targets or MEGATRON_TARGETS), "lora_dtype": None}
    else:
        check_targets(lora)
        excluded = [] if lora.targets else [f"*{FUSED}*", "*lm_head*"]  # without targets, all other linear layers
        values |= {"target_modules": list(lora.targets or ()), "exclude_modules": excluded, "match_all_linear": False}
        values["use_triton"] = False  # its kernels require a tensor-parallel size of 1
        draft.put("lora", "policy.dtensor_cfg._v2", True)
    draft.put_all("lora", LORA[backend], values)


def _teacher_nodes(algorithm: Algorithm, user_values: Mapping[str, Any]) -> int:
    """Return the number of nodes that teachers take; 0 without teachers, and for one that shares the policy's GPUs."""
    if not isinstance(algorithm, PolicyGradient) or algorithm.distillation is None or algorithm.logits is not None:
        return 0
    each = int(user_values.get(f"{TEACHER}.num_nodes", 1))
    return each * len(set(algorithm.distillation.places.values()))


def _save_format(policy: Mapping[str, Any], checkout: Checkout) -> dict[str, Any]:
    """Return settings that make DTensor workers save checkpoints that can be converted; empty for Megatron."""
    dtensor = policy.get("dtensor_cfg") or {}
    if not dtensor.get("enabled"):
        return {}
    if (dtensor.get("lora_cfg") or {}).get("enabled"):
        return {"checkpointing": {"model_save_format": "safetensors", "save_consolidated": False}}
    if not dtensor.get("_v2"):
        # DTensor's first version has one format, which must not be named.
        return {"checkpointing": {"model_save_format": None}}
    if checkout.converts_dtensor_v2:
        return {"checkpointing": {"model_save_format": "torch_save"}}
    return {"checkpointing": {"model_save_format": "safetensors", "save_consolidated": True}}
