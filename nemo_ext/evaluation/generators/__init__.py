"""Generators of rows for benchmarks without data files; the benchmark's YAML turns rows into prompts and references.

Each generator is a function `(count, *, seed, **settings) -> Iterator[dict]`. A row depends only on the seed, the
settings and its number, so a larger count adds rows to those of a smaller one. Every row has `id` and `domain`.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_ext.job.settings import check_keys, checked_whole, nearest

_HERE, _TASKS = "nemo_ext.evaluation.generators", "nemo_ext.rl.tasks"
GENERATORS: Mapping[str, str] = {
    "needles": f"{_TASKS}.long_context:needles",
    "variables": f"{_TASKS}.long_context:variables",
    "common_words": f"{_TASKS}.long_context:common_words",
    "documents": f"{_TASKS}.long_context:documents",
    "deliveries": f"{_TASKS}.long_context:deliveries",
    "choices": f"{_HERE}.choices:choices",
    "python_sources": f"{_HERE}.sources:python_sources",
}


def rows(name: str, count: int, *, seed: int, **settings: Any) -> Iterator[dict[str, Any]]:
    """Generate `count` rows with the generator of this name; `settings` are its further arguments.

    Raises:
        ValueError: the generator or a setting is unknown, or a setting is out of range.
    """
    if name not in GENERATORS:
        raise ValueError(f"generator: unknown name {name!r}: {nearest(name, GENERATORS)}")
    checked_whole("count", count, least=0)
    module, _, function = GENERATORS[name].partition(":")
    make = getattr(importlib.import_module(module), function)
    known = [key for key in inspect.signature(make).parameters if key not in ("count", "seed")]
    check_keys(settings, known, required=(), where=f"generator {name}: settings")
    generated: Iterator[dict[str, Any]] = make(count, seed=seed, **settings)
    return generated
