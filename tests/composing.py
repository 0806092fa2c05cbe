"""Composing configs in a fraction of the time: hundreds of jobs merge the same packaged files."""

import functools
import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from omegaconf import OmegaConf

import hydra_conf

RECIPE_FOLDER = Path(hydra_conf.__file__).parent / "recipe"
RECIPES = sorted(str(path.relative_to(RECIPE_FOLDER).with_suffix("")) for path in RECIPE_FOLDER.glob("*/*.yaml"))
RUN_DIR = "/the/run/directory/of/a/test"

PACKAGES = {Path(str(package.__file__)).parent for package in (hydra, hydra_conf)}


def write_pipeline(folder: Path, name: str, stages: Mapping[str, Any], **keys: Any) -> None:
    """Write the file of a pipeline to a folder for `--config-dir`."""
    path = folder / "pipeline" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    config = {"pipeline": name, **keys, "stages": stages}
    path.write_text("# @package _global_\n" + yaml.safe_dump(config, sort_keys=False))


def composed_once(whole: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Cache the configs of a compose function that read packaged files alone, and return copies: composing takes 30 ms.

    A run directory and a pattern, which differ from test to test, are put into what was composed with others.
    """
    made: dict[tuple[str, ...], dict[str, Any]] = {}

    def kept(*words: str) -> dict[str, Any]:
        if words not in made:
            made[words] = whole(words[0], words[1:])
        return made[words]

    def copied(value: Any, run_dir: str) -> Any:
        if isinstance(value, dict):
            return {key: copied(each, run_dir) for key, each in value.items()}
        if isinstance(value, list):
            return [copied(each, run_dir) for each in value]
        return value.replace(RUN_DIR, run_dir) if isinstance(value, str) else value

    @functools.wraps(whole)
    def compose(config_name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
        if any(word.startswith(("--config-dir", "-cd")) for word in overrides):
            return whole(config_name, overrides)
        words, run_dir, pattern = [config_name], RUN_DIR, None
        for word in overrides:
            if found := re.fullmatch(r"run_dir=(/[\w./-]+)", word):
                word, run_dir = f"run_dir={RUN_DIR}", found[1]
            # A pattern in our notation: no null, no interpolation.
            if found := re.fullmatch(r"""model\.pattern=(["']?)([^"'\\$]*[*ME-][^"'\\$]*)\1""", word):
                pattern = found[2]
            else:
                words.append(word)
        if pattern is not None:
            with suppress(ValueError):  # errors must quote the words as given
                without = copied(kept(*words), run_dir)
                if isinstance(without.get("model"), dict) and "pattern" in without["model"]:
                    without["model"]["pattern"] = pattern
                    return without
            words = [
                config_name,
                *(f"run_dir={RUN_DIR}" if word == f"run_dir={run_dir}" else word for word in overrides),
            ]
        return copied(kept(*words), run_dir)

    return compose


def parsed_once(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """OmegaConf's loading, which parses a packaged file once: YAML in Python is half of what composing takes."""
    parsed: dict[str, bytes] = {}

    def from_memory(file: Any) -> Any:
        if not isinstance(file, io.TextIOWrapper) or PACKAGES.isdisjoint(Path(name := str(file.name)).parents):
            return load(file)
        if name not in parsed:
            parsed[name] = pickle.dumps(load(file))
        return pickle.loads(parsed[name])

    return from_memory


PLAIN = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
"""Hydra's own functions."""


def install() -> None:
    """Let Hydra merge what a job and its choices of groups name once, and apply the other overrides to a copy.

    Nothing is kept of a job with files of the user, which may change.
    """
    OmegaConf.load = staticmethod(parsed_once(OmegaConf.load))
    create, compose = PLAIN
    lists: dict[tuple[Any, ...], DefaultsList] = {}
    merged: dict[int, bytes] = {}  # by the identity of a kept list

    def create_once(
        repo: Any, config_name: str | None, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool
    ) -> DefaultsList:
        arguments = (repo, config_name, overrides_list, prepend_hydra, skip_missing)
        if any(source.scheme() == "file" for source in repo.get_sources()):
            return create(*arguments)
        values = Overrides(repo, overrides_list).config_overrides
        groups = tuple(override.input_line for override in overrides_list if override not in values)
        key = (config_name, groups, prepend_hydra, skip_missing)
        if key not in lists:
            lists[key] = create(*arguments)
            merged[id(lists[key].defaults)] = b""
        kept = lists[key]
        return DefaultsList(kept.defaults, kept.defaults_tree, values, kept.overrides)

    def compose_once(self: ConfigLoaderImpl, defaults: Sequence[Any], repo: Any) -> Any:
        if id(defaults) not in merged:
            return compose(self, defaults, repo)
        if not merged[id(defaults)]:
            merged[id(defaults)] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(merged[id(defaults)])

    # A command composes a second time only to read hydra.mode, which no config of ours sets: None means the same.
    Hydra.get_mode = lambda self, config_name, overrides: None
    config_loader_impl.create_defaults_list = create_once
    ConfigLoaderImpl._compose_config_from_defaults_list = compose_once
