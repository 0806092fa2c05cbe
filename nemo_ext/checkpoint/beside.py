"""Files next to a checkpoint's weights: model config, tokenizer, chat template and modelling files."""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.checkpoint.formats import Format
from nemo_ext.checkpoint.safetensors_files import CONFIG
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.job.registry import config_files

EXTRAS = "hf_files"
"""Folder in a converted Megatron checkpoint that holds the tokenizer, chat template and other Hugging Face files."""
EXTRA_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*")
PARITY = "parity.json"
"""Name of the file in a converted folder that records the logit comparison between transformers and Megatron."""
NOT_EXTRA = (PARITY, "model.safetensors.index.json", "conversion.json", "pytorch_model.bin.index.json")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_hugging_face(path: Path) -> bool:
    """True if a folder is a Hugging Face checkpoint rather than a run directory, which may also hold a config.json."""
    return (path / CONFIG).is_file() and not (path / "checkpoints").is_dir()


def config_beside(source: Path, folder: Path) -> dict[str, Any] | None:
    """Find the config next to a Megatron checkpoint: a run's config.yaml, or a converted checkpoint's model file.

    Args:
        source: path that the user named: run directory, checkpoints directory or checkpoint.
        folder: folder of the checkpoint itself.

    Returns:
        The config, with sections `model` and `megatron`; None if there is none.
    """
    for place in (source, folder.parent, folder.parent.parent):
        run = place / "config.yaml"
        if run.is_file():
            return _read_yaml(run)
        models = sorted((place / "model").glob("*.yaml")) if (place / "model").is_dir() else []
        if len(models) == 1:
            return _read_yaml(models[0])
    return None


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({str(error).partition(chr(10))[0]}): correct or restore it"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{file}: expected a config with the sections model and megatron, not {type(config).__name__}"
        )
    return config


def write_model_file(folder: Path, sections: Mapping[str, Any], *, name: str, comment: str) -> None:
    """Write `model/NAME.yaml`, so that `nemo-ext train --config-dir FOLDER model=NAME` trains the model.

    Args:
        folder: folder of the checkpoint, in which the file is written.
        sections: config sections `model` and `megatron`.
        name: final name of the checkpoint's folder, from which the file name is derived.
        comment: origin of the weights, written as a comment on the second line.
    """
    name = model_name(name)
    named = {**sections, "model": {**sections["model"], "name": name}}
    (folder / "model").mkdir(exist_ok=True)
    text = yaml.safe_dump(named, sort_keys=False, width=120)
    (folder / "model" / f"{name}.yaml").write_text(f"# @package _global_\n# {comment}\n{text}")


def model_name(name: str) -> str:
    """Turn a name into one that Hydra accepts and that no packaged model has, as packaged models take precedence."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    packaged = name in config_files("model")
    a_word = name[0].isalpha() and name.lower() not in ("null", "true", "false", "inf", "nan")
    return name if a_word and not packaged else f"{name}_checkpoint"


def extras_beside(source: Path, folder: Path) -> Path | None:
    """Find the folder with the tokenizer and other Hugging Face files that belong to a Megatron checkpoint.

    If the checkpoint has none, the checkpoints from which its training started are searched.

    Args:
        source: path that the user named: run directory, checkpoints directory or checkpoint.
        folder: folder of the checkpoint itself.

    Returns:
        The folder; None if there is none.
    """
    places = [source, folder.parent, folder.parent.parent]
    seen = {place.resolve() for place in places}
    while places:
        place = places.pop(0)
        if (place / EXTRAS).is_dir():
            return place / EXTRAS
        earlier = _start_of(place, seen)
        if earlier is not None:
            places = [earlier, earlier.parent]
            seen |= {earlier.resolve(), earlier.parent.resolve()}
    return None


def _start_of(run: Path, seen: Collection[Path]) -> Path | None:
    """Return the checkpoint that a run started from; None if there is none or it is in `seen` (visited before)."""
    if not (run / "config.yaml").is_file():
        return None
    start = (_read_yaml(run / "config.yaml").get("megatron") or {}).get("pretrained_checkpoint")
    if not start:
        return None
    # A relative path is relative to where the run was started, which is the run directory or one of its parents.
    candidates = [base / str(start) for base in (Path(), run.absolute(), *run.absolute().parents)]
    return next((earlier for earlier in candidates if earlier.is_dir() and earlier.resolve() not in seen), None)


def copy_extras(source: Path, folder: Path, *, code: bool) -> None:
    """Copy a Hugging Face folder's files other than weights; Python files are copied only if `code` is true."""
    for file in extra_files(source):
        if code or file.suffix != ".py":
            shutil.copyfile(file, folder / file.name)


def keep_extras(source: Path | None, folder: Path) -> None:
    """Copy a Hugging Face folder's files other than weights into a Megatron checkpoint, unless `source` is None."""
    if source is not None:
        (folder / EXTRAS).mkdir(exist_ok=True)
        copy_extras(source, folder / EXTRAS, code=True)


def extra_files(source: Path) -> list[Path]:
    """Files in a Hugging Face folder other than weights."""
    found = [file for pattern in EXTRA_FILES for file in sorted(source.glob(pattern))]
    return [file for file in found if file.name not in NOT_EXTRA]


def kept_keys(extras: Path | None, hf_format: Format) -> dict[str, Any]:
    """Return the keys, with values, to copy from the original config.json into an export's config.json.

    Args:
        extras: folder with the original config.json, if any.
        hf_format: format of the export.

    Returns:
        All keys except those that describe RoPE, layer types, quantisation and dtype. If there is no original, or it
        is for another model class, only the token ids; unknown ones are None.
    """
    none = dict.fromkeys(TOKEN_IDS)
    if extras is None or not (extras / CONFIG).is_file():
        return none
    original = read_json(extras / CONFIG)
    if original.get("architectures") != [hf_format.architecture]:
        return {key: original.get(key) for key in TOKEN_IDS}
    decided = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "quantization_config"}
    decided |= {"layers_block_type", "layer_types", "torch_dtype"}
    return none | {key: value for key, value in original.items() if key not in decided}


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        CheckpointError: the file cannot be read or does not hold a JSON object.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON ({error}): copy it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, not {type(content).__name__}")
    return content
