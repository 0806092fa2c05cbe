import json
import math
from typing import Any

import pytest

from nemo_ext.job.records import json_line, read_json


@pytest.mark.parametrize(
    "value", [2**64, -(10**40), [1.5, {"a": 2**100, "\u00e9": None}], "1" * 40, 1e300, True, {"pi": 3.141592653589793}]
)
def test_values_survive_being_written_and_read(value: Any) -> None:
    assert read_json(json_line(value)) == value
    assert read_json(json.dumps(value)) == value


@pytest.mark.parametrize("beside", [1, 2**64, "\ud800"])
def test_a_line_has_no_nan(beside: Any) -> None:
    """Neither where orjson writes it nor where it cannot."""
    line = json_line({"beside": beside, "scores": [math.nan, {"worst": -math.inf}]})

    assert json.loads(line, parse_constant=pytest.fail)["scores"] == [None, {"worst": None}]


@pytest.mark.parametrize("text", ["NaN", "[1e999999, 12345678901234567890123]x", "{", b"\xff"])
def test_invalid_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"character|column|line|input"):
        read_json(text)


@pytest.mark.parametrize("text", [r'"\ud800"', "[NaN, -Infinity]", "\ufeff1", "1e400", "-9223372036854775809"])
def test_json_that_only_python_accepts_must_be_allowed(text: str) -> None:
    for given in (text, text.encode()):
        assert repr(read_json(given, strict=False)) == repr(json.loads(text.removeprefix("\ufeff")))
