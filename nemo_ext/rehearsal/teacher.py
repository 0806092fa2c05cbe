"""The teacher in a rehearsed distillation: its model, without weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.beside import config_beside, is_hugging_face
from nemo_ext.checkpoint.description import to_config
from nemo_ext.checkpoint.formats import read
from nemo_ext.checkpoint.safetensors_files import CONFIG


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


def with_teacher(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training config of a rehearsed run's teacher.

    Raises:
        ValueError: the model cannot be the teacher of this run, or does not fit its layout.
    """
    from nemo_ext.megatron.arguments import quiet_imports
    from nemo_ext.megatron.check import check_layout

    with quiet_imports():
        from nemo_ext.megatron.distillation import one_stage_a_rank, with_model_of

        one_stage_a_rank(config)
        teacher = config["distillation"]["teacher"]
        merged = with_model_of(config, model_of(str(teacher), "distillation.teacher"))
    try:
        check_layout(merged, trained=False)
    except ValueError as error:
        raise ValueError(f"distillation.teacher={teacher} does not fit the layout of this run: {error}") from error
    return merged
