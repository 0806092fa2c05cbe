"""Keys of jobs whose values name files or folders, from the types of the settings that read them. No torch."""

import dataclasses
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from nemo_ext.job.settings import PLACE


def is_place(settings: Any, key: str) -> bool:
    """Whether the value of a key names a file or folder, or a list of them.

    Args:
        settings: types by key: a mapping, the class that reads them (`module:name`, imported when a key leads there),
            or a tuple of several. "*" is a name that the user chooses. Mappings stand where no class reads a section.
        key: dotted key.
    """
    return _leads({} if settings is None else settings, key.split("."))


def _leads(kind: Any, parts: list[str]) -> bool:
    """Whether a key, part by part, leads from a type to one that is marked as a place."""
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        kind = getattr(import_module(module), name)
        kind = tuple(kind.values()) if isinstance(kind, Mapping) else kind  # kinds by name
    if isinstance(kind, tuple):
        return any(_leads(each, parts) for each in kind)
    if not parts:
        return kind is Path or PLACE in getattr(kind, "__metadata__", ()) or any(_leads(each, []) for each in _of(kind))
    if isinstance(kind, Mapping):
        return any(_leads(kind[name], parts[1:]) for name in (parts[0], "*") if name in kind)
    if dataclasses.is_dataclass(kind):
        names = {each.name for each in dataclasses.fields(kind)}
        return parts[0] in names and _leads(get_type_hints(kind, include_extras=True)[parts[0]], parts[1:])
    if get_origin(kind) in (dict, Mapping):
        return _leads(get_args(kind)[1], parts[1:])
    return any(_leads(each, parts) for each in _of(kind))


def _of(kind: Any) -> tuple[Any, ...]:
    """Types that a union, a tuple or an annotated type is of."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return get_args(kind)
    return (get_args(kind)[0],) if get_origin(kind) is Annotated else ()
