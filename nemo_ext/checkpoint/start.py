"""Training configs with the model of a checkpoint: the start of a run, or its teacher. Does not import torch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_ext.architecture.pattern import parse
from nemo_ext.checkpoint.beside import config_beside, extras_beside, is_hugging_face
from nemo_ext.checkpoint.description import Description, from_config, to_config
from nemo_ext.checkpoint.formats import read
from nemo_ext.checkpoint.safetensors_files import CONFIG
from nemo_ext.checkpoint.torch_dist import checkpoint_folder


def description_of(checkpoint: Path) -> Description:
    """Read the description of a checkpoint's model from the config next to it.

    Args:
        checkpoint: run directory, checkpoints directory or single checkpoint.

    Raises:
        ValueError: there is no checkpoint or no config next to it.
    """
    return from_config(_beside(checkpoint))


def model_of(folder: str, key: str) -> dict[str, Any]:
    """Read the config, with `model` and `megatron`, of a run directory, converted checkpoint or Hugging Face folder.

    Weights are not needed; `key` is the setting that names the folder, for messages.

    Raises:
        ValueError: the folder contains no model config.
    """
    source = Path(folder).expanduser()
    if not source.is_dir():
        raise ValueError(f"{key}={folder}: no such directory; correct the path")
    if is_hugging_face(source):
        try:
            _, description = read(json.loads((source / CONFIG).read_text()))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{key}: {source / CONFIG} cannot be read ({error}); copy the checkpoint again") from error
        return to_config(description)
    beside = config_beside(source, source)
    if beside is None or "model" not in beside or "megatron" not in beside:
        raise ValueError(
            f"{key}={folder} has no config of a model; expected the run's config.yaml, a "
            f"converted checkpoint's model/NAME.yaml, or {CONFIG}"
        )
    return beside


def teacher_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the training config with the model of `distillation.teacher`, frozen; None without a teacher.

    Raises:
        ValueError: the teacher's folder contains no model config.
    """
    teacher = (config.get("distillation") or {}).get("teacher")
    if teacher is None:
        return None
    description = from_config(model_of(str(teacher), "distillation.teacher"))
    merged = with_main_model(config, description, Path(str(teacher)).name)
    return {**merged, "megatron": {**merged["megatron"], "freeze_all_layers": True}, "distillation": None, "train": {}}


def checkpoints_of(path: Path) -> Path:
    """Directory that Megatron loads from: a run's checkpoints directory, or a converted checkpoint itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def with_model(config: Mapping[str, Any], description: Description, name: str) -> dict[str, Any]:
    """Return a training config with another model: architecture flags are replaced, everything else is kept.

    The config is composed, with sections `model` and `megatron`.
    """
    old, new = to_config(from_config(config)), to_config(description)
    kept = {key: value for key, value in config["megatron"].items() if key not in old["megatron"]}
    backend = config["model"].get("backend") or "auto"  # affects speed only
    model = {**new["model"], "name": name, "backend": backend}
    megatron = {**kept, **new["megatron"]}
    lengths = (section.get("max_position_embeddings") or 0 for section in (config["megatron"], new["megatron"]))
    megatron["max_position_embeddings"] = max(lengths)
    if not megatron.get("num_experts"):
        megatron = {key: value for key, value in megatron.items() if not key.startswith("expert_")}
    others = {key: value for key, value in config.items() if key not in ("puzzle", "model", "megatron")}
    return {**others, "model": model, "megatron": megatron}


def model_of_start(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections `model` and `megatron` for training the model of `megatron.pretrained_checkpoint`.

    The config's own model is used if `train.model_of_start` is not true, or if the checkpoint does not exist yet
    because the job that writes it has not finished. The depths of `train.new_mtp` are added to the model's pattern. The
    result is empty if nothing changes.

    Raises:
        ValueError: no checkpoint is named, there is no model config next to it, or `train.new_mtp` does not fit.
    """
    train, start = config.get("train") or {}, config["megatron"].get("pretrained_checkpoint")
    for name in ("model_of_start", "new_mtp"):
        if start is None and train.get(name):
            raise ValueError(
                f"train.{name}={str(train[name]).lower() if name == 'model_of_start' else train[name]} requires "
                "megatron.pretrained_checkpoint: set it to the checkpoint to start from"
            )
    changed: dict[str, Any] = {}
    path = checkpoints_of(Path(str(start)).expanduser())
    if train.get("model_of_start") is True and path.exists():
        whole = with_model_beside(config, _beside(path))
        changed = {"model": whole["model"], "megatron": {**whole["megatron"], "pretrained_checkpoint": str(path)}}
    if (depths := train.get("new_mtp")) is not None:
        model = {**config, **changed}["model"]
        changed["model"] = {**model, "pattern": _with_depths(str(model["pattern"]), str(depths))}
    return changed


