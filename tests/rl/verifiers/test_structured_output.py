import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.structured_output import NotJsonError, check, parse, strictly, unfenced
from tests.rl.verdicts import verdict_on

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "hours": {"type": "integer"},
        "exams": {
            "type": "object",
            "properties": {"done": {"type": "integer"}, "latest": {"type": "string", "format": "date"}},
            "required": ["done"],
        },
    },
    "required": ["name"],
}
FULL = {"name": "Ada", "hours": 3, "exams": {"done": 2, "latest": "2024-05-10"}}


@pytest.fixture(scope="module")
def structured() -> Iterator[Environment]:
    return make("structured_output", {"time_limit": 20, "workers": 1})


def verdict(structured: Environment, text: str, schema: Any = SCHEMA, **reference: Any) -> Verdict:
    return verdict_on(structured, text, {"schema": schema, **reference})


def changed(**values: Any) -> str:
    return json.dumps({**FULL, **values})


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (json.dumps(FULL), "correct"),
        ('{"name": "Ada"}', "correct"),
        (changed(more=1), "correct"),  # the schema does not forbid it
        ('```json\n{"name": "Ada"}\n```', "correct"),
        ('```\n{"name": "Ada"}\n```', "correct"),
        ('<think>{}</think>{"name": "Ada"}', "correct"),
        ('{"name": "\\ud800"}', "correct"),
        ('<think>{"name": "Ada"}', "wrong"),
        ("", "wrong"),
        ("{}", "wrong"),
        ("null", "wrong"),
        (changed(hours="three"), "wrong"),
        (changed(hours=True), "wrong"),
        (changed(exams={}), "wrong"),
        ('Here: {"name": "Ada"}', "wrong"),
        ('{"name": "Ada"} {"name": "Ada"}', "wrong"),
        ('Here:\n```json\n{"name": "Ada"}\n```', "wrong"),
        ('```json\n{"name": "Ada"}\n```\nThat is it', "wrong"),
        ('```json\n{"name": "Ada"}\n```\n```json\n{"name": "Ada"}\n```', "wrong"),
        ('```python\n{"name": "Ada"}\n```', "wrong"),
        ('````json\n{"name": "Ada"}\n````', "correct"),
        ('  ~~~\n  {"name": "Ada"}\n  ~~~', "correct"),
        ('````json\n{"name": "Ada"}\n```', "wrong"),
        ('```json\n{"name": "Ada"}', "wrong"),
        ('{"name": "Ada", "name": "Bob"}', "wrong"),
        ('{"name": "Ada", "x": NaN}', "wrong"),
        ('{"name": "Ada", "x": -Infinity}', "wrong"),
        ('{"name": "Ada", "x": 1e999}', "wrong"),
        ('{"name": "Ada",}', "wrong"),
        ("{'name': 'Ada'}", "wrong"),
        ('{"name": "Ada", "hours": ' + "1" * 5000 + "}", "wrong"),
        ('{"name": "Ada\x00"}', "wrong"),
    ],
)
def test_json_valid_under_the_schema(structured: Environment, text: str, outcome: str) -> None:
    assert verdict(structured, text).outcome == outcome


def test_a_reason_says_where(structured: Environment) -> None:
    found = verdict(structured, changed(exams={"done": "two"}))
    assert found.reason == "$.exams.done: 'two' is not of type 'integer'"


@given(st.recursive(st.none() | st.text() | st.floats(allow_nan=False, allow_infinity=False), st.lists, max_leaves=30))
def test_depth_is_the_depth_of_the_value(value: Any) -> None:
    def nested(part: Any) -> int:
        return 1 + max(map(nested, part), default=0) if isinstance(part, list) else 0

    text = json.dumps([value])
    assert parse(text, max_depth=1 + nested(value)) == [value]
    with pytest.raises(NotJsonError, match="nested deeper"):
        parse(text, max_depth=nested(value))


@given(st.text() | st.text(alphabet='[]{}",:0e-\\u tn', max_size=40))
def test_parsing_gives_json_or_refuses(text: str) -> None:
    try:
        value = parse(unfenced(text))
    except NotJsonError:
        return
    assert parse(json.dumps(value, allow_nan=False)) == value


