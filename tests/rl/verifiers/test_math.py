import asyncio
import csv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.math import MAX_DEPTH, _apart, check, difference, prepared


@pytest.fixture(scope="module")
def math() -> Iterator[Environment]:
    return make("math", {"time_limit": 20, "workers": 2})


def verdict(math: Environment, text: str, **reference: Any) -> Verdict:
    assert math.verify is not None
    found = math.verify(parse_response(text), math.check(reference))
    assert isinstance(found, Verdict)
    return found


_, *CASES = map(tuple, csv.reader((Path(__file__).parent / "math_cases.csv").open(newline="")))
"""Kind, reference, answer, and whether it is right: by mathematics, not by what a verifier says."""
KNOWN = {("17", r"\text{The answer is }17")}
"""Right answers that are taken for wrong."""


def outcome(reference: str, answer: str) -> str:
    """What the worker says of a boxed answer, in this process."""
    expected, _ = prepared(check({"answer": reference}).answer)
    answer, refused = prepared(answer)
    return "wrong" if refused or (expected != answer and difference(expected, answer)) else "right"


def test_a_right_and_a_wrong_answer_of_each_kind(math: Environment) -> None:
    said = {"right": "correct", "wrong": "wrong"}
    kinds = groupby(sorted(CASES, key=itemgetter(0, 3)), key=itemgetter(0, 3))
    cases = [next(of_kind) for _, of_kind in kinds]
    others = [
        case for case in cases if verdict(math, f"So \\boxed{{{case[2]}}}.", answer=case[1]).outcome != said[case[3]]
    ]

    assert len(cases) >= 80 and not others


@pytest.mark.slow
def test_all_cases() -> None:
    others = {case[1:3] for case in CASES if outcome(case[1], case[2]) != case[3]}

    assert len(CASES) > 3000 and others == KNOWN


@pytest.mark.parametrize(
    ("expected", "answer", "reason"),
    [
        ("92", "36 + 56", "not worked out"),
        ("12", r"\frac{84}{7}", "not worked out"),
        ("1", r"\ln e", "not worked out"),
        ("10000", r"\sum_{k=1}^{100} (2k-1)", "not worked out"),
        ("2x", r"\frac{d}{dx} x^{2}", "not worked out"),
        (r"2\sqrt{3}", r"\sqrt{12}\cdot 0!", "not worked out"),
        ("6", "4 2", "not a value: numbers side by side"),
        ("5", r"5\text{ maybe}", "not a value: 'maybe' behind a value"),
        (r"\sum_{k} k", r"\sum_{k} k\text{ maybe}", "other words"),
        ("5", "6", "another answer"),
    ],
)
def test_why_an_answer_is_wrong(math: Environment, expected: str, answer: str, reason: str) -> None:
    found = verdict(math, f"So \\boxed{{{answer}}}.", answer=expected)

    assert (found.outcome, found.reason) == ("wrong", reason)


@pytest.mark.parametrize(
    ("format", "text", "outcome"),
    [
        ("boxed", r"\boxed{5} and then \boxed{42}", "correct"),
        ("boxed", r"\boxed{42} and then \boxed{5}", "wrong"),
        ("boxed", "The answer is 42", "wrong"),
        ("boxed", r"<think>\boxed{42}</think> I do not know", "wrong"),
        ("boxed", r"<think>I do not know</think> \boxed{42}", "correct"),
        ("boxed", r"<think>\boxed{42}", "wrong"),
        ("text", "The answer is 42.", "correct"),
        ("text", "The answer is $42$.", "correct"),
        ("text", "#### 42", "correct"),
        ("text", "42", "wrong"),
        ("bare", " 42 ", "correct"),
        ("bare", "42\n43", "wrong"),
        ("text", "The answer is **42**.", "correct"),
        ("text", r"The answer is $\boxed{42}$.", "correct"),
        ("text", "The answer is 42, since 40+2=42.", "correct"),
        ("text", "The answer is 42.\n\n#### Check\n40+2=42", "correct"),
        ("text", r"The answer is 42 or \boxed{43}", "wrong"),
        ("bare", "**42**", "correct"),
        ("bare", r"\boxed{42}", "correct"),
        ("bare", "42}>x", "wrong"),
    ],
)
def test_where_the_answer_is_looked_for(math: Environment, format: str, text: str, outcome: str) -> None:
    assert verdict(math, text, answer="42", format=format).outcome == outcome


@pytest.mark.parametrize("answer", [r"\log_2 3", r"2\log_3 5", r"\log_2 8", "x^2 3", r"\sum_{k} k", r"\text{June 5}"])
def test_references_that_the_grammar_or_math_verify_knows_are_taken(answer: str) -> None:
    assert check({"answer": answer}).answer == answer


def test_no_number_equals_a_product_with_infinity() -> None:
    from sympy import E, Integer, Mul, oo

    # math-verify 0.9 was once seen to take these for equal, and mostly does not.
    assert _apart(Integer(1), Mul(3, oo, E, evaluate=False))
    assert not _apart(oo, Mul(3, oo, E, evaluate=False))


def test_time_limit_is_an_error_and_neither_answer() -> None:
    math = make("math", {"time_limit": 0.02, "workers": 1})
    found = verdict(math, r"\boxed{\int_0^1 x^{x^{x}} dx}", answer=r"\int_0^1 x^{x} dx")
    assert found.outcome == "error" and "time limit of 0.02 s" in found.reason and found.score == 0


def test_long_and_deep_answers_are_wrong_without_being_read() -> None:
    math = make("math", {"time_limit": 1, "workers": 1, "max_length": 100})
    assert verdict(math, r"\boxed{" + "9" * 101 + "}", answer="2").outcome == "wrong"
    deep = "{" * (MAX_DEPTH + 1) + "}" * (MAX_DEPTH + 1)
    assert "nested deeper" in verdict(math, rf"\boxed{{{deep}}}", answer="2").reason


def test_from_threads_and_an_event_loop(math: Environment) -> None:
    def one(number: int) -> bool:
        return verdict(math, rf"\boxed{{{number}/7}}", answer=rf"\frac{{{number}}}{{7}}").outcome == "correct"

    async def many() -> list[bool]:
        return await asyncio.gather(*(asyncio.to_thread(one, number) for number in range(20)))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(20)))
    assert all(asyncio.run(many()))
    assert math.waits


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ({}, "'answer' is missing"),
        ({"answer": ""}, "answer"),
        ({"answer": None}, "answer"),
        ({"answer": "4 2"}, "side by side"),
        ({"answer": "9" * 501}, "500"),
        ({"answer": "5", "format": "box"}, "format='box'.*'boxed'"),
        ({"answer": "5", "anwser": "6"}, "did you mean 'answer'"),
    ],
)
def test_a_reference_that_cannot_be_used_is_named(reference: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(reference)


def test_a_number_stands_for_itself() -> None:
    assert check({"answer": 42}).answer == "42"
    assert check({"answer": 0.5}).answer == "0.5"


def test_settings_that_cannot_be_used_are_named() -> None:
    for setting in ({"time_limit": 0}, {"workers": 0}, {"max_length": 0}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            make("math", setting)
