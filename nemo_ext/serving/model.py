"""The model that is served: a Hugging Face folder, or a run of Megatron that is exported first."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.beside import config_beside, extras_beside, is_hugging_face, read_json
from nemo_ext.checkpoint.foreign_code import may_run_code
from nemo_ext.checkpoint.safetensors_files import CONFIG
from nemo_ext.data.text import byte_tokenizer
from nemo_ext.data.training import data_sections
from nemo_ext.job.files import only_run_in
from nemo_ext.job.made_of import digest
from nemo_ext.job.progress import notice
from nemo_ext.serving.settings import ServingSettings

_EXPORT = "export"
_A_DAY = 86400.0
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
"""Files of which a folder with a tokenizer has one."""


def checked_settings(config: Mapping[str, Any]) -> tuple[ServingSettings, int]:
    """The config's section `serving` and its port.

    Raises:
        ValueError: a setting is wrong, or the model cannot be served so.
    """
    if config["served"] is None:
        raise ValueError("model: name a folder: an export of `nemo-ext convert`, or a run directory")
    settings, port = ServingSettings.of(config), config["port"]
    settings.key()
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 65536:
        raise ValueError(f"port={port}: expected a number from 0 (a free one) to 65535")
    check(str(config["served"]), settings, config)
    return settings, port


def check(model: str, settings: ServingSettings, config: Mapping[str, Any]) -> None:
    """Refuse what can be told from a model's small files, before a server is started.

    Raises:
        ValueError: the folder's code needs consent, its format another engine, or it has no tokenizer.
    """
    given = Path(model).expanduser()
    if not given.is_dir():
        return  # it may be made before the job starts; else see `folder_of`
    if not is_hugging_face(given):
        files = config["files_from"]
        if files is None and _tokenizer_of_run(given) is not None:
            return
        if files is None or not any((Path(files).expanduser() / name).exists() for name in _TOKENIZER):
            raise ValueError(f"model={model}: is a checkpoint of Megatron: files_from=FOLDER names its tokenizer")
        return
    quantised = read_json(given / CONFIG).get("quantization_config") or {}
    by_modelopt = quantised.get("quant_method") == "modelopt" or (given / "hf_quant_config.json").exists()
    if by_modelopt and settings.engine == "transformers":
        raise ValueError(
            f"model={model}: is quantised by ModelOpt, which transformers does not read: serving.engine=vllm"
        )
    may_run_code(str(given), config)
    if not any((given / name).exists() for name in _TOKENIZER):
        raise ValueError(f"model={model}: no tokenizer: `nemo-ext convert files_from=FOLDER` adds one")


def folder_of(model: str, run_dir: Path, files_from: str | None) -> Path:
    """The Hugging Face folder of a model; a checkpoint of Megatron is exported into the run directory, once.

    Raises:
        ValueError: there is none, or it cannot be exported.
    """
    given = Path(model).expanduser()
    if not given.is_dir():
        raise ValueError(f"model={model}: no such folder: name an export of `nemo-ext convert`, or a run directory")
    if is_hugging_face(given):
        return given
    from nemo_ext.checkpoint import hf
    from nemo_ext.checkpoint.torch_dist import checkpoint_folder

    files = _files_of_run(given, run_dir) if files_from is None else Path(files_from).expanduser()
    settings = hf.Settings(files_from=files)
    with only_run_in(run_dir / _EXPORT, wait=_A_DAY):  # replicas on other nodes want it too
        plan = hf.plan(given, run_dir / _EXPORT / checkpoint_folder(given, None).name, settings)
        if not hf.is_made(plan, settings):
            notice(f"{given}: is exported to {plan.to}")
            hf.convert(plan, settings)
    return plan.to


def _tokenizer_of_run(run: Path) -> Mapping[str, Any] | None:
    """The tokenizer of a run: what lies beside its checkpoint, or what its data were made with; None if unknown."""
    from nemo_ext.checkpoint.torch_dist import checkpoint_folder

    checkpoint = checkpoint_folder(run, None)
    beside = extras_beside(run, checkpoint)
    if beside is not None and any((beside / name).exists() for name in _TOKENIZER):
        return {"kind": "huggingface", "path": str(beside)}
    config = config_beside(run, checkpoint) or {}
    return next((found for data in data_sections(config) if (found := data.get("tokenizer"))), None)


def _files_of_run(run: Path, run_dir: Path) -> Path | None:
    """Folder with the tokenizer of a run."""
    found = _tokenizer_of_run(run)
    if found is None:
        return None
    if found["kind"] == "byte":
        return byte_tokenizer.write(run_dir / "tokenizer")
    path = Path(str(found["path"])).expanduser()
    return path if path.is_dir() else path.parent


def checkpoint_digest(folder: Path) -> str:
    """Digest of config.json and of the names, sizes and times of all other files but Python's caches."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files if path.name != CONFIG]
    return digest([json.loads((folder / CONFIG).read_bytes()), stats])[:32]
