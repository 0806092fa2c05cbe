r"""Standard-conforming JSON schema validation: decimal `multipleOf`, and regular expressions as defined by ECMA 262.

jsonschema itself divides floats, so that 4.02 is not a multiple of 0.01, and uses Python's regular expressions, where
`$` also matches before a final newline and `\d` matches digits other than 0 to 9. References are not fetched from the
network.
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
    True: re.compile(rf"{_ESCAPE}|(?P<other>(?!))|.", re.DOTALL),  # inside [ ]
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
    """Return the validator of a JSON schema, for the draft in its `$schema` or by default 2020-12.

    Args:
        text: schema as a JSON string.
        quick: whether to skip keywords whose validation time can grow with model output (`pattern`, `uniqueItems`).

    Raises:
        SchemaError: the string is not a JSON schema.
        ValueError: a regular expression is not valid in ECMA 262.
    """
    schema = json.loads(text)
    kind = validator_for(schema, default=Draft202012Validator)
    schema = rewritten(schema, _quick if quick else _with_pythons_patterns)
    kind.check_schema(schema)
    if isinstance(schema, dict):
        schema.pop("$schema", None)  # otherwise a reference to the root would restore jsonschema's rules
    return _exact(kind)(schema, registry=Registry())


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of a schema with `change` applied to every subschema, innermost first."""
    if isinstance(schema, list | tuple):
        return [rewritten(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            copy[key] = {name: rewritten(part, change) for name, part in value.items()}
        else:
            copy[key] = value if key in DATA else rewritten(value, change)
    return change(copy)


def pythons_pattern(pattern: str) -> str:
    """Translate an ECMA 262 regular expression into Python's notation.

    Raises:
        ValueError: the pattern is invalid, or uses a feature that Python does not have (Unicode property escapes).
    """
    parts, inside, position = [], False, 0
    while position < len(pattern):
        match = _PARTS[inside].match(pattern, position)
        assert match is not None
        part, position = match[0], match.end()
        if match["point"] or match["high"]:
            high, low = (int(match[name] or "0", 16) for name in ("high", "low"))
            point = int(match["point"], 16) if match["point"] else 0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF)
            part = f"\\U{point:08x}"
        elif match["control"]:
            part = f"\\x{ord(match['control']) % 32:02x}"
        elif match["again"]:
            part = f"(?P={match['again']})"
        elif match["other"] or (part[0] == "\\" and part[1:].isalpha() and part[1] not in "bBdDfnrsStuvwWx"):
            raise ValueError(
                f"pattern {pattern!r} contains {part}, which is not valid in ECMA 262 or not supported: write it "
                f"without {part}"
            )
        elif inside:
            inside, part = part != "]", _INSIDE.get(part, part)
        else:
            inside, part = part in ("[", "[^"), _OUTSIDE.get(part, part)
        parts.append(part)
    text = f"(?a:{''.join(parts)})"
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        problem = getattr(error, "msg", error)
        raise ValueError(
            f"pattern {pattern!r} is not a valid ECMA 262 regular expression ({problem}): correct it"
        ) from None
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
    """Yield an error if `instance` is not a multiple of `unit`, comparing decimal values rather than binary ones.

    This is jsonschema's function for the keyword `multipleOf`, which prescribes the arguments.
    """
    if validator.is_type(instance, "number"):
        number, of = (Fraction(part) if isinstance(part, int) else Fraction(repr(part)) for part in (instance, unit))
        if (number / of).denominator != 1:
            yield ValidationError(f"{instance!r} is not a multiple of {unit!r}")
