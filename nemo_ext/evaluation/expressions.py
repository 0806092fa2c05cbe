"""Functions and filters for the Jinja templates and expressions of benchmarks.

They execute no code from the data, and access neither the network nor files, except data of the package bfcl-eval.
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
from nemo_ext.rl.worlds import bfcl

_MOST_BYTES = 1 << 30
_PICKLED_TEXT = {"PROTO", "FRAME", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "MEMOIZE", "BINPUT", "STOP"}


def records(**columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert columns of equal length to a list of rows: records(id=[1, 2], kwargs=[a, b])."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def mixed(right: str, wrong: Sequence[str]) -> list[str]:
    """Insert the correct choice among the wrong ones, at a position derived from a hash of all choices."""
    place = int(digest_of(right, list(wrong)), 16) % (len(wrong) + 1)
    return [*wrong[:place], right, *wrong[place:]]


def lettered(choices: Sequence[Any], form: str = "{}. {}") -> str:
    """Format the choices as lines labelled with letters; `form` has a `{}` for the letter and one for the choice."""
    before, between, after = form.split("{}")  # not `format`, which would read attributes
    return "\n".join(f"{before}{letter(place)}{between}{choice}{after}" for place, choice in enumerate(choices))


def letter(place: int) -> str:
    """Return the letter of the choice at this 0-based index."""
    return string.ascii_uppercase[int(place)]


def letters(choices: Sequence[Any]) -> list[str]:
    """Return the letters of the choices, each with a leading space: [" A", " B", ...]."""
    return [f" {letter}" for letter in string.ascii_uppercase[: len(choices)]]


def spaced(texts: Sequence[Any]) -> list[str]:
    """Return the values as strings, each with a leading space."""
    return [f" {text}" for text in texts]


def unbracketed(text: str) -> str:
    """Remove markers such as [header] from a HellaSwag text, as lm-evaluation-harness does."""
    text, kept, begin = text.strip().replace(" [title]", ". "), [], 0
    while (opened := text.find("[", begin)) >= 0 and (closed := text.find("]", opened)) >= 0:
        kept.append(text[begin:opened])
        begin = closed + 1
    return "".join([*kept, text[begin:]]).replace("  ", " ")


def boxed(text: str) -> str:
    r"""Return the content of the last \boxed{} in a solution.

    Raises:
        ValueError: the solution has no \boxed{}.
    """
    content = last_boxed(text)
    if content is None:
        raise ValueError(f"expected a solution with \\boxed{{}}, not {text[-80:]!r}")
    return content


def packed_tests(text: str) -> list[dict[str, Any]]:
    """Decode LiveCodeBench's private tests: JSON, or a pickled JSON string in zlib and base64.

    The pickle is only parsed, never executed.

    Raises:
        ValueError: the string is in neither format.
    """
    if text.lstrip().startswith("["):
        return list(read_json(text))
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        operations = [(code.name, argument) for code, argument, _ in pickletools.genops(unpacked)]
    except (binascii.Error, zlib.error, ValueError) as error:
        raise ValueError(f"private tests: expected JSON, or JSON in pickle, zlib and base64 ({error})") from None
    strings = [argument for name, argument in operations if name.endswith(("UNICODE", "UNICODE8"))]
    if len(strings) != 1 or {name for name, _ in operations} - _PICKLED_TEXT:
        raise ValueError("private tests: expected a pickle of one string, but it contains other values")
    return list(read_json(str(strings[0])))


def code_tests(tests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert LiveCodeBench's tests {input, output, testtype} to the format of the environment `code`."""
    return [
        {"args": [read_json(line) for line in test["input"].split("\n")], "expected": read_json(test["output"])}
        if test["testtype"] == "functional"
        else {"input": test["input"], "output": test["output"]}
        for test in tests
    ]


def bfcl_tools(functions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert functions of the Berkeley Function-Calling Leaderboard to OpenAI tools.

    Types are renamed to those of JSON Schema, and dots in function names are replaced with underscores.
    """
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


def houses(table: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, str]]:
    """Convert ZebraLogic's solution {header, rows} to the format of the environment `grid`.

    Raises:
        ValueError: a cell is blank, as in the public copy of the dataset.
    """
    names = table["header"][1:]  # the first column is the number of the house
    if any("___" in row for row in table["rows"]):
        raise ValueError("cells of the solution are blank (___): request access to allenai/ZebraLogicBench-private")
    return {f"House {number}": dict(zip(names, row[1:], strict=True)) for number, row in enumerate(table["rows"], 1)}


def _typed(schema: Any) -> Any:
    """Return a schema with JSON Schema's names of types; a property that is itself called `type` is kept."""
    if not isinstance(schema, Mapping):
        return schema
    converted = dict(schema)
    if isinstance(kind := schema.get("type"), str):
        if kind == "any":
            del converted["type"]
        else:
            converted["type"] = {"dict": "object", "float": "number", "tuple": "array"}.get(kind, kind)
    if isinstance(properties := schema.get("properties"), Mapping):
        converted["properties"] = {key: _typed(value) for key, value in properties.items()}
    if "items" in schema:
        converted["items"] = _typed(schema["items"])
    return converted


def bfcl_calls(truth: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Convert BFCL's ground truth to the format of the key `accepted` in references of the environment `tool_calls`."""
    return [
        {"name": name.replace(".", "_"), "arguments": dict(values)} for call in truth for name, values in call.items()
    ]


FUNCTIONS = {"records": records, "mixed": mixed, "bfcl_programs": bfcl.tools}
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
    "houses": houses,
    "from_json": read_json,
}
