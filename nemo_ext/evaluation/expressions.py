"""Functions and filters that benchmarks' templates and expressions have beside Jinja's own.

They compute, and reach no file, no network and no code of the data's.
"""

import base64
import binascii
import pickletools
import string
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_ext.evaluation.store import digest_of
from nemo_ext.job.records import read_json
from nemo_ext.rl.answers import last_boxed

_MOST_BYTES = 1 << 30
_PICKLED_TEXT = {"PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "MEMOIZE", "BINPUT", "STOP"}


def records(**columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of columns of the same length: records(id=[1, 2], kwargs=[a, b])."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def mixed(right: str, wrong: Sequence[str]) -> list[str]:
    """The choices with the right one at a place that its and the others' texts decide."""
    place = int(digest_of(right, list(wrong)), 16) % (len(wrong) + 1)
    return [*wrong[:place], right, *wrong[place:]]


def lettered(choices: Sequence[Any], form: str = "{}. {}") -> str:
    """Lines of the choices, each behind its letter; the form has a place for each of both."""
    before, between, after = form.split("{}")  # not `format`, which would read attributes
    return "\n".join(f"{before}{letter(place)}{between}{choice}{after}" for place, choice in enumerate(choices))


def letter(place: int) -> str:
    """Letter of a choice by its number, from 0."""
    return string.ascii_uppercase[int(place)]


def letters(choices: Sequence[Any]) -> list[str]:
    """As many letters as there are choices, each after a space."""
    return [f" {each}" for each in string.ascii_uppercase[: len(choices)]]


def spaced(texts: Sequence[Any]) -> list[str]:
    """The texts, each after a space."""
    return [f" {text}" for text in texts]


def unbracketed(text: str) -> str:
    """A text of HellaSwag without marks such as [header], as lm-evaluation-harness cleans it."""
    text, kept, begin = text.strip().replace(" [title]", ". "), [], 0
    while (opened := text.find("[", begin)) >= 0 and (closed := text.find("]", opened)) >= 0:
        kept.append(text[begin:opened])
        begin = closed + 1
    return "".join([*kept, text[begin:]]).replace("  ", " ")


def boxed(text: str) -> str:
    r"""Content of a solution's last \boxed{}.

    Raises:
        ValueError: there is none.
    """
    found = last_boxed(text)
    if found is None:
        raise ValueError(f"no \\boxed{{}} in {text[-80:]!r}")
    return found


def packed_tests(text: str) -> list[dict[str, Any]]:
    """LiveCodeBench's private tests: JSON, or JSON in a pickled text in zlib in base64. The pickle is never executed.

    Raises:
        ValueError: it is neither.
    """
    if text.lstrip().startswith("["):
        return list(read_json(text))
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        operations = [(code.name, argument) for code, argument, _ in pickletools.genops(unpacked)]
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"private tests: neither JSON nor packed JSON ({error})") from None
    found = [argument for name, argument in operations if name.endswith(("UNICODE", "UNICODE8"))]
    if len(found) != 1 or {name for name, _ in operations} - _PICKLED_TEXT:
        raise ValueError("private tests: the pickle holds more than a text")
    return list(read_json(str(found[0])))


def code_tests(tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """LiveCodeBench's tests {input, output, testtype} as the environment `code` wants them."""
    return [
        {"args": [read_json(line) for line in test["input"].split("\n")], "expected": read_json(test["output"])}
        if test["testtype"] == "functional"
        else {"input": test["input"], "output": test["output"]}
        for test in tests
    ]


def bfcl_tools(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Functions of the Berkeley Function-Calling Leaderboard as tools: types as in JSON schema, no dots in names."""
    none = {"type": "object", "properties": {}}
    return [
        {
            "type": "function",
            "function": {
                **function,
                "name": function["name"].replace(".", "_"),
                "parameters": _typed(function.get("parameters") or none),
            },
        }
        for function in functions
    ]


def _typed(schema: Any) -> Any:
    """A schema with the names of types that JSON schema has; properties may be called `type` too."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    if isinstance(kind := schema.get("type"), str):
        if kind == "any":
            del made["type"]
        else:
            made["type"] = {"dict": "object", "float": "number", "tuple": "array"}.get(kind, kind)
    if isinstance(properties := schema.get("properties"), Mapping):
        made["properties"] = {key: _typed(each) for key, each in properties.items()}
    if "items" in schema:
        made["items"] = _typed(schema["items"])
    return made


def bfcl_calls(truth: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The leaderboard's possible answers as the environment `tool_calls` has them in `accepted`."""
    return [
        {"name": name.replace(".", "_"), "arguments": dict(values)} for call in truth for name, values in call.items()
    ]


FUNCTIONS = {"records": records, "mixed": mixed}
FILTERS = {
    "lettered": lettered,
    "letter": letter,
    "letters": letters,
    "spaced": spaced,
    "unbracketed": unbracketed,
    "boxed": boxed,
    "packed_tests": packed_tests,
    "code_tests": code_tests,
    "bfcl_tools": bfcl_tools,
    "bfcl_calls": bfcl_calls,
    "from_json": read_json,
}
