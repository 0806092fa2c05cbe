"""A pydantic dataclass from a config, with errors that name the key and its nearest neighbour."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_ext.data.settings import nearest


def checked[T](kind: type[T], config: Mapping[str, Any], *, where: str) -> T:
    """An instance of `kind` whose fields are `config`.

    Raises:
        ValueError: `where: key ...`, what it holds and what it may hold.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in config:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}: {nearest(str(key), known)}")
    try:
        return TypeAdapter(kind).validate_python(dict(config))
    except ValidationError as error:
        # A wrong name also leaves the right one out: say what is wrong.
        first = min(error.errors(), key=lambda found: found["type"] != "unexpected_keyword_argument")
    if first["type"] == "value_error":
        raise ValueError(f"{where}: {first['ctx']['error']}")
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "unexpected_keyword_argument":  # of a part: the keys of all parts are near enough
        schemas = TypeAdapter(kind).json_schema().get("$defs", {}).values()
        inner = [name for schema in schemas for name in schema.get("properties", {})]
        raise ValueError(f"{where}: unknown key {key!r}: {nearest(str(first['loc'][-1]), inner)}")
    if first["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        raise ValueError(f"{where}: the key {key!r} is missing")
    raise ValueError(f"{where}: {key}={first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}")
