"""Environments by name."""

from typing import Any

import pytest

from nemo_ext.rl.environments import known_environments, make, with_turns

JUDGE = {"judge": {"endpoint": "http://localhost:1/v1", "model": "judge"}}


# published_instructions needs a library that takes seconds to import
@pytest.mark.parametrize("name", sorted({*known_environments()} - {"published_instructions"}))
def test_an_environment_verifies_or_converses(name: str) -> None:
    made = make(name, JUDGE if name in ("arena", "graded", "judge") else None)

    assert made.name == name
    assert made.verify is not None or made.begin is not None
    assert (made.max_turns > 1) == (made.begin is not None)
    with pytest.raises(ValueError, match="refrence"):
        made.check({"refrence": 1})


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("maths", {}, "unknown environment 'maths': did you mean 'math'"),
        ("bank", {"max_turn": 3}, "settings of environment bank: unknown key 'max_turn': did you mean 'max_turns'"),
        ("judge", {}, "settings of environment judge: the key 'judge' is missing"),
        ("contains", {"max_characters": 0}, "^environment contains: max_characters"),
        ("tool_calls", {"style": "xml"}, "^environment tool_calls: style must be one of"),
    ],
)
def test_an_unknown_name_or_setting_is_reported(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(name, settings)


@pytest.mark.parametrize(
    ("name", "settings", "turns", "most"),
    [
        ("bank", {}, 1, 5),
        ("bank", {}, 7, 7),
        ("bank", {"max_turns": 3}, 7, 3),
        ("python_tool", {"max_calls": 8}, 1, 9),
        ("math", {}, 7, 1),
        ("bfcl_multi_turn", {}, 7, make("bfcl_multi_turn").max_turns),
    ],
)
def test_the_algorithm_sets_the_maximum_number_of_turns(
    name: str, settings: dict[str, Any], turns: int, most: int
) -> None:
    assert make(name, with_turns(name, settings, turns)).max_turns == most
