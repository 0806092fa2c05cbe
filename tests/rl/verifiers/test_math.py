import csv
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.verdict import Verdict
from nemo_ext.rl.verifiers.math import MAX_DEPTH, _apart, check, difference, prepared
from tests.rl.verdicts import verdict_on


@pytest.fixture(scope="module")
def math() -> Iterator[Environment]:
    return make("math", {"time_limit": 20, "workers": 2})


def verdict(math: Environment, text: str, **reference: Any) -> Verdict:
    return verdict_on(math, text, reference)


_, *CASES = map(tuple, csv.reader((Path(__file__).parent / "math_cases.csv").open(newline="")))
"""Kind, reference, answer, and whether it is mathematically right, whatever a verifier says."""
KNOWN = {("17", r"\text{The answer is }17")}
"""Right answers that the verifier rejects."""


def outcome(reference: str, answer: str) -> str:
    """Verdict on a boxed answer, computed in this process instead of a worker."""
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
    ("reference", "right", "wrong"),
    [
        ("12:30 PM", "12:30 p.m.; 12:30\\text{ p.m.}", "12:30 a.m.; 12:30; 12:31 p.m."),
        ("12", "12\\ ; 12\\; 12\\,.; 12\\quad; \\ 12; 12 \\\\", "12..; 12\\ 3; 12!"),
        ("50\\,\\Omega", "50; 50\\text{ ohms}; 50\\ \\Omega; 0.05\\,k\\Omega", "5; 50\\text{ V}; 50\\,k\\Omega"),
        ("5\\,\\mu\\text{F}", "5; 5\\,\\mu F", "5\\text{ mF}"),
        ("100^\\circ\\text{C}", "100; 100\\,{}^{\\circ}\\text{C}", "10; 100^\\circ F"),
        ("5\\text{ cm}", "5\\text{ cm}", "5\\text{ in}; 5\\text{ A}; 5\\text{ in.}"),
        ("5\\text{ in}", "5; 5\\text{ inches}; 12.7\\text{ cm}", "5\\text{ cm}; 5\\text{ ft}; 5\\text{ in}^2"),
        ("5\\text{ square inches}", "5\\text{ in}^2; 5\\text{ sq in}", "5\\text{ in}; 5\\text{ cm}^2"),
        ("50\\text{ A}", "50; 50\\text{ amps}; 50\\mathrm{~A}; 50 A", "50\\text{ V}; 50\\,\\Omega"),
        ("3\\text{ in a row}", "3; 3\\text{ in a row}", "4\\text{ in a row}"),
        ("E(X)=2", "2; E[X]=2; \\mathbb{E}[X]=2", "\\mathrm{Var}(X)=2; E[X]=3"),
        ("f(2)=3", "3; f(2)=3; f\\left(2\\right)=3", "g(2)=3; f(3)=3; f(x)=3"),
        ("28\\%", "28\\text{ pct}; 28\\text{ percentage}", "29\\text{ pct}"),
        ("3\\text{ more apples}", "3; 3\\text{ apples}; 3\\text{ more}", "3\\text{ fewer apples}; 4\\text{ apples}"),
        (
            "3",
            "3\\text{ more apples}",
            "3\\text{ or more}; 3\\text{ more than }4; 3\\text{ times more}; 3\\text{ more or less}",
        ),
        ("x=1, 2", "x=1, x=2; 1, 2; x=1\\text{ or }x=2; x\\in\\{1,2\\}", "y=1, 2; x=1; x=1, x=3; x=1, y=2; x=1, 2, 3"),
        ("n=3, n=5, n=7", "n=3, 5, 7", "n=3, 5"),
        ("1:2:3", "2:4:6; \\frac12:1:\\frac32", "1:3:2; \\frac16; 1:6; 1:2; 0:0:0"),
        ("a:b:c=1:2:3", "1:2:3; a:b:c=2:4:6", "b:a:c=1:2:3; 3:2:1"),
        ("\\frac{AB}{BC}=\\frac12", "\\frac12", "2; \\frac{BC}{AB}=\\frac12"),
        ("\\frac{5}{36}", "13.8889\\%; 13.88889\\%", "13.8888\\%; 13.89\\%; 13.8889"),
        ("x-3", "f^{-1}(x)=x-3", "f^{-1}(x)=x+3; f^{-1}(x)"),
        ("f^{-1}(x)=x-3", "x-3; y=x-3", "f(x)=x-3"),
        (
            "12",
            "\\gcd(24,36)=12; \\text{gcd}(24, 36)=12; \\max f=12; |A\\cup B|=12",
            "\\gcd(24,36); \\gcd(2,3)=12; |x-1|=12",
        ),
        (
            "\\frac13",
            "P(A|B)=\\frac13; P(A\\mid B)=\\frac13; \\Pr(X>2)=\\frac13; \\mathbb{E}[X]=\\frac13",
            "P(A|B)=\\frac14",
        ),
        (
            "5",
            "\\int_0^1 f(x)dx=5; x_{\\max}=5",
            "\\max\\text{ maybe}=5; \\text{not }x=5; P(A)=5\\text{ or }6; \\log_2 x=5",
        ),
        ("220\\,\\text{V}", "220 V; 220\\text{ volts}", "221 V; 220 W; 220 x"),
        ("12\\text{ m/s}", "12 m/s; 12\\frac{m}{s}", "12 m; 12 ms; 12 s/m"),
        ("3\\pmod{4}", "3; x\\equiv 3\\pmod 4; 7 \\pmod 4; 3\\ (\\text{mod }4)", "3\\pmod 5; 7; x\\equiv 3; 2\\pmod 4"),
        ("x\\equiv 1, 5\\pmod 6", "5, 1\\pmod 6", "1\\pmod 6; x=1"),
        (
            "\\sqrt{\\frac1n}",
            "\\frac1{\\sqrt n}; n^{-1/2}; \\frac{\\sqrt n}{n}",
            "\\sqrt n; -\\frac1{\\sqrt n}; \\sqrt{\\frac1{2n}}",
        ),
        ("2\\ln x", "\\ln x^2", "\\ln 2x"),
        ("|x|", "\\sqrt{x^2}", "x"),
        ("(-1)^n", "\\cos(n\\pi); (-1)^{n+2}", "1; -1; (-1)^{n+1}"),
        ("(-1)^{n(n+1)/2}", "", "1; -1; (-1)^n"),
        ("2k\\pi", "2n\\pi; 2\\pi m", "2x\\pi; k\\pi; (2n+1)\\pi"),
        ("x=2k\\pi, k\\in\\mathbb{Z}", "2n\\pi; x=2\\pi n\\ (n\\in\\mathbb{Z})", "x=2n\\pi, n\\in\\mathbb{N}"),
        ("n^2", "", "k^2"),
        ("x^2+C", "x^2+c; C_1+x^2", "x^2; x^2+1; x^2+C^2; x^2+x"),
        ("y=Ce^{x}", "y=ce^x", "y=e^x; y=Ce^{2x}"),
        ("a+b+c", "", "a+b+C"),
        ("\\{1,2\\}", "2, 1; \\{1\\}\\cup\\{2\\}", "\\{1\\},\\{2\\}; \\{\\{1\\},\\{2\\}\\}"),
        ("\\{1\\},\\{2\\}", "\\{2\\},\\{1\\}", "\\{1,2\\}; 1, 2"),
        ("A^{-1}B", "(A^{-1})B", "BA^{-1}; AB^{-1}"),
        ("PDP^{-1}", "", "P^{-1}DP; D"),
        ("(AB)^T", "B^TA^T", "A^TB^T"),
        ("ab^{-1}", "b^{-1}a; \\frac ab", "a^{-1}b"),
        ("C, A, B", "C,A,B", "A, B, C"),
        ("A, C", "C, A", "A, B"),
        ("a<b<c", "c>b>a", "a<c<b; c<b<a"),
    ],
)
def test_answers_of_the_same_meaning(reference: str, right: str, wrong: str) -> None:
    answers = {**dict.fromkeys(filter(None, right.split("; ")), "right"), **dict.fromkeys(wrong.split("; "), "wrong")}

    assert {answer: outcome(reference, answer) for answer in answers} == answers


