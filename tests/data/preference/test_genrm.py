from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.formats import FormatError
from nemo_ext.data.preference.genrm import GenrmSample, genrm_record, swapped, to_genrm
from nemo_ext.data.preference.records import RecordKeys

KEYS = RecordKeys()


def record(**given: Any) -> dict[str, Any]:
    return {"id": "h", "context": [{"role": "user", "content": "Hi"}], "response1": "a", "response2": "b"} | given


def sample(**given: Any) -> GenrmSample:
    made = to_genrm(record(**given), KEYS)
    assert made is not None
    return made


@given(st.integers(1, 6), st.none() | st.integers(1, 5), st.none() | st.integers(1, 5))
def test_swapping_twice_changes_nothing(ranking: int, one: int | None, two: int | None) -> None:
    original = sample(ranking=ranking, helpfulness_1=one, helpfulness_2=two)

    other = swapped(original)

    assert swapped(other) == original != other
    assert other.ranking == 7 - ranking
    assert other.helpfulness == (two, one)
    assert genrm_record(other)["messages"][1:] == [
        {"role": "response_1", "content": "b"},
        {"role": "response_2", "content": "a"},
    ]


@pytest.mark.parametrize(("preference", "ranking"), [(-3, 1), (-2, 2), (-1, 3), (1, 4), (2, 5), (3, 6)])
def test_helpsteers_preference_is_a_ranking(preference: int, ranking: int) -> None:
    assert sample(overall_preference=preference).ranking == ranking


def test_a_tie_gives_no_sample() -> None:
    assert to_genrm(record(overall_preference=0), KEYS) is None


def test_the_judge_sees_no_reasoning() -> None:
    made = sample(response1="<think>secret</think>a", ranking=1, score_1=5, score_2=2)

    written = genrm_record(made)

    assert written["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "response_1", "content": "a"},
        {"role": "response_2", "content": "b"},
    ]
    assert (written["score_1"], written["score_2"], written["ranking"]) == (5, 2, 1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ranking": 0}, "ranking must be from 1 to 6, not 0"),
        ({"ranking": 7}, "from 1 to 6, not 7"),
        ({"ranking": 2.5}, "ranking: expected a whole number, not 2.5"),
        ({"ranking": 1, "score_1": 6}, "score_1 must be from 1 to 5, not 6"),
        ({"overall_preference": 4}, "overall_preference must be from -3 to 3, not 4"),
        ({}, "expected ranking or overall_preference, but the record's keys are"),
        ({"ranking": 1, "response2": None}, "expected an answer under response_2 or response2"),
        ({"ranking": 1, "context": None}, "expected a prompt under messages or prompt"),
    ],
)
def test_values_out_of_range_or_missing_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        to_genrm(record(**given), KEYS)
