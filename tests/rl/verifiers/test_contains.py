"""Short answers that must occur in a response."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.rl.environments import make
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.contains import check
from tests.rl.verdicts import verdict_on

ONE = {"answers": ["4943287"], "wrong": ["1111111", "2222222"]}
ALL = {"answers": ["school", "nurse", "ladder"], "wrong": ["lamp", "candle", "hammer"], "all": True}


def verify(text: str, reference: dict[str, Any], **settings: Any) -> Verdict:
    return verdict_on(make("contains", settings), text, reference)


@pytest.mark.parametrize(
    "text",
    [
        "4943287",
        "The code is **4943287**.",
        "_4943287_",
        "(4943287)",
        "4943287, and no other.",
        "- 4943287",
        "<think>1111111?</think>4943287",
        "\uff14\uff19\uff14\uff13\uff12\uff18\uff17",
        r"\boxed{4943287}",
    ],
)
def test_an_answer_that_names_it_is_right(text: str) -> None:
    assert verify(text, ONE).outcome == "correct"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "<think>4943287",
        "<think>4943287</think>",
        "494328",
        "14943287",
        "49432871",
        "4943287.5",
        "3.4943287",
        "-4943287",
        "It is -4943287",
        "4943287,000",
        "x4943287",
        "4943287th",
        "4 943 287",
        "4943287 or 1111111",
        "1111111 2222222 4943287",
        "\x00" * 10,
        "\ud800",
        "4943287" + " " * 2000 + "x",
    ],
    ids=ascii,
)
def test_an_answer_without_it_or_with_a_wrong_one_earns_nothing(text: str) -> None:
    verdict = verify(text, ONE)

    assert (verdict.outcome, verdict.score) == ("wrong", 0)
    assert verdict.reason


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("School, NURSE and ladder", 1),
        ("1. ladder\n2. nurse\n3. school", 1),
        ("school, nurse", 2 / 3),
        ("school, nurse, ladder, lamp", 3 / 4),
        ("school, nurse, ladder, lamp, candle, hammer", 1 / 2),
        ("schools, nurses, ladders", 0),
        ("lamp", 0),
        ("school school school", 1 / 3),
    ],
)
def test_the_score_is_the_share_of_right_answers(text: str, score: float) -> None:
    verdict = verify(text, ALL)

    assert verdict.score == pytest.approx(score)
    assert (verdict.outcome == "correct") == (score == 1)


def test_parts_of_words_count_if_requested() -> None:
    assert verify("preschooler", {"answers": "school", "whole_words": False}).outcome == "correct"
    assert verify("preschooler", {"answers": "school"}).outcome == "wrong"


def test_words_of_any_script() -> None:
    assert verify("Это Париж.", {"answers": "париж"}).outcome == "correct"
    assert verify("STRASSE", {"answers": "Straße"}).outcome == "correct"
    assert verify("Île-de-France", {"answers": "i\u0302le-de-france"}).outcome == "correct"
    assert verify("New\n  York", {"answers": "New York"}).outcome == "correct"
    assert verify("C++ it is", {"answers": "C++"}).outcome == "correct"


@pytest.mark.parametrize("unit", ["a", "4943287 ", "49432871", "\u0301", "\ufdfa", "(", " "])
def test_long_texts_are_wrong_unless_the_setting_allows_them(unit: str) -> None:
    text = "x" + unit * (200_000 // len(unit.encode())) + "x"

    assert verify(text, ONE).reason.startswith("too long")
    assert verify(text, ONE, max_characters=2_000_000).score in (0, 1)


@given(st.text(max_size=300))
def test_no_text_without_the_answer_is_right(text: str) -> None:
    assert verify(text, {"answers": ["QZX-7919-XZQ"]}).outcome == "wrong"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({}, "the key 'answers' is missing"),
        ({"answers": []}, r"answers=\[\]: expected at least one string"),
        ({"answers": ["a", " "]}, r"reference\.answers=\['a', ' '\]: expected non-empty strings"),
        ({"answers": ["a"], "wrong": [""]}, r"reference\.wrong=\[''\]: expected non-empty strings"),
        ({"answers": ["a"], "wrong": ["A"]}, r"reference\.wrong: 'a' is also in reference\.answers"),
        ({"answers": [3]}, "answers.0=3"),
        ({"answers": ["a"], "all": "yes"}, "all='yes'"),
        ({"answer": ["a"]}, "unknown key 'answer': did you mean 'answers'"),
    ],
)
def test_references_are_checked(reference: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        check(reference)

    assert str(raised.value).startswith("reference")


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="max_characters must be a whole number of at least 1"):
        make("contains", {"max_characters": 0})


@pytest.mark.parametrize(
    ("answer", "sought", "right"),
    [
        ("**-50**", "50", False),
        ("(-50)", "50", False),
        ("$-50$", "50", False),
        ("\u221250", "50", False),
        ("\u221250", "-50", True),
        ("item-50", "50", True),
        ("1/50", "50", False),
        ("50/3", "50", False),
        ("10^5", "5", False),
        (".12", "12", False),
        ("It is 50.", "50", True),
        ("50, 51", "50", True),
        ("O\u2019Neill", "O'Neill", True),
        ("1,000 people", "1000", True),
        ("1000 people", "1,000", True),
        ("1,000 people", "1", False),
    ],
)
def test_signs_fractions_and_marks_of_numbers(answer: str, sought: str, right: bool) -> None:
    assert (verify(answer, {"answers": [sought]}).outcome == "correct") == right
