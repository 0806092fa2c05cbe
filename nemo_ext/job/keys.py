"""Kinds of a job's config keys (paths, text, open sections), according to its settings' types. Does not import torch.

A type tree is a class that reads a section (or its `module:name`, imported on demand), a mapping from keys to type
trees ("*" is a name that the user chooses), or a tuple of type trees.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from nemo_ext.job.settings import FLAT, PLACE, dataclass_fields, keys_of


def is_place(settings: Any, key: str) -> bool:
    """Return whether the value of a dotted key names a file or folder, or a list of them.

    `settings` is the tree of the config's types (see the module).
    """
    return is_marked(settings, key, PLACE)


def is_marked(settings: Any, key: str, mark: str) -> bool:
    """Return whether a dotted key's type carries a mark that `nemo_ext.job.settings` defines.

    Args:
        settings: tree of the config's types (see the module).
        mark: the mark, such as `PLACE` for files and folders.
    """
    return any(_has(kind, mark) for kind, _ in _types(settings, key.split(".")))


def may_be_new(settings: Any, key: str) -> bool:
    """Return whether a dotted key may be set even if no config file has it.

    This holds if a settings class or an open mapping in `settings`, the tree of the config's types, accepts it.
    """
    return any(known for _, known in _types(settings, key.split(".")))


def choices(settings: Any, key: str) -> tuple[str, ...]:
    """Return the `Literal` values that a dotted key's type lists; it may allow other values as well.

    `settings` is the tree of the config's types (see the module).
    """
    kinds = [kind for kind, _ in _types(settings, key.split("."))]
    words = [
        word
        for kind in kinds
        for member in (kind, *_members(kind))
        for word in get_args(member)
        if get_origin(member) is Literal
    ]
    return tuple(dict.fromkeys(map(str, words)))


def names(settings: Any, section: str) -> list[str]:
    """Return the keys of all settings classes that read a dotted section, or the whole config if `section` is "".

    `settings` is the tree of the config's types (see the module).
    """
    kinds = [kind for kind, _ in _types(settings, section.split(".") if section else [])]
    classes = [member for kind in kinds for member in (kind, *_members(kind)) if dataclasses.is_dataclass(member)]
    return [key for kind in classes for key in keys_of(cast(type[Any], kind))]


def description(settings: Any, key: str) -> str:
    """Return a dotted key's description from the docstring of its settings class; "" if there is none.

    `settings` is the tree of the config's types (see the module).
    """
    above, _, name = key.rpartition(".")
    for kind, _ in _types(settings, above.split(".") if above else []):
        for member in (kind, *_members(kind)):
            if dataclasses.is_dataclass(member) and (line := _attributes(cast(type[Any], member)).get(name)):
                return line
    return ""


def _attributes(kind: type[Any]) -> dict[str, str]:
    """Mapping from attribute to description, from the `Attributes` of a dataclass, its flat fields and its bases."""
    lines: dict[str, str] = {}
    for part in (*(part for _, part, flat in dataclass_fields(kind) if flat), *reversed(kind.__mro__[:-1])):
        if part not in kind.__mro__:
            lines |= _attributes(part)
            continue
        section = inspect.cleandoc(part.__doc__ or "").partition("Attributes:\n")[2].split("\n\n")[0]
        for entry in re.split(r"\n(?= {4}\S)", "\n" + section):
            keys, colon, line = " ".join(entry.split()).partition(": ")
            lines |= dict.fromkeys(keys.split(", "), line) if colon else {}
    return lines


def _has(kind: Any, mark: str) -> bool:
    marks = (PLACE,) if kind is Path else getattr(kind, "__metadata__", ())
    return mark in marks or any(_has(member, mark) for member in _members(kind))


def _types(kind: Any, parts: list[str], known: bool = False) -> Iterator[tuple[Any, bool]]:
    """Yield the possible types of the key `parts` below `kind`, and whether the key is known.

    Fields of settings classes and all keys of a mapping with free keys are known.

    Args:
        kind: tree of the config's types (see the module).
        parts: the key, split at its dots.
        known: whether `kind` itself is a known key.
    """
    if kind is None:
        return
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        try:
            kind = getattr(import_module(module), name)
        except (ModuleNotFoundError, ValueError):  # a package is missing, as on a login node: the job reports it
            yield Any, True
            return
        kind = tuple(kind.values()) if isinstance(kind, Mapping) else kind  # kinds by name
    if isinstance(kind, tuple):
        for member in kind:
            yield from _types(member, parts, known)
    elif not parts or kind is Any or hasattr(kind, "__value__"):
        yield kind, known
    elif isinstance(kind, Mapping):
        for name in {parts[0], "*"} & set(kind):
            yield from _types(kind[name], parts[1:])
    elif dataclasses.is_dataclass(kind):
        for _, part, flat in dataclass_fields(cast(Any, kind)):
            yield from _types(part, parts) if flat else ()
        hint = get_type_hints(kind, include_extras=True).get(parts[0])
        if hint is not None and FLAT not in getattr(hint, "__metadata__", ()):
            yield from _types(hint, parts[1:], True)
    elif get_origin(kind) in (dict, Mapping):
        yield from _types(get_args(kind)[1], parts[1:], True)
    else:
        for member in _members(kind):
            yield from _types(member, parts, known)


def _members(kind: Any) -> tuple[Any, ...]:
    """Member types of a union, a tuple or an annotated type."""
    if get_origin(kind) in (Union, UnionType, tuple):
        return get_args(kind)
    return (get_args(kind)[0],) if get_origin(kind) is Annotated else ()