def test_a_duplicate_among_many_keys_is_found_fast() -> None:
    text = "{" + ",".join(f'"{number}":1' for number in [*range(20_000), 19_999]) + "}"
    began = time.process_time()
    with pytest.raises(NotJsonError, match="19999"):
        parse(text)
    assert time.process_time() - began < 3


def test_a_catastrophic_pattern_is_an_error_not_a_hang() -> None:
    structured = make("structured_output", {"time_limit": 2, "workers": 1})
    found = verdict(structured, json.dumps("a" * 60 + "b"), {"type": "string", "pattern": "^(a+)+$"})
    assert found.outcome == "error" and "time limit" in found.reason
    assert verdict(structured, '"a"', {"type": "string", "pattern": "^(a+)+$"}).outcome == "correct"


def test_schemas_may_refer_to_themselves(structured: Environment) -> None:
    tree = {
        "$id": "https://example.org/tree",
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["value"]}},
        "$ref": "#/$defs/node",
    }
    chain: dict[str, Any] = {"value": 0}
    for value in range(50):
        chain = {"value": value, "next": chain}
    assert verdict(structured, json.dumps(chain), tree).outcome == "correct"
    del chain["next"]["next"]["value"]
    assert verdict(structured, json.dumps(chain), tree).outcome == "wrong"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ({}, "'schema' is missing"),
        ({"schema": 5}, "mapping"),
        ({"schema": "{"}, "not valid JSON"),
        ({"schema": {"type": "strin"}}, r"reference\.schema\.type"),
        ({"schema": {"properties": {"a": {"minimum": "x"}}}}, r"reference\.schema\.properties\.a\.minimum"),
        ({"schema": {"$ref": "#"}}, "endless loop"),
        (
            {"schema": {"properties": {"a": {"type": "string", "allOf": [{"$ref": "#/properties/a"}]}}}},
            r"reference\.schema\.properties\.a\.allOf\[0\]: its \$ref references form an endless loop",
        ),
        ({"schema": {"$schema": 5}}, r"\$schema=5: expected a string"),
        ({"schema": {"$ref": "https://example.org/schema"}}, "refer only to parts of itself"),
        ({"schema": {"items": {"$ref": "other.json"}}}, r"reference\.schema\.items\.\$ref"),
        ({"schema": {"$ref": "#/$defs/none"}}, "no part at this path"),
        ({"schema": {"pattern": "("}}, "not a valid ECMA 262 regular expression"),
        ({"schema": {"patternProperties": {"[": {}}}}, "not a valid ECMA 262 regular expression"),
        ({"schema": {"$defs": {"a": {"$id": "https://example.org/a"}}}}, r"\$id"),
        ({"schema": {"$schema": "https://example.org/mine"}}, r"\$schema='https://example.org/mine' is unknown"),
        ({"schema": {"const": float("nan")}}, "not a valid JSON schema: Out of range"),
        ({"schema": {"const": {1, 2}}}, "not JSON"),
        ({"schema": {}, "strict": "yes"}, "true or false"),
        ({"schema": {}, "shema": {}}, "did you mean 'schema'"),
    ],
)
def test_a_reference_that_cannot_be_used_is_named(reference: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(reference)


def test_names_and_data_that_look_like_keywords_are_unchanged() -> None:
    schema = {"properties": {"$ref": {"type": "string"}, "pattern": {"const": {"$ref": "(", "properties": {"a": 1}}}}}
    check({"schema": schema})
    strict = strictly(schema)
    assert strict["required"] == ["$ref", "pattern"]
    assert strict["properties"]["pattern"] == schema["properties"]["pattern"]


# The cases of Gym's structured_outputs tests: it makes every schema strict, and takes no fences.
@pytest.mark.gym
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (json.dumps(FULL), 1.0),
        ('{"name": "Ada", ', 0.0),
        (json.dumps({key: value for key, value in FULL.items() if key != "hours"}), 0.0),
        (changed(extraField="some value"), 0.0),
        (changed(hours="one hundred"), 0.0),
        (changed(exams={"done": 2, "latest": "2024-05-10", "extra": 1}), 0.0),
        (changed(exams={"done": 2}), 0.0),
        (changed(exams={"done": 2, "latest": "no date"}), 1.0),  # formats are not checked
    ],
)
def test_strict_agrees_with_gym(structured: Environment, text: str, reward: float) -> None:
    before = copy.deepcopy(SCHEMA)
    assert verdict(structured, text, strict=True).score == reward
    assert before == SCHEMA
