"""Checks of what a user wrote in a config: every message names the key, what it holds and what it may hold."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, cast, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from nemo_ext.job.words import nearest

STRICT = ConfigDict(extra="forbid")
"""Config of pydantic dataclasses that are parts of others: a key that is not a field is an error."""
Share = Annotated[float, Field(ge=0, le=1)]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _or_none(value: object) -> object:
    return () if value is None else value


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""Texts of a config, such as paths: one or a list of them."""
StringsOrNone = Annotated[Strings, BeforeValidator(_or_none)]
"""The same, with null for none."""
PLACE = "file or folder"
"""Mark of types whose values name files or folders, which the command line takes as they are."""
Place = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, PurePath) else value), PLACE]
"""Name of a file or folder, or of what may stand in its place, such as an endpoint's URL."""
TEXT = "text"
"""Mark of types whose values are texts, in which the command line takes braces and commas as they are."""
Text = Annotated[str, TEXT]
"""Text such as a template or a regular expression."""
REPLACED = "replaced"
"""Mark of sections that a command line replaces by giving them as a whole, where Hydra would merge the two."""
WORDS = "words"
"""Mark of words of another job's command line: written as there, or as a list."""
Words = Annotated[Strings, WORDS]
"""Such words."""
FLAT = "flat"
"""Mark of fields of a dataclass whose keys stand among those of the class itself."""
Open = Mapping[str, Any]
"""Section whose keys the code that reads it knows."""
Extra = Annotated[Mapping[str, JsonValue], REPLACED]
"""Section whose keys the user chooses."""
Places = Annotated[Strings, PLACE]
"""One such name or a list of them."""
PlacesOrNone = Annotated[StringsOrNone, PLACE]
"""The same, with null for none."""
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
"""Whole number from 0 that may be written as 4e3."""
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
"""The same from 1."""


def _shard(value: str) -> str:
    number, count = part_of(value)
    if number >= count:
        raise ValueError(f"{value}: expected I/N with I below N, such as 0/4 for the first of four")
    return value


Shard = Annotated[str, Field(pattern=r"^\d+/\d+$"), AfterValidator(_shard)]
"""Part of the work of one process: 3/64 is the fourth of 64."""


def part_of(shard: str | None) -> tuple[int, int]:
    """Number of a shard, and how many there are; 0 of 1 for None."""
    number, _, count = (shard or "0/1").partition("/")
    return int(number), int(count)


def strings(value: object) -> tuple[str, ...]:
    """Texts of a config that may be one, a list of them, or null."""
    made = _or_none(_as_tuple(value))
    return tuple(map(str, made if isinstance(made, tuple) else [made]))


def checked[T](kind: type[T], section: Mapping[str, Any], where: str = "", *, strict: bool = False) -> T:
    """An instance of a dataclass, pydantic's or another, whose fields are a section of a composed config.

    The keys of a field that is marked `FLAT` stand among the others.

    Args:
        kind: the dataclass; its `__post_init__` may raise ValueError too.
        section: the fields by name.
        where: the section's place in the config, which messages begin with; empty at the top.
        strict: whether values are checked as JSON, where neither "5" nor true is a number.

    Raises:
        ValueError: a key does not fit; names it, what it holds and what it may hold.
    """
    if not isinstance(section, Mapping):
        raise ValueError(f"{where}={section!r}: expected a section with keys")
    adapter, fields, parts = _adapter(cast(Any, kind))  # a class can be hashed, which mypy does not see
    prefix = f"{where}: " if where else ""
    _check_names(section, fields, parts, prefix)  # before types: a wrong name also leaves the right one out
    nested = _nested(section, parts)
    try:
        if strict:
            return cast(T, adapter.validate_json(_json(nested, prefix), strict=True))
        return cast(T, adapter.validate_python(nested))
    except ValidationError as error:
        found = error.errors()
    first = min(found, key=lambda one: one["type"] != "unexpected_keyword_argument")
    place = _place(section, first["loc"], with_last=first["type"] in _MISSING)
    key = ".".join(map(str, place))
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        if key and str(first["loc"][-1]) not in said:  # most messages of a part name it
            said = f"{key}: {said}"
        raise ValueError(said if where and said.startswith(where) else prefix + said)
    if first["type"] == "unexpected_keyword_argument":
        known = _keys_at(cast(Any, kind), first["loc"][:-1])
        raise ValueError(f"{prefix}unknown key {key!r}: {nearest(str(first['loc'][-1]), known)}")
    if first["type"] == "json_invalid":
        raise ValueError(
            f"{prefix}a text that is not Unicode, such as a file's name, or nested too deep: {first['msg']}"
        )
    if first["type"] in _MISSING:
        raise ValueError(f"{prefix}the key {key!r} is missing")
    # Each member of a union says why the value is not it; the one that looked further in says most.
    places = [(_place(section, one["loc"]), one) for one in found]
    within = [(other, one) for other, one in places if other[: len(place)] == place]
    place, first = max(within, key=lambda pair: len(pair[0]))
    key = ".".join(map(str, place))
    why = ", or ".join(dict.fromkeys(one["msg"] for other, one in within if other == place))
    why = re.sub(r"a valid (tuple|array)\b", "a list", why.replace(", or Input should be ", ", or "))
    raise ValueError(f"{prefix}{key}={first['input']!r}: {why[:1].lower()}{why[1:]}")


