"""Every key of every preset is read: another value changes NeMo-RL's config, the plan of the tasks or the rounds."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import pytest
from omegaconf import OmegaConf

from nemo_ext.job.config import compose
from nemo_ext.job.made_of import flat
from nemo_ext.job.registry import config_files
from nemo_ext.online.job import _Run
from nemo_ext.rl import algorithms
from nemo_ext.rl.algorithms import Algorithm, PolicyGradient, algorithm_of, presets
from nemo_ext.rl.job import checked_algorithm, planned_tasks
from nemo_ext.rl.nemo_rl.checkout import Checkout
from nemo_ext.rl.nemo_rl.render import render as for_nemo_rl
from nemo_ext.rl.nemo_rl.run import _COMMON, _GROUP, _PAIRS

NAMES = ("source", "algorithm")  # printed; and the choice of the dataclass
FIXED = ("loss.level", "loss.clip_low", "loss.clip_high")
TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "loss.clip_low": {"loss.clip_low": 0.1, "loss.clip_high": 0.1},
    "loss.clip_high": {"loss.clip_low": 0.1, "loss.clip_high": 0.1},
    "sampling.drop_zero_variance": {"sampling": {}},
    "sampling.max_batches": {"sampling.max_batches": 2},
    "loss.importance_correction.kind": {"loss.importance_correction": {"kind": "none"}},
}
"""Changes of keys that are only valid together with others."""
REMOVED = object()


class AnyCheckout(Checkout):
    """A NeMo-RL that has every key; those of real versions are tested in tests/rl/nemo_rl/test_render.py."""

    def __init__(self) -> None: ...

    def keys(self, section: Any) -> Any:
        return SimpleNamespace(missing=lambda path: None)

    asynchronous = frozenset({"overlong_filtering"})  # type: ignore[assignment]
    refills = distils = True  # type: ignore[assignment]


def words_of(kind: Any) -> Iterator[str]:
    """All words that a dataclass's keys accept."""
    for hint in get_type_hints(kind).values():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Literal:
                yield from get_args(part)


WORDS = sorted({word for kind in vars(algorithms).values() if is_dataclass(kind) for word in words_of(kind)})


def base(preset: str) -> dict[str, Any]:
    """A preset that both engines can train: with teachers, steps, and asynchronous where NeMo-RL requires it."""
    config: Any = OmegaConf.create(config_files("rl")[preset].read_text())
    for path in ("group.judge.endpoint", "environments.judge.settings.judge.endpoint", "distillation.teachers.default"):
        if OmegaConf.select(config, path.rpartition(".")[0]) is not None:
            OmegaConf.update(config, path, "there")
    if "distillation" in config and "logits" not in config.distillation:
        config.asynchronous = {"max_age": 1, **(config.get("asynchronous") or {})}
    schedule = config.setdefault("schedule", {}) if "schedule" in config else {}
    config.schedule = {**schedule, **({"examples": 10**6} if schedule.get("epochs") else {})}
    if not config.schedule.get("epochs") and not config.schedule.get("steps"):
        config.schedule.steps = 100
    resolved = OmegaConf.to_container(config, resolve=True)
    return cast("dict[str, Any]", resolved)


def with_values(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with other values at dotted paths; `REMOVED` removes a key."""
    copy = deepcopy(dict(config))
    for path, value in changes.items():
        *above, last = path.split(".")
        section = copy
        for key in above:
            section = section[key]
        section[last] = value
        if value is REMOVED:
            del section[last]
    return copy


def changed(config: Mapping[str, Any], path: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yield configs with other values at a path; not all of them are valid."""
    if path in TOGETHER:
        yield with_values(config, TOGETHER[path])
        return
    if isinstance(value, bool):
        others: list[Any] = [not value]
    elif isinstance(value, int | float):
        others = [value // 2 if isinstance(value, int) else value / 2, value * 2, 0.5]
    elif isinstance(value, str):
        others = [f"{value}_2", *WORDS]
    else:
        others = {"": ["other"], "[]": [[0.5, 0.6]], "{}": [REMOVED]}["" if value is None else str(type(value)())]
    yield from (with_values(config, {path: other}) for other in others if other != value)


@cache
def composed(job: str, *words: str) -> dict[str, Any]:
    return compose(job, words)


def read(config: Mapping[str, Any], folder: Path) -> Any:
    """What jobs read of a preset; ValueError if the preset is invalid."""
    algorithm: Algorithm = algorithm_of(config)
    nemo_rl = for_nemo_rl(algorithm, AnyCheckout())
    adapter = {key: value for key, value in nemo_rl.adapter.items() if key in (*_COMMON, *_GROUP, *_PAIRS)}
    result: list[Any] = [nemo_rl.settings, nemo_rl.inexpressible, adapter]
    if isinstance(algorithm, PolicyGradient):
        job = composed("rl", "model=m", f"tasks.train.curriculum={folder}") | {"rl": dict(config)}
        try:
            checked_algorithm(job)
        except ValueError as error:  # the curriculum does not match
            result.append(str(error))
        result.append(planned_tasks({"tasks": {"train": {"directory": "d"}}, "seed": 1}, algorithm))
    elif algorithm.online is not None:
        run = _Run(composed("online", "model=m", "on_inexpressible=warn") | {"rl": dict(config)})
        result.append((run.rounds, run.generation.samples))
    return result


@pytest.mark.parametrize("preset", presets())
def test_every_key_of_a_preset_is_read(preset: str, tmp_path: Path) -> None:
    config = base(preset)
    dropped = (config.get("curriculum") or {}).get("drop_from")
    made = {"batch": 1, "filters": {"drop_from": dropped}, "mean_first": 0.5, "mean_last": 0.5}
    (tmp_path / "curriculum.json").write_text(json.dumps({"settings": made}))

    def differs(path: str, value: Any) -> bool:
        # Level `group` allows one update per step, which ties these numbers together.
        sizes = path in ("prompts_per_step", "generations_per_prompt", "batch")
        whole = with_values(config, {"loss.level": "token"} if sizes and config["loss"].get("level") == "group" else {})
        before = read(whole, tmp_path)
        for other in changed(whole, path, value):
            with suppress(ValueError):
                if read(other, tmp_path) != before:
                    return True
        return False

    # With logits, only one loss is allowed (tests/rl/test_algorithms.py).
    fixed = NAMES + (FIXED if "logits" in (config.get("distillation") or {}) else ())
    assert not [path for path, value in flat(config).items() if path not in fixed and not differs(path, value)]
