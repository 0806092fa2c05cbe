"""Python files of Hugging Face folders that transformers would import: which need the user's consent.

transformers imports what a folder's `auto_map` names, and what that imports. Modelling files of our exports run without
consent if every Python file of the folder is, byte for byte, one of ours.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.beside import read_json
from nemo_ext.checkpoint.storage import listed

KEY = "trust_remote_code"
_CONFIGS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def may_run_code(name: str, config: Mapping[str, Any]) -> bool:
    """Value of `trust_remote_code` to give to transformers for a folder.

    Args:
        name: name of the folder, or of a repository that something else would download.
        config: config of the job; its `trust_remote_code` is the user's consent.

    Raises:
        ValueError: there are files of others without the user's consent; names them, and the key.
    """
    if config.get(KEY):
        return True
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"{name}: no folder on this machine, and Python files of what would be downloaded would run unseen: "
            f"download it and name the folder, or set {KEY}=true"
        )
    found = foreign_code(folder)
    if found:
        raise ValueError(
            f"{folder}: transformers would run {listed(found)} of this folder (auto_map), which is not nemo_ext's: "
            f"read it, then set {KEY}=true"
        )
    return bool(_named(folder))


def foreign_code(folder: Path) -> list[str]:
    """Code that transformers would run and that is not ours: classes of other repositories, files of this folder."""
    named = _named(folder)
    elsewhere = sorted(word for word in named if "--" in word)
    here = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.py") if not _is_ours(file))
    return elsewhere + here if named else []


def _named(folder: Path) -> set[str]:
    """Classes named in every `auto_map`: a tokenizer has a list of two, either of them null."""
    maps = [read_json(folder / name).get("auto_map") for name in _CONFIGS if (folder / name).is_file()]
    values = [value for found in maps if isinstance(found, Mapping) for value in found.values()]
    words = [word for value in values for word in (value if isinstance(value, list) else [value])]
    return {str(word) for word in words if word}


def _is_ours(file: Path) -> bool:
    own = files("nemo_ext.checkpoint.remote_code") / file.name
    return own.is_file() and own.read_bytes() == file.read_bytes()
