"""Python files of Hugging Face folders that transformers would import: which need the user's consent.

transformers imports what a folder's `auto_map` names, and what that imports. Modelling files of our exports run without
consent if every Python file of the folder is, byte for byte, one of ours.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemo_ext.checkpoint.storage import listed

KEY = "trust_remote_code"
_OWN = files("nemo_ext.checkpoint.remote_code")
_NO_CONFIG = ("tokenizer.json", "vocab.json")
"""Large files that no class is looked up in."""


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
        earlier = sorted({*found} & {each.name for each in _OWN.iterdir()})
        hint = f" (if an earlier nemo_ext exported it, copy today's {listed(earlier)} from {_OWN} over it)"
        raise ValueError(
            f"{folder}: transformers would run {listed(found)} of this folder (auto_map), which is not nemo_ext's: "
            f"read it, then set {KEY}=true{hint if earlier else ''}"
        )
    return bool(_named(folder)[0])


def foreign_code(folder: Path) -> list[str]:
    """Code that transformers would run and that is not ours: classes of other places, files of this folder."""
    named, files = _named(folder)
    if not named and not files:
        return []
    elsewhere = sorted(word for word in named if not _is_of(folder, word))
    here = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.py") if not _is_ours(file))
    return [*elsewhere, *files, *here]


def _named(folder: Path) -> tuple[set[str], list[str]]:
    """Classes named in every `auto_map` of the folder, and files that may name more elsewhere.

    A tokenizer's `auto_map` is a mapping to a list of two, either of them null, or such a list itself.
    """
    words: list[Any] = []
    redirecting = [name for name in ("adapter_config.json",) if (folder / name).is_file()]
    for file in sorted(folder.glob("*.json")):
        if file.name in _NO_CONFIG or file.name.endswith(".index.json"):
            continue
        try:
            content = json.loads(file.read_bytes())
        except ValueError:
            continue  # transformers cannot read it either
        if not isinstance(content, Mapping):
            continue
        if content.get("configuration_files"):
            redirecting.append(f"{file.name}: configuration_files")
        found = content.get("auto_map")
        for value in found.values() if isinstance(found, Mapping) else [found]:
            words += value if isinstance(value, list) else [value]
    return {str(word) for word in words if word}, redirecting


def _is_of(folder: Path, word: str) -> bool:
    """True if a name means a class of a file that lies in the folder itself, which is compared with ours."""
    module, _, name = word.partition(".")
    return module.isidentifier() and name.isidentifier() and (folder / f"{module}.py").is_file()


def _is_ours(file: Path) -> bool:
    own = _OWN / file.name
    return file.is_file() and own.is_file() and own.read_bytes() == file.read_bytes()