@pytest.mark.parametrize(
    ("expected", "answer", "reason"),
    [
        ("92", "36 + 56", "not worked out"),
        ("12", r"\frac{84}{7}", "not worked out"),
        ("1", r"\ln e", "not worked out"),
        ("10000", r"\sum_{k=1}^{100} (2k-1)", "not worked out"),
        ("2x", r"\frac{d}{dx} x^{2}", "not worked out"),
        (r"2\sqrt{3}", r"\sqrt{12}\cdot 0!", "not worked out"),
        ("6", "4 2", "not a value: numbers side by side without an operator"),
        ("5", r"5\text{ maybe}", "not a value: unexpected 'maybe' after a value"),
        (r"\sum_{k} k", r"\sum_{k} k\text{ maybe}", "different words"),
        ("5", "6", "different answer"),
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
def test_where_the_answer_is_read_from(math: Environment, format: str, text: str, outcome: str) -> None:
    assert verdict(math, text, answer="42", format=format).outcome == outcome


@pytest.mark.parametrize("answer", [r"\log_2 3", r"2\log_3 5", r"\log_2 8", "x^2 3", r"\sum_{k} k", r"\text{June 5}"])
def test_references_in_the_grammar_or_known_to_math_verify_are_accepted(answer: str) -> None:
    assert check({"answer": answer}).answer == answer


def test_no_number_equals_a_product_with_infinity() -> None:
    from sympy import E, Integer, Mul, oo

    # math-verify 0.9 once considered these equal, though mostly it does not.
    assert _apart(Integer(1), Mul(3, oo, E, evaluate=False))
    assert not _apart(oo, Mul(3, oo, E, evaluate=False))


def test_exceeding_the_time_limit_is_an_error() -> None:
    math = make("math", {"time_limit": 0.02, "workers": 1})
    found = verdict(math, r"\boxed{\int_0^1 x^{x^{x}} dx}", answer=r"\int_0^1 x^{x} dx")
    assert found.outcome == "error" and "time limit of 0.02 s" in found.reason and found.score == 0


def test_long_and_deep_answers_are_wrong_without_being_parsed() -> None:
    math = make("math", {"time_limit": 1, "workers": 1, "max_length": 100})
    assert verdict(math, r"\boxed{" + "9" * 101 + "}", answer="2").outcome == "wrong"
    deep = "{" * (MAX_DEPTH + 1) + "}" * (MAX_DEPTH + 1)
    assert "nested deeper" in verdict(math, rf"\boxed{{{deep}}}", answer="2").reason


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


def test_a_reference_may_be_a_number() -> None:
    assert check({"answer": 42}).answer == "42"
    assert check({"answer": 0.5}).answer == "0.5"


def test_settings_that_cannot_be_used_are_named() -> None:
    for setting in ({"time_limit": 0}, {"workers": 0}, {"max_length": 0}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            make("math", setting)


def test_math_verify_s_verdict_is_reported_with_ours() -> None:
    both = make("math", {"time_limit": 20, "workers": 1, "math_verify": True})

    found = [
        verdict(both, text, answer="92")
        for text in (r"It is \boxed{92}.", r"\boxed{36 + 56}", "The answer is 92.", r"\boxed{93}", "")
    ]

    assert [each.score for each in found] == [1, 0, 0, 0, 0]  # not worked out, no box
    assert [each.more for each in found] == [{"math_verify": float(number)} for number in (1, 1, 1, 0, 0)]
    assert verdict(make("math"), r"\boxed{92}", answer="92").more == {}
