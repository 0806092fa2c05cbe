"""User consent to third-party Python files in Hugging Face folders, which transformers would import.

transformers imports the modules that a folder's `auto_map` names, and everything they import. Our own exports
need no consent if every Python file in the folder is identical to one of our modelling files.
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
"""Large files that cannot contain an `auto_map`, skipped for speed."""


def may_run_code(name: str, config: Mapping[str, Any]) -> bool:
    """Return the value of `trust_remote_code` to pass to transformers for a folder.

    Args:
        name: path of the folder; the name of a repository to download is rejected without consent.
        config: the job's config, whose key `trust_remote_code` is the user's consent.

    Raises:
        ValueError: there is third-party code and the user has not consented; names the files and the key.
    """
    if config.get(KEY):
        return True
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"{name} is not a folder on this machine, and Python files of a download would run unreviewed: download it "
            f"and give its folder, or set {KEY}=true"
        )
    foreign = foreign_code(folder)
    if foreign:
        earlier = sorted({*foreign} & {file.name for file in _OWN.iterdir()})
        hint = f" (if an earlier nemo_ext exported it, replace it with the current {listed(earlier)} from {_OWN})"
        raise ValueError(
            f"{folder}: transformers would run code of this folder that is not part of nemo_ext ({listed(foreign)}): "
            f"review it, then set {KEY}=true{hint if earlier else ''}"
        )
    return bool(_named(folder)[0])


def foreign_code(folder: Path) -> list[str]:
    """Return the names of third-party code that transformers would run for a folder; an empty list if there is none.

    They are classes in other repositories, JSON files that may redirect to other repositories, and Python files.
    """
    named, files = _named(folder)
    if not named and not files:
        return []
    elsewhere = sorted(word for word in named if not _is_of(folder, word))
    here = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.py") if not _is_ours(file))
    return [*elsewhere, *files, *here]


def _named(folder: Path) -> tuple[set[str], list[str]]:
    """Read a folder's JSON files for references to code.

    Returns:
        Classes named by an `auto_map`, and files that may redirect transformers to other repositories.

    The values in a tokenizer's `auto_map` may be lists of two classes, either of which may be null; the `auto_map` may
    also be such a list itself.
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
    """Return whether `word`, an `auto_map` entry such as `file.Class`, names a class in a Python file in the folder."""
    module, _, name = word.partition(".")
    return module.isidentifier() and name.isidentifier() and (folder / f"{module}.py").is_file()


def _is_ours(file: Path) -> bool:
    own = _OWN / file.name
    return file.is_file() and own.is_file() and own.read_bytes() == file.read_bytes()
