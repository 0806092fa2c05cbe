"""The `nemo-ext train` command: trains a model; also defines what all commands with a training config share."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.data.commands import DATA
from nemo_ext.job.figures import Figures
from nemo_ext.job.job import Config, Grammar, Input, Job, Model, inputs, reads
from nemo_ext.job.settings import Open, Place, Places

MEGATRON = {
    **dict.fromkeys(("pretrained_checkpoint", "data_cache_path", "data_args_path", "per_split_data_args_path"), Place),
    **dict.fromkeys(("per_dataset_sequences_path", "object_storage_cache_path", "metadata_path"), Place),
    **dict.fromkeys(("tokenizer_model", "vocab_file", "merge_file", "chat_template"), Place),
    **dict.fromkeys(("logits_save_dir", "logits_load_dir", "wandb_save_dir", "rl_profile_dir"), Place),
    **dict.fromkeys(("config_logger_dir", "memory_snapshot_path", "moe_routing_trace_path"), Place),
    **dict.fromkeys(("flight_recorder_dump_path", "te_precision_config_file", "tp_comm_overlap_cfg"), Place),
    **dict.fromkeys(("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir"), Place),
    **dict.fromkeys(("titles_data_path", "evidence_data_path", "block_data_path", "embedding_path"), Place),
    **dict.fromkeys(("nccl_communicator_config_path", "heterogeneous_layers_config_path"), Place),
    **dict.fromkeys(("data_path", "train_data_path", "valid_data_path", "test_data_path"), Places),
}
"""Types of the Megatron flags that name files or folders."""
TRAINING: Mapping[str, Any] = {
    "run_dir": Place,
    "data_root": Place,
    "data": DATA,
    "model": "nemo_ext.megatron.settings:ModelSettings",
    "train": "nemo_ext.megatron.settings:TrainSettings",
    "launcher": "nemo_ext.megatron.settings:LauncherSettings",
    "megatron": (MEGATRON, Open),
    "precision_plan": Open,
    "phases": {"*": {"data": DATA, "megatron": MEGATRON}},
    "distillation": {"teacher": Place},
    "evaluate": ({"judge": "nemo_ext.rl.judge:JudgeSettings"}, "nemo_ext.evaluation.live:LiveSettings"),
    "cluster": "nemo_ext.slurm.cluster:Cluster",
}
"""Types of the keys in a training config."""


def size(config: Config, settings: Any) -> tuple[int, int]:
    """Return the number of nodes, and of GPUs per node, that a training config sets; `settings` is not used."""
    return int(config["launcher"]["nodes"]), int(config["launcher"]["nproc_per_node"])


def _inputs(config: Config) -> list[Input]:
    start, teacher = "megatron.pretrained_checkpoint", "distillation.teacher"
    return inputs(
        (start, config["megatron"].get("pretrained_checkpoint"), "train or convert the stage before it"),
        (teacher, (config.get("distillation") or {}).get("teacher"), "train or convert it first"),
        model=(start, teacher),
    )


def _saved_step(run_dir: Path) -> int:
    from nemo_ext.job.run_directory import last_checkpoint

    return last_checkpoint(run_dir) or 0


def _figures(run_dir: Path) -> Figures:
    from nemo_ext.job.run_directory import METRICS, newest, target_of

    step, validation = newest(run_dir / METRICS)
    if step is None:
        return Figures()
    text = f"loss {step['loss']:.3f}" + (f", validation {validation['val_loss']:.3f}" if validation else "")
    if depths := [f"{step[key]:.3f}" for key in sorted(step) if re.fullmatch(r"mtp_\d+_loss", key)]:
        text += f", MTP {', '.join(depths)}"
    return Figures(text=text, tokens=step.get("tokens"), step=int(step["step"]), target=target_of(run_dir))


TRAIN = Job(
    name="train",
    group="train",
    help="train a model with Megatron's own trainer (resumes automatically)",
    run="nemo_ext.evaluation.live:train",
    engines=("torch", "megatron-core"),
    check=reads("nemo_ext.evaluation.live:check"),
    findings="nemo_ext.megatron.preflight:findings",
    inputs=_inputs,
    model=Model(key="megatron.pretrained_checkpoint", takes="checkpoints", leaves="run", trained=True),
    script="train",
    size=size,
    size_keys=("launcher.nodes", "launcher.nproc_per_node"),
    own_folder=True,
    training=True,
    ranks="slurm",
    rehearsed=True,
    saved_step=_saved_step,
    figures=_figures,
    grammar=Grammar(
        settings=TRAINING,
        streams=True,
        advice={
            "data.streams": "this recipe's data are a tree or packs: replace them with streams=[...]",
            "data.blend": "this recipe's data are a list or packs: replace them with streams={...}",
        },
    ),
)
