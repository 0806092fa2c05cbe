r"""JSON schemas as their standard says: `multipleOf` in decimal arithmetic, regular expressions of ECMA 262.

jsonschema divides floats, so that 4.02 is no multiple of 0.01, and takes Python's regular expressions, where `$` also
matches before a final newline and `\d` matches other digits than 0 to 9. Nothing is looked up on the network.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend, validator_for
from referencing import Registry

# The values of these keys are data or names, not schemas.
DATA = ("const", "enum", "default", "examples")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")

_SPACE = "\\t\\n\\v\\f\\r \\u00a0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000\\ufeff"
_NO_SPACE = (
    "\\x00-\\x08\\x0e-\\x1f!-\\x9f\\u00a1-\\u167f\\u1681-\\u1fff\\u200b-\\u2027\\u202a-\\u202e\\u2030-\\u205e"
    "\\u2060-\\u2fff\\u3001-\\ufefe\\uff00-\\U0010ffff"
)
_ESCAPE = (
    r"\\u\{(?P<point>[0-9A-Fa-f]{1,6})\}|\\u(?P<high>[Dd][89ABab]..)\\u(?P<low>[Dd][C-Fc-f]..)|\\c(?P<control>[A-Za-z])"
    r"|\\k<(?P<again>\w+)>|\\."
)
_PARTS = {
    True: re.compile(rf"{_ESCAPE}|(?P<other>(?!))|.", re.DOTALL),  # inside of [ ]
    False: re.compile(
        rf"{_ESCAPE}|\(\?<(?![=!])|\(\?(?:[:=!]|<[=!]|i?(?:-i)?:)|(?P<other>\(\?|[*+?]\+)|\[\^?\]?|\{{\d+(?:,\d*)?\}}|.",
        re.DOTALL,
    ),
}
_INSIDE = {r"\s": _SPACE, r"\S": _NO_SPACE, "[": r"\["}
_OUTSIDE = {
    **{r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]", ".": r"[^\n\r\u2028\u2029]", "$": r"\Z", "{": r"\{"},
    **{"[]": "(?!)", "[^]": r"[\W\w]", "(?<": "(?P<"},
}


@lru_cache(maxsize=4096)
def validator(text: str, *, quick: bool = False) -> Any:
    """Validator of a JSON schema of the draft that its `$schema` names, else 2020-12.

    Args:
        text: the schema as JSON.
        quick: whether to leave out the keywords whose time model output decides.

    Raises:
        SchemaError: the text is not a JSON schema.
        ValueError: a regular expression is not one of ECMA 262.
    """
    schema = json.loads(text)
    kind = validator_for(schema, default=Draft202012Validator)
    schema = rewritten(schema, _quick if quick else _with_pythons_patterns)
    kind.check_schema(schema)
    if isinstance(schema, dict):
        schema.pop("$schema", None)  # or a reference to the root brings jsonschema's own rules back
    return _exact(kind)(schema, registry=Registry())


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Copy of a schema, with a change of every schema in it, the inner ones first."""
    if isinstance(schema, list | tuple):
        return [rewritten(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            made[key] = {name: rewritten(part, change) for name, part in value.items()}
        else:
            made[key] = value if key in DATA else rewritten(value, change)
    return change(made)


def pythons_pattern(pattern: str) -> str:
    """Regular expression of ECMA 262 in Python's notation.

    Raises:
        ValueError: it is none, or has what Python does not (properties of characters).
    """
    made, inside, position = [], False, 0
    while position < len(pattern):
        found = _PARTS[inside].match(pattern, position)
        assert found is not None
        part, position = found[0], found.end()
        if found["point"] or found["high"]:
            high, low = (int(found[name] or "0", 16) for name in ("high", "low"))
            point = int(found["point"], 16) if found["point"] else 0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF)
            part = f"\\U{point:08x}"
        elif found["control"]:
            part = f"\\x{ord(found['control']) % 32:02x}"
        elif found["again"]:
            part = f"(?P={found['again']})"
        elif found["other"] or (part[0] == "\\" and part[1:].isalpha() and part[1] not in "bBdDfnrsStuvwWx"):
            raise ValueError(f"{pattern!r}: {part} is not in ECMA 262, or not supported")
        elif inside:
            inside, part = part != "]", _INSIDE.get(part, part)
        else:
            inside, part = part in ("[", "[^"), _OUTSIDE.get(part, part)
        made.append(part)
    text = f"(?a:{''.join(made)})"
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r}: no regular expression of ECMA 262: {getattr(error, 'msg', error)}") from None
    return text


def _with_pythons_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = pythons_pattern(schema["pattern"])
    if isinstance(named := schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {pythons_pattern(pattern): part for pattern, part in named.items()}
    return schema


def _quick(schema: dict[str, Any]) -> dict[str, Any]:
    slow = {"pattern": str, "patternProperties": Mapping, "uniqueItems": bool}
    return {key: part for key, part in schema.items() if not (key in slow and isinstance(part, slow[key]))}


@lru_cache
def _exact(kind: Any) -> Any:
    return extend(kind, {"multipleOf": _multiple_of})


def _multiple_of(validator: Any, unit: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check of the numbers as they are written, of which a float is only the nearest in binary."""
    if validator.is_type(instance, "number"):
        number, of = (Fraction(part) if isinstance(part, int) else Fraction(repr(part)) for part in (instance, unit))
        if (number / of).denominator != 1:
            yield ValidationError(f"{instance!r} is not a multiple of {unit!r}")
