"""Training configs for a compression's parent, stages and healing runs. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.description import Description
from nemo_ext.checkpoint.start import checkpoints_of, restore_depths, with_main_model, with_model
from nemo_ext.job.config import iterations
from nemo_ext.puzzle.settings import Heal

ONE_RANK = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "micro_batch_size": 1,
    "pretrained_checkpoint": None,
}
"""Megatron flags of a stage, where every rank runs the whole model."""


def parent_run(config: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Return the config of the run that trains the parent in the directory `run_dir`."""
    return {**{key: value for key, value in config.items() if key != "puzzle"}, "run_dir": str(run_dir)}


def stage_config(config: Mapping[str, Any], description: Description, ranks: int) -> dict[str, Any]:
    """Return the config from which a stage builds a model, without a precision plan and multi-token prediction.

    Each of the `ranks` holds the whole model.
    """
    stage = {**with_main_model(config, description, "stage"), "precision_plan": None}
    stage["megatron"] = {**stage["megatron"], **ONE_RANK, "global_batch_size": ranks}
    return stage


def healing_run(
    config: Mapping[str, Any],
    description: Description,
    heal: Heal,
    *,
    run_dir: Path,
    start: Path,
    tokens: float,
    distillation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the config of a child's training run.

    Args:
        config: the compression's config.
        description: the child's description.
        heal: settings of the run.
        run_dir: directory of the run.
        tokens: number of tokens to train on.
        start: run or checkpoint whose weights the run starts from.
        distillation: changes to the config's `distillation` section; None for ordinary training.
    """
    name = f"{config['model']['name']}_{run_dir.parent.name}"
    run = restore_depths(with_model(config, description, name), config)
    if not description.prediction:
        run = with_main_model(run, description, name)
    megatron = run["megatron"]
    sizes = int(megatron["seq_length"]), int(megatron["global_batch_size"])
    run["run_dir"] = str(run_dir)
    run["distillation"] = {**run["distillation"], "teacher": None, **(distillation or {})}
    run["train"] = {"tokens": tokens, "warmup_tokens": heal.warmup_tokens, "validate_at_start": False}
    run["megatron"] = {
        **megatron,
        "train_iters": iterations(tokens, *sizes),
        "lr_warmup_iters": iterations(heal.warmup_tokens, *sizes),
        "lr": heal.lr,
        "min_lr": heal.lr / 10,
        "lr_decay_style": "cosine",
        "lr_decay_iters": None,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_style": None,
        "exit_interval": None,
        "pretrained_checkpoint": str(checkpoints_of(start)),
        **heal.megatron,
    }
    return run


def logits_saving_run(run: Mapping[str, Any], folder: Path, top_k: int) -> dict[str, Any]:
    """Return the config of a run that only saves the parent's most probable tokens (see docs/distillation.md).

    Args:
        run: config from `healing_run`, with the parent's model.
        top_k: number of tokens saved per position.
    """
    flags = {
        "logits_save_dir": str(folder),
        "logits_save_top_k": top_k,
        "freeze_all_layers": True,
        "async_save": True,
        "use_persistent_ckpt_worker": True,
        "async_strategy": "mcore",
        "no_save_optim": True,
        "eval_iters": 0,
    }
    return {**run, "megatron": {**run["megatron"], **flags}}
