"""The model to serve, which is a Hugging Face directory or a Megatron run that is exported first."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.architecture.pattern import parse
from nemo_ext.checkpoint.beside import config_beside, extras_beside, is_hugging_face, read_json
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.checkpoint.safetensors_files import CONFIG
from nemo_ext.checkpoint.storage import CheckpointError
from nemo_ext.data.text import byte_tokenizer
from nemo_ext.data.training import data_sections
from nemo_ext.job.files import A_DAY, only_run_in
from nemo_ext.job.made_of import digest
from nemo_ext.job.progress import notice
from nemo_ext.serving.settings import ServingSettings
from nemo_ext.serving.vllm import check_drafts

_EXPORT = "export"
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Tokenizer files; a directory with a tokenizer has at least one of them."""


def checked_settings(config: Mapping[str, Any]) -> tuple[ServingSettings, int]:
    """Check a config for a served model; return its section `serving` and its port.

    Raises:
        ValueError: a setting is invalid, or the model cannot be served with it.
    """
    if config["served"] is None:
        raise ValueError("model is not set: set it to an export of `nemo-ext convert` or a run directory")
    settings, port = ServingSettings.from_config(config), config["port"]
    settings.key()
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536:
        raise ValueError(f"port={port}: expected a number from 0 (for a free port) to 65535")
    check(str(config["served"]), settings, config)
    return settings, port


def check(model: str, settings: ServingSettings, config: Mapping[str, Any]) -> None:
    """Check a model's config and tokenizer files before a server starts.

    Raises:
        ValueError: the directory's code requires consent, its format requires a different engine, it has no
            tokenizer, or vLLM cannot draft tokens with it.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return  # it may be created before the job starts; otherwise `folder_of` reports it
    if not is_hugging_face(folder):
        if settings.draft is not None and (beside := _config_of(folder)) is not None:
            check_drafts(beside, model)
        files = config["files_from"]
        if files is None and _tokenizer_of_run(folder) is not None:
            return
        if files is None or not any((Path(files).expanduser() / name).exists() for name in _TOKENIZER):
            raise ValueError(
                f"model={model} is a Megatron checkpoint without a tokenizer; set files_from to a folder with one"
            )
        return
    quantised = read_json(folder / CONFIG).get("quantization_config") or {}
    by_modelopt = quantised.get("quant_method") == "modelopt" or (folder / "hf_quant_config.json").exists()
    if by_modelopt and settings.engine == "transformers":
        raise ValueError(
            f"model={model} is quantised by ModelOpt, which transformers does not read; set serving.engine=vllm"
        )
    may_run_code(str(folder), config)
    if settings.draft is not None:
        check_drafts(read_json(folder / CONFIG), model, folder)
    if not any((folder / name).exists() for name in _TOKENIZER):
        raise ValueError(f"model={model} has no tokenizer; add one with `nemo-ext convert files_from=FOLDER`")


def folder_of(model: str, run_dir: Path, files_from: str | None, *, draft: str | None = None) -> Path:
    """Return a model's Hugging Face directory; a Megatron checkpoint is exported once, to the run directory.

    Args:
        model: Hugging Face directory or Megatron run directory.
        run_dir: run directory of the job that serves the model.
        files_from: directory with tokenizer, chat template and generation config for the export; None for the run's.
        draft: mtp to export multi-token prediction too, as the engine drafts tokens with it.

    Raises:
        ValueError: the model does not exist, or cannot be exported.
    """
    source = Path(model).expanduser()
    if not source.is_dir():
        raise ValueError(
            f"model={model}: no such directory; set it to an export of `nemo-ext convert`, or a run directory"
        )
    if draft is None and _has_prediction(source):
        advice = "; with vLLM, serving.draft=mtp drafts tokens with it" if _can_draft(source, model) else ""
        notice(f"model={model}: its multi-token prediction is not used{advice}")
    if is_hugging_face(source):
        return source
    from nemo_ext.checkpoint import hf
    from nemo_ext.checkpoint.torch_dist import checkpoint_folder

    files = _files_of_run(source, run_dir) if files_from is None else Path(files_from).expanduser()
    settings = hf.Settings(files_from=files, mtp="drop" if draft is None else "keep")
    name = checkpoint_folder(source, None).name + ("" if draft is None else f"_{draft}")
    with only_run_in(run_dir / _EXPORT, wait=A_DAY):  # replicas on other nodes export it too
        plan = hf.plan(source, run_dir / _EXPORT / name, settings)
        if not hf.is_made(plan, settings):
            notice(f"exporting {source} to {plan.to}")
            hf.convert(plan, settings)
    return plan.to


def _tokenizer_of_run(run: Path) -> Mapping[str, Any] | None:
    """Return a run's tokenizer as a config section with `kind` and `path`; None if it is unknown.

    It is read from the files next to the run's checkpoint, or else from the run's data settings.
    """
    from nemo_ext.checkpoint.torch_dist import checkpoint_folder

    checkpoint = checkpoint_folder(run, None)
    beside = extras_beside(run, checkpoint)
    if beside is not None and any((beside / name).exists() for name in _TOKENIZER):
        return {"kind": "huggingface", "path": str(beside)}
    config = _config_of(run) or {}
    return next((found for data in data_sections(config) if (found := data.get("tokenizer"))), None)


def _has_prediction(folder: Path) -> bool:
    """True if the config of a Hugging Face directory or Megatron run has multi-token prediction."""
    if is_hugging_face(folder):
        return bool(read_json(folder / CONFIG).get("num_nextn_predict_layers"))
    config = _config_of(folder)
    return config is not None and bool(parse(str(config["model"]["pattern"])).mtp)


def _can_draft(folder: Path, model: str) -> bool:
    """True if vLLM can draft tokens with a Hugging Face directory or Megatron run, as `check_drafts` says."""
    try:
        if is_hugging_face(folder):
            check_drafts(read_json(folder / CONFIG), model, folder)
        else:
            check_drafts(_config_of(folder) or {}, model)
    except ValueError:
        return False
    return True


def _config_of(run: Path) -> dict[str, Any] | None:
    """Return the config next to a run's newest checkpoint; None if there is none, or no complete checkpoint yet."""
    from nemo_ext.checkpoint.torch_dist import checkpoint_folder

    try:
        checkpoint = checkpoint_folder(run, None)
    except CheckpointError:  # the checkpoint may be written before the job starts
        return None
    return config_beside(run, checkpoint)


def _files_of_run(run: Path, run_dir: Path) -> Path | None:
    """Return a directory with a run's tokenizer; None if it is unknown. A byte tokenizer is written to `run_dir`."""
    tokenizer = _tokenizer_of_run(run)
    if tokenizer is None:
        return None
    if tokenizer["kind"] == "byte":
        return byte_tokenizer.write(run_dir / "tokenizer")
    path = Path(str(tokenizer["path"])).expanduser()
    return path if path.is_dir() else path.parent


def checkpoint_digest(folder: Path) -> str:
    """Return a digest (32 hex digits) of a directory's config.json and of its other files' names, sizes and times."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files if path.name != CONFIG]
    return digest([json.loads((folder / CONFIG).read_bytes()), stats])[:32]
