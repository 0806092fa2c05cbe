"""Validation of config sections, with messages that name the key, its value and the allowed values."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from typing import Annotated, Any, cast, get_args, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from nemo_ext.job.words import nearest

STRICT = ConfigDict(extra="forbid")
"""Config for nested pydantic dataclasses that makes unknown keys an error."""
Share = Annotated[float, Field(ge=0, le=1)]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _or_none(value: object) -> object:
    return () if value is None else value


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
"""String or list of strings, such as paths."""
StringsOrNone = Annotated[Strings, BeforeValidator(_or_none)]
"""String, list of strings, or null if there are none."""
PLACE = "file or folder"
"""Marks types whose values name files or folders; they are taken literally on the command line."""
Place = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, PurePath) else value), PLACE]
"""Name of a file or folder, or an alternative such as an endpoint's URL."""
TEXT = "text"
"""Marks types whose values are text; braces and commas in them are taken literally on the command line."""
Text = Annotated[str, TEXT]
"""Text such as a template or a regular expression."""
REPLACED = "replaced"
"""Marks sections that a value on the command line replaces, whereas Hydra would merge the two."""
WORDS = "words"
"""Marks arguments for another job's command line, written as a string or as a list."""
Words = Annotated[Strings, WORDS]
"""Arguments for another job's command line."""
FLAT = "flat"
"""Marks dataclass fields whose keys belong to the enclosing section."""
Open = Mapping[str, Any]
"""Section whose keys are checked only by the code that reads it."""
Extra = Annotated[Mapping[str, JsonValue], REPLACED]
"""Section whose keys the user chooses."""
Places = Annotated[Strings, PLACE]
"""Name of a file or folder, or a list of names."""
PlacesOrNone = Annotated[StringsOrNone, PLACE]
"""Name of a file or folder, list of names, or null if there are none."""
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
"""Non-negative integer, which may be written as 4e3."""
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
"""Positive integer, which may be written as 4e3."""


def _shard(value: str) -> str:
    number, count = part_of(value)
    if number >= count:
        raise ValueError(f"{value}: expected I/N with I below N, such as 0/4 for the first of four")
    return value


Shard = Annotated[str, Field(pattern=r"^\d+/\d+$"), AfterValidator(_shard)]
"""Shard of a job, counted from 0, such as 3/64 for the fourth of 64."""


def part_of(shard: str | None) -> tuple[int, int]:
    """Split a shard such as "3/64" into its index and the total number of shards; (0, 1) for None."""
    number, _, count = (shard or "0/1").partition("/")
    return int(number), int(count)


def strings(value: object) -> tuple[str, ...]:
    """Return the strings in a config value that may be a string, a list of strings, or null."""
    values = _or_none(_as_tuple(value))
    return tuple(map(str, values if isinstance(values, tuple) else [values]))


@contextmanager
def prefixed_errors(where: str) -> Iterator[None]:
    """Begin the message of a ValueError raised in the block with `where`, the place in the config or the input."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def checked[T](kind: type[T], section: Mapping[str, Any], where: str = "", *, strict: bool = False) -> T:
    """Create an instance of a pydantic or plain dataclass from a section of a composed config.

    The keys of fields marked `FLAT` are part of the section itself.

    Args:
        kind: dataclass; its `__post_init__` may raise ValueError.
        section: mapping from key to value.
        where: dotted key of the section, with which messages begin; "" at the top level.
        strict: whether to validate as JSON, so that neither "5" nor true is a number.

    Raises:
        ValueError: a key is unknown or missing, or a value is invalid; names the key, the value and allowed values.
    """
    if not isinstance(section, Mapping):
        raise ValueError(f"{where}={section!r}: expected a section with keys")
    adapter, fields, parts = _adapter(cast(Any, kind))  # mypy does not know that classes are hashable
    prefix = f"{where}: " if where else ""
    _check_names(section, fields, parts, prefix)  # before types, as a misspelt key would also be reported as missing
    nested = _nested(section, parts)
    try:
        if strict:
            return cast(T, adapter.validate_json(_json(nested, prefix), strict=True))
        return cast(T, adapter.validate_python(nested))
    except ValidationError as error:
        details = error.errors()
    first = min(details, key=lambda detail: detail["type"] != "unexpected_keyword_argument")
    place = _place(section, first["loc"], with_last=first["type"] in _MISSING)
    key = ".".join(map(str, place))
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
        if where and message.startswith(where):
            raise ValueError(message)
        last = next((step for step in reversed(place) if isinstance(step, str)), "")
        named = not key or (last and re.search(rf"\b{re.escape(last)}\b", message))  # most messages name it
        raise ValueError(prefix + message if named else f"{_joined(where, key)}: {message}")
    if first["type"] == "unexpected_keyword_argument":
        known = _keys_at(cast(Any, kind), first["loc"][:-1])
        raise ValueError(f"{prefix}unknown key {key!r}: {nearest(str(first['loc'][-1]), known)}")
    if first["type"] == "json_invalid":
        raise ValueError(
            f"{prefix}the section contains text that is not valid Unicode, such as a file name, or is nested too "
            f"deeply: {first['msg']}"
        )
    if first["type"] in _MISSING:
        raise ValueError(f"{prefix}the key {key!r} is missing")
    # Every member of a union reports an error; the error at the deepest place is the most specific.
    places = [(_place(section, detail["loc"]), detail) for detail in details]
    within = [(other, detail) for other, detail in places if other[: len(place)] == place]
    place, first = max(within, key=lambda pair: len(pair[0]))
    key = ".".join(map(str, place))
    why = ", or ".join(dict.fromkeys(detail["msg"] for other, detail in within if other == place))
    why = re.sub(r"a valid (tuple|array)\b", "a list", why.replace(", or Input should be ", ", or "))
    raise ValueError(f"{_joined(where, key)}={first['input']!r}: {why[:1].lower()}{why[1:]}")


def _joined(where: str, key: str) -> str:
    """Return the full name of `key` in the section `where`, a dotted key or words such as `benchmark mine`."""
    return f"{where}{'.' if re.fullmatch(r'[\w.-]+', where) else ': '}{key}" if where else key


_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")


def _place(section: object, loc: Sequence[str | int], *, with_last: bool = False) -> tuple[str | int, ...]:
    """Return the keys and indices that lead to a pydantic error in a section.

    Args:
        loc: location that pydantic reports, which also contains names of union members.
        with_last: whether to keep the last part of `loc` even if the section does not have it, as for a missing key.
    """
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
        raise ValueError(f"{prefix}the section has an invalid value ({error})") from None
    except RecursionError:
        raise ValueError(f"{prefix}the section is nested too deeply; flatten it") from None


def _plain(value: object) -> object:
    """Convert OmegaConf's containers and paths to their JSON equivalents."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return list(value)
    if isinstance(value, PurePath):
        return str(value)
    raise ValueError(f"expected a string, number, boolean, list, mapping or null, not {value!r}")


