import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.response import parse_response
from nemo_ext.rl.verifiers.math import MAX_DEPTH, _apart, check, prepared
from nemo_ext.rl.verifiers.verdict import Verdict


@pytest.fixture(scope="module")
def math() -> Iterator[Environment]:
    return make("math", {"time_limit": 20, "workers": 2})


def verdict(math: Environment, text: str, **reference: Any) -> Verdict:
    assert math.verify is not None
    found = math.verify(parse_response(text), math.check(reference))
    assert isinstance(found, Verdict)
    return found


EQUAL = [
    ("42", "42"),
    ("42", "042"),
    ("42", "42."),
    ("42", "$42$"),
    ("42", r"\$42"),
    ("42", r"42^\circ"),
    ("42", r"42\text{ cm}"),
    ("1,234", "1234"),
    ("1234", "1{,}234"),
    ("1000000", "10^6"),
    ("1000", "1 000"),
    ("1e-7", "10^{-7}"),
    ("0.5", r"\frac12"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac 1 2", "0.5"),
    (r"\frac{1}{3}", "0.333333"),
    (r"2\pi", "6.283185"),
    ("50%", "0.5"),
    (r"50\%", "50"),
    ("50", r"50\%"),
    ("12 apples", "12"),
    ("x=3", "3"),
    ("3", "x = 3"),
    ("x^2-1", "(x-1)(x+1)"),
    ("x^2+1=0", "1+x^2=0"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("1, 2", r"\{2, 1\}"),
    ("(1, 2)", r"\left(1, 2\right)"),
    ("[1,2)", r"\left[1, 2\right)"),
    (r"x \le 3", r"(-\infty, 3]"),
    ("x > 5", "5 < x"),
    ("3+2i", "2i+3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    (r"\infty", r"\,\infty"),
    ("Tuesday", r"\text{Tuesday}"),
    (r"\(\sqrt{2}\)", r"\sqrt 2"),
    (r"\boxed{7}", "7"),
]
DIFFERENT = [
    ("42", "43"),
    ("42", "-42"),
    ("-5", "5"),
    ("42", "４２"),
    ("42", r"\infty"),
    ("42", "NaN"),
    ("42", r"\boxed{42}"),  # a box in a box
    ("42", r"41 \boxed{42}"),
    ("10^{-20}", "10^{-30}"),
    ("10^{-20}", "0"),
    ("0.0000001", "0"),
    ("1e-7", r"2 \cdot 10^{-7}"),
    (r"\frac{1}{3}", "0.33"),
    ("(1,2)", "(2,1)"),
    ("5", "5, 6"),
    ("5", "5 or 6"),
    ("5", r"5\text{ or 6}"),
    ("0", "1 000"),
    ("6", "4 2"),
    ("x^2=-1", "y^2=-2"),
    ("x", "y"),
    ("x=3", "y=3"),
    ("3", r"\frac{3}{0}"),
    (r"\emptyset", r"\text{none of them}"),
    ("[1,2]", "(1,2)"),
]


@pytest.mark.parametrize(("expected", "answer"), EQUAL)
def test_equal(math: Environment, expected: str, answer: str) -> None:
    assert verdict(math, f"So \\boxed{{{answer}}}.", answer=expected).outcome == "correct"


@pytest.mark.parametrize(("expected", "answer"), DIFFERENT)
def test_different(math: Environment, expected: str, answer: str) -> None:
    assert verdict(math, f"So \\boxed{{{answer}}}.", answer=expected).outcome == "wrong"


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
        ("bare", r"\boxed{42}", "wrong"),
        ("bare", "42}>x", "wrong"),
    ],
)
def test_where_the_answer_is_looked_for(math: Environment, format: str, text: str, outcome: str) -> None:
    assert verdict(math, text, answer="42", format=format).outcome == outcome


def test_no_number_equals_a_product_with_infinity() -> None:
    from sympy import E, Integer, Mul, oo

    # math-verify 0.9 was once seen to take these for equal, and mostly does not.
    assert _apart(Integer(1), Mul(3, oo, E, evaluate=False))
    assert not _apart(oo, Mul(3, oo, E, evaluate=False))


def test_time_limit_is_an_error_and_neither_answer() -> None:
    math = make("math", {"time_limit": 2, "workers": 1})
    found = verdict(math, r"\boxed{9^{9^{9^9}}}", answer="2")
    assert found.outcome == "error" and "time limit of 2 s" in found.reason and found.score == 0
    assert verdict(math, r"\boxed{2/1}", answer="2").outcome == "correct"


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
        ({"answer": "5", "format": "box"}, "did you mean 'boxed'"),
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


def test_preparing_twice_changes_nothing_more() -> None:
    for pair in EQUAL:
        for answer in pair:
            once, refused = prepared(answer)
            if not refused:
                assert prepared(once) == (once, "")


@pytest.mark.slow  # one of them takes sympy seconds
@pytest.mark.gym
def test_agrees_with_gym_on_its_examples(math: Environment) -> None:
    if (found := find_spec("resources_servers")) is None or not found.submodule_search_locations:
        pytest.skip("nemo-gym is not installed")
    folder = Path(next(iter(found.submodule_search_locations))) / "math_with_judge"
    lines = (folder / "data" / "example_rollouts.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    for rollout in rollouts:
        parts = [
            part for item in rollout["response"]["output"] if item["type"] == "message" for part in item["content"]
        ]
        text = "".join(part["text"] for part in parts)
        assert verdict(math, text, answer=rollout["expected_answer"]).score == rollout["library_reward"]
    assert len(rollouts) == 5
