"""JSON schemas by the standard, where Python's floats and regular expressions differ from it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.json_schemas import validator


def is_valid(schema: Any, value: Any) -> bool:
    return bool(validator(json.dumps(schema)).is_valid(value))


@pytest.mark.parametrize(
    ("number", "unit", "valid"),
    [
        (4.02, 0.01, True),
        (0.3, 0.1, True),
        (1.1, 0.1, True),
        (19.99, 0.01, True),
        (0.0075, 0.0001, True),
        (4.025, 0.01, False),
        (0.00751, 0.0001, False),
        (7, 2, False),
        (6, 2, True),
        (6.0, 2, True),
        (4.5, 1.5, True),
        (35, 1.5, False),
        (1e308, 0.5, True),
        (1e308, 0.123456789, False),
        (12391239123, 1e-8, True),
        (10**400, 3, False),
        (-4.02, 0.01, True),
        (0, 0.1, True),
        (True, 2, True),
        ("a", 2, True),
    ],
)
def test_multiples_are_computed_in_decimal(number: Any, unit: float, valid: bool) -> None:
    assert is_valid({"multipleOf": unit}, number) == valid
    # Behind a reference to the root, with the draft named.
    draft = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": draft, "multipleOf": unit, "properties": {"x": {"$ref": "#"}}}
    assert is_valid(schema, {"x": number}) == valid


@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(0, 4))
def test_decimal_multiples_of_a_unit_are_valid(count: int, unit: int, places: int) -> None:
    of = float(f"{unit}e-{places}")

    assert is_valid({"multipleOf": of}, float(f"{count * unit}e-{places}"))


@pytest.mark.parametrize(
    ("pattern", "text", "valid"),
    [
        ("^a$", "a", True),
        ("^a$", "a\n", False),
        ("a$|b", "a\n", False),
        ("[$]$", "5$", True),
        (r"\$", "5$", True),
        (r"^\d+$", "12", True),
        (r"^\d+$", "\u0661\u0662", False),
        (r"^[\d]+$", "\u0661", False),
        (r"^\D$", "\u0661", True),
        (r"^\w$", "\u00e9", False),
        (r"^\W$", "\u00e9", True),
        (r"^\s$", "\u00a0", True),
        (r"^\s$", "\ufeff", True),
        (r"^\s$", "\x1c", False),
        (r"^\S$", "\x1c", True),
        (r"^[\s]$", "\u2003", True),
        (r"^[\S]$", "\u2003", False),
        (r"^[^\s]$", "\u2003", False),
        (r"^[\S]$", "\U0001f600", True),
        ("^.$", "\U0001f600", True),
        ("^.$", "\u2028", False),
        ("^.$", "\r", False),
        ("^[.]$", "\r", False),
        (r"^\cA$", "\x01", True),
        (r"^\u0061$", "a", True),
        (r"^\u{1F600}$", "\U0001f600", True),
        (r"^\ud83d\ude00$", "\U0001f600", True),
        ("^[^]$", "\n", True),
        ("^[]$", "", False),
        ("^[(?]$", "?", True),
        ("^[[]$", "[", True),
        ("^{a}$", "{a}", True),
        ("^a{,2}$", "a{,2}", True),
        ("^a{1,2}$", "aa", True),
        (r"^(?<year>\d)-\k<year>$", "1-1", True),
        (r"^(?:a|b)(?=c)(?!d)c(?<=c)$", "ac", True),
        (r"^\/\-\.$", "/-.", True),
        (r"\ba\b", "\u00e9a", True),
    ],
)
def test_patterns_follow_ecma_262(pattern: str, text: str, valid: bool) -> None:
    assert is_valid({"type": "string", "pattern": pattern}, text) == valid
    assert is_valid({"patternProperties": {pattern: {}}, "additionalProperties": False}, {text: 1}) == valid
    assert is_valid({"const": {"pattern": pattern}}, {"pattern": pattern})


@pytest.mark.parametrize("pattern", [r"\Aa\Z", "(?P<a>b)", "(?i)a", r"\p{L}", "a++", "(?>a)", "a(", "[b-a]", "(?#a)"])
def test_unsupported_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="ECMA 262"):
        validator(json.dumps({"properties": {"x": {"pattern": pattern}}}))


def test_a_property_with_the_name_of_a_keyword_is_checked() -> None:
    schema = {"properties": {"pattern": {"type": "string"}, "patternProperties": {"type": "integer"}}}

    assert not validator(json.dumps(schema), quick=True).is_valid({"pattern": 1})
    assert not validator(json.dumps(schema), quick=True).is_valid({"patternProperties": "a"})