_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")


def _place(section: object, loc: Sequence[str | int], *, with_last: bool = False) -> tuple[str | int, ...]:
    """Where in a section an error of pydantic's is, without the names it gives to members of unions."""
    place: list[str | int] = []
    for number, step in enumerate(loc, start=1):
        in_list = isinstance(step, int) and isinstance(section, Sequence) and step < len(section)
        if in_list or (isinstance(section, Mapping) and step in section):
            section = cast(Any, section)[step]
        elif not (with_last and number == len(loc)):
            continue
        place.append(step)
    return tuple(place)


def _json(section: Mapping[str, Any], prefix: str) -> str:
    try:
        return json.dumps(section, default=_plain)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{prefix}{error}") from None
    except RecursionError:
        raise ValueError(f"{prefix}nested too deep") from None


def _plain(value: object) -> object:
    """What JSON has for OmegaConf's containers, which a section of a config may hold, and for paths."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return list(value)
    if isinstance(value, PurePath):
        return str(value)
    raise ValueError(f"{value!r} is no value of a config")


type _Parts = Mapping[str, tuple[bool, list[str], _Parts]]
"""Fields that are dataclasses: flat or not, keys, and their own such fields."""


@functools.cache
def _adapter(kind: type[Any]) -> tuple[TypeAdapter[Any], list[str], _Parts]:
    """Validator of a dataclass, its keys and its fields that are dataclasses; takes a millisecond to make."""
    adapter = TypeAdapter(kind)
    parts = {}
    for name, part, flat in dataclass_fields(kind):
        _, names, inner = _adapter(cast(Any, part))
        parts[name] = (flat, names, inner)
    keys = [
        key
        for name in _fields(adapter.json_schema(), ())
        for key in (parts[name][1] if name in parts and parts[name][0] else [name])
    ]
    return adapter, keys, parts


def keys_of(kind: type[Any]) -> list[str]:
    """Keys of the section that a dataclass reads."""
    return _adapter(cast(Any, kind))[1]


def dataclass_fields(kind: type[Any]) -> Iterator[tuple[str, type[Any], bool]]:
    """Fields of a dataclass that are dataclasses: name, type, and whether it is marked `FLAT`."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        part = get_args(hint)[0] if marks else hint
        if dataclasses.is_dataclass(part):
            yield name, cast(type[Any], part), FLAT in marks


def _check_names(section: Mapping[str, Any], keys: Sequence[str], parts: _Parts, prefix: str, above: str = "") -> None:
    for key in section:
        if key not in keys:
            raise ValueError(f"{prefix}unknown key '{above}{key}': {nearest(str(key), keys)}")
        flat, names, inner = parts.get(key, (True, [], {}))
        if not flat and isinstance(section[key], Mapping):
            _check_names(section[key], names, inner, prefix, f"{above}{key}.")


def _keys_at(kind: type[Any], place: Sequence[str | int]) -> list[str]:
    """Keys of the section at a place of a dataclass's."""
    adapter, keys, parts = _adapter(cast(Any, kind))
    for step in map(str, place):
        if step not in parts:
            return _fields(adapter.json_schema(), place)
        _, keys, parts = parts[step]
    return keys


def _nested(section: Mapping[str, Any], parts: _Parts) -> dict[str, Any]:
    """A section with the keys of flat fields below the names of these."""
    nested = dict(section)
    for name, (flat, keys, inner) in parts.items():
        if flat:
            nested[name] = _nested({key: nested.pop(key) for key in keys if key in nested}, inner)
        elif isinstance(nested.get(name), Mapping):
            nested[name] = _nested(nested[name], inner)
    return nested


def _fields(schema: Mapping[str, Any], place: Sequence[str | int]) -> list[str]:
    """Names of the fields at a place of a JSON schema, as far as the schema says which part that is."""
    definitions = schema.get("$defs", {})

    def resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
        parts = [part, *part.get("anyOf", ()), *part.get("allOf", ())]
        refs = [each["$ref"].rpartition("/")[2] for each in parts if "$ref" in each]
        return definitions[refs[0]] if refs else part

    part = resolved(schema)
    for step in place:
        part = resolved(
            part.get("properties", {}).get(step) or part.get("additionalProperties") or part.get("items", {})
        )
    return list(part.get("properties", ()))


def check_keys(config: Mapping[str, object], known: Sequence[str], *, required: Sequence[str], where: str) -> None:
    """Raises ValueError for a key that is not known, with the nearest one, or a required one that is not there."""
    for key in config:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}: {nearest(str(key), known)}")
    for key in required:
        if key not in config:
            raise ValueError(f"{where}: the key {key!r} is missing")


def checked_whole(name: str, value: object, *, least: int | None = None) -> int:
    """The value, if it is a whole number of at least `least`; else ValueError."""
    # False and True are ints, but nobody means 0 and 1 by them.
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return value
    raise ValueError(f"{name} must be a whole number{'' if least is None else f' of at least {least}'}, not {value!r}")


def checked_share(name: str, value: object, *, below_one: bool = False) -> float:
    """The value, if it is a number from 0 to 1; else ValueError."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= cast(float, value) <= 1 and not (below_one and value == 1):
        return float(cast(float, value))
    raise ValueError(f"{name} must be a share from 0 to {'below ' if below_one else ''}1, not {value!r}")
