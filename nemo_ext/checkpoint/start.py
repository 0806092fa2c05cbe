"""The model of the checkpoint that a run starts from, in place of the one that its config names. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.beside import config_beside, extras_beside
from nemo_ext.checkpoint.description import Description, from_config, to_config
from nemo_ext.checkpoint.torch_dist import checkpoint_folder


def description_of(checkpoint: Path) -> Description:
    """The model of a checkpoint, read from the config beside it.

    Raises:
        ValueError: there is no checkpoint, or no config beside it.
    """
    return from_config(_beside(checkpoint))


def checkpoints_of(path: Path) -> Path:
    """Directory that Megatron loads from: a run's checkpoints, or the converted checkpoint itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def with_model(config: Mapping[str, Any], description: Description, name: str) -> dict[str, Any]:
    """A training config with another model: data, schedule and flags stay, the architecture's are replaced.

    Args:
        config: composed config, with `model` and `megatron`.
        description: the other model.
        name: the other model's name.
    """
    own = to_config(from_config(config))
    new = to_config(description)
    kept = {key: value for key, value in config["megatron"].items() if key not in own["megatron"]}
    backend = config["model"].get("backend") or "auto"  # which affects speed alone
    model = {**new["model"], "name": name, "backend": backend}
    megatron = {**kept, **new["megatron"]}
    lengths = (section.get("max_position_embeddings") or 0 for section in (config["megatron"], new["megatron"]))
    megatron["max_position_embeddings"] = max(lengths)
    if not megatron.get("num_experts"):
        megatron = {key: value for key, value in megatron.items() if not key.startswith("expert_")}
    others = {key: value for key, value in config.items() if key not in ("puzzle", "model", "megatron")}
    return {**others, "model": model, "megatron": megatron}


def model_of_start(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sections `model` and `megatron` with the model of `megatron.pretrained_checkpoint`.

    Empty if `train.model_of_start` does not ask for it, and while the checkpoint is not there: the config's own model
    stands for it, as in checks before a search has ended.

    Raises:
        ValueError: it names no checkpoint to start from, or one that does not say what model it is of.
    """
    if (config.get("train") or {}).get("model_of_start") is not True:
        return {}
    start = config["megatron"].get("pretrained_checkpoint")
    if start is None:
        raise ValueError("train.model_of_start=true: name the checkpoint in megatron.pretrained_checkpoint")
    path = checkpoints_of(Path(str(start)).expanduser())
    if not path.exists():
        return {}
    made = _with_model_beside(config, _beside(path))
    return {"model": made["model"], "megatron": {**made["megatron"], "pretrained_checkpoint": str(path)}}


def as_checkpoint(config: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """A config of a job on a checkpoint with its model, and with its tokenizer where the config's data are bytes.

    Tokens of another tokenizer are kept in the run directory, beside none of the recipe's.

    Raises:
        ValueError: there is no checkpoint, or no config beside it.
    """
    beside, data = _beside(checkpoint), config.get("data") or {}
    made = {**config, **_with_model_beside(config, beside)}
    extras = extras_beside(checkpoint, checkpoint_folder(checkpoint))
    own = (beside.get("data") or {}).get("tokenizer")
    if own is None and extras is not None and (extras / "tokenizer.json").is_file():
        own = {"kind": "huggingface", "path": str(extras / "tokenizer.json")}
    if data.get("tokenizer") == {"kind": "byte"} and own not in (None, {"kind": "byte"}):
        made["data"] = {**data, "tokenizer": own, "directory": str(Path(config["run_dir"]) / "data")}
    return made


def _with_model_beside(config: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    return with_model(config, from_config(beside), str(beside["model"].get("name") or config["model"]["name"]))


def _beside(checkpoint: Path) -> Mapping[str, Any]:
    """The model's config beside a checkpoint.

    Raises:
        ValueError: there is no checkpoint, or no config beside it.
    """
    beside = config_beside(checkpoint, checkpoint_folder(checkpoint))
    if beside is None:
        raise ValueError(f"{checkpoint}: no config.yaml and no model/*.yaml beside it, so its model is not known")
    return beside