type _Parts = Mapping[str, tuple[bool, list[str], _Parts]]
"""Mapping from the name of a nested dataclass field to whether it is flat, its keys, and its own nested fields."""


@functools.cache
def _adapter(kind: type[Any]) -> tuple[TypeAdapter[Any], list[str], _Parts]:
    """Validator, keys and nested fields of a dataclass; cached, as creating them takes a millisecond."""
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
    """Keys of the config section from which a dataclass is created."""
    return _adapter(cast(Any, kind))[1]


def dataclass_fields(kind: type[Any]) -> Iterator[tuple[str, type[Any], bool]]:
    """Yield a dataclass's nested dataclass fields: name, type, and whether it is marked `FLAT`."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        marks = getattr(hint, "__metadata__", ())
        part = get_args(hint)[0] if marks else hint
        if dataclasses.is_dataclass(part):
            yield name, cast(type[Any], part), FLAT in marks


def _check_names(section: Mapping[str, Any], keys: Sequence[str], parts: _Parts, prefix: str, above: str = "") -> None:
    for key in section:
        if key not in keys:
            raise ValueError(f"{prefix}unknown key '{above}{key}': {nearest(str(key), keys)}")
        flat, names, inner = _shown(parts).get(key, (True, [], {}))
        if not flat and isinstance(section[key], Mapping):
            _check_names(section[key], names, inner, prefix, f"{above}{key}.")


def _shown(parts: _Parts) -> _Parts:
    """Return a dataclass's nested fields, keyed as in the section, in which `FLAT` fields have no level."""
    flat = [_shown(inner) for is_flat, _, inner in parts.values() if is_flat]
    return {name: part for level in (parts, *flat) for name, part in level.items() if not part[0]}


def _keys_at(kind: type[Any], place: Sequence[str | int]) -> list[str]:
    """Return the allowed keys of the part of a dataclass's section that the keys and indices in `place` lead to."""
    adapter, keys, parts = _adapter(cast(Any, kind))
    for step in map(str, place):
        if step not in parts:
            return _fields(adapter.json_schema(), place)
        _, keys, parts = parts[step]
    return keys


def _nested(section: Mapping[str, Any], parts: _Parts) -> dict[str, Any]:
    """Copy a section, moving the keys of each field marked `FLAT` into a subsection, as the validation expects."""
    nested = dict(section)
    for name, (flat, keys, inner) in parts.items():
        if flat:
            nested[name] = _nested({key: nested.pop(key) for key in keys if key in nested}, inner)
        elif isinstance(nested.get(name), Mapping):
            nested[name] = _nested(nested[name], inner)
    return nested


def _fields(schema: Mapping[str, Any], place: Sequence[str | int]) -> list[str]:
    """Return the field names at the keys and indices `place` of a JSON schema; empty if it does not determine them."""
    definitions = schema.get("$defs", {})

    def resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
        parts = [part, *part.get("anyOf", ()), *part.get("allOf", ())]
        refs = [item["$ref"].rpartition("/")[2] for item in parts if "$ref" in item]
        return definitions[refs[0]] if refs else part

    part = resolved(schema)
    for step in place:
        part = resolved(
            part.get("properties", {}).get(step) or part.get("additionalProperties") or part.get("items", {})
        )
    return list(part.get("properties", ()))


def check_keys(config: Mapping[str, object], known: Sequence[str], *, required: Sequence[str], where: str) -> None:
    """Check the keys of a section; `where` names it in messages.

    Raises:
        ValueError: a key is unknown (names the nearest), or a required key is missing.
    """
    for key in config:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}: {nearest(str(key), known)}")
    for key in required:
        if key not in config:
            raise ValueError(f"{where}: the key {key!r} is missing")


def checked_whole(name: str, value: object, *, least: int | None = None) -> int:
    """Return a whole number of at least `least`; for any other value, raise a ValueError that names `name`."""
    # bool is a subclass of int, but true and false are not numbers in a config.
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return value
    raise ValueError(f"{name} must be a whole number{'' if least is None else f' of at least {least}'}, not {value!r}")


def checked_share(name: str, value: object, *, below_one: bool = False) -> float:
    """Return a number from 0 to 1 (below 1 if `below_one`); raise a ValueError that names `name` for other values."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and 0 <= cast(float, value) <= 1 and not (below_one and value == 1):
        return float(cast(float, value))
    raise ValueError(f"{name} must be a share from 0 to {'below ' if below_one else ''}1, not {value!r}")