def _with_depths(pattern: str, depths: str) -> str:
    """Append new depths of multi-token prediction, such as `/*E/*E`, to a pattern without any."""
    try:
        if not depths.startswith("/"):
            raise ValueError("expected depths of multi-token prediction, such as /*E or /*E/*E")
        if parse(pattern).mtp:
            raise ValueError(f"model.pattern={pattern} already has multi-token prediction: remove train.new_mtp")
        return str(parse(pattern + depths))
    except ValueError as error:
        raise ValueError(f"train.new_mtp={depths}: {error}") from error


def as_checkpoint(config: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return a copy of a config for a job that runs a checkpoint's model.

    The model is replaced by the checkpoint's. If the config has a byte tokenizer, it is replaced by the checkpoint's
    tokenizer, and data tokenised with that are written to the run directory, apart from the recipe's data.

    Raises:
        ValueError: there is no checkpoint, or no config next to it.
    """
    beside, data = _beside(checkpoint), config.get("data") or {}
    changed = {**config, **with_model_beside(config, beside)}
    extras = extras_beside(checkpoint, checkpoint_folder(checkpoint))
    tokenizer = (beside.get("data") or {}).get("tokenizer")
    if tokenizer is None and extras is not None and (extras / "tokenizer.json").is_file():
        tokenizer = {"kind": "huggingface", "path": str(extras / "tokenizer.json")}
    if data.get("tokenizer") == {"kind": "byte"} and tokenizer not in (None, {"kind": "byte"}):
        changed["data"] = {**data, "tokenizer": tokenizer, "directory": str(Path(config["run_dir"]) / "data")}
    return changed


def with_model_beside(config: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training config with its model replaced by that of `beside`, such as the config next to a checkpoint.

    Depths of multi-token prediction are kept. MTP flags are omitted unless the model has such depths or
    `train.new_mtp` adds them.
    """
    description = from_config(beside)
    changed = with_model(config, description, str(beside["model"].get("name") or config["model"]["name"]))
    if not description.prediction and (config.get("train") or {}).get("new_mtp") is None:
        changed = _without_mtp_flags(changed)
    return restore_depths(changed, beside)


def with_main_model(config: Mapping[str, Any], description: Description, name: str) -> dict[str, Any]:
    """Return a training config with another model, called `name`, but without multi-token prediction and its flags."""
    return _without_mtp_flags(with_model(config, description.without_prediction(), name))


def _without_mtp_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    flags = {key: value for key, value in config["megatron"].items() if not key.startswith("mtp_")}
    return {**config, "megatron": flags}


def restore_depths(config: dict[str, Any], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the number of prediction depths and the MTP flags of `origin`, if both have such depths.

    This is for a config made from a description, in which depths that share their weights occur only once. Whether
    they share weights is taken from `origin` alone; other MTP flags of the config, such as loss weights, are kept.
    """
    pattern = parse(str(config["model"]["pattern"]))
    depths = parse(str(origin["model"]["pattern"])).depths
    if not pattern.mtp or not depths:
        return config
    flags = {name: value for name, value in origin["megatron"].items() if name.startswith("mtp_")}
    own = {name: value for name, value in config["megatron"].items() if name != "mtp_use_repeated_layer"}
    model = {**config["model"], "pattern": str(replace(pattern, depths=depths))}
    return {**config, "model": model, "megatron": {**flags, **own}}


def _beside(checkpoint: Path) -> Mapping[str, Any]:
    """Model config next to a checkpoint; raises ValueError if there is no checkpoint, or no config next to it."""
    beside = config_beside(checkpoint, checkpoint_folder(checkpoint))
    if beside is None:
        raise ValueError(
            f"{checkpoint} has no config.yaml and no model/*.yaml next to it, so its model is unknown: restore one of "
            "them"
        )
    return beside
