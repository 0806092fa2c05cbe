"""Adversarial and random answers: no verifier raises, hangs or rewards them."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.environments import Environment, make
from nemo_ext.rl.rewards.format import domyn_format, think_tags
from nemo_ext.rl.verdict import Verdict

LONG = 200_000
"""Number of characters, at which quadratic work would take minutes."""
REFERENCES = {
    "math": {"answer": r"\frac{7919}{104729}"},
    "multiple_choice": {"answer": "C", "choices": ["red", "green", "blue", "none of these"]},
    "structured_output": {
        "schema": {"type": "object", "properties": {"n": {"const": 7919}}, "required": ["n"], "minProperties": 2}
    },
}


def _boxed(content: str) -> str:
    return f"\\boxed{{{content}}}"


ADVERSARIAL = {
    "empty": "",
    "white space": " \n\t" * 1000,
    "a long text": "a" * LONG,
    "very many digits": _boxed("9" * LONG),
    "very many boxes": r"\boxed{1}" * (LONG // 9),
    "very many open boxes": r"\boxed{" * (LONG // 7),
    "boxes in boxes": r"\boxed{" * (LONG // 8) + "}" * (LONG // 8),
    "the right number in two boxes": _boxed(_boxed(r"\frac{7919}{104729}")),
    "the right letter in two boxes": _boxed(_boxed("C")),
    "every answer": "".join(map(_boxed, "ABCD")),
    "every answer at once": _boxed("A, B, C, D"),
    "every phrase": "Answer: C Answer: A or C",
    "braces": _boxed("{" * 100_000 + "}" * 100_000),
    "brackets": _boxed("(" * 240 + "1" + ")" * 240),
    "phrases": "answer is " * (LONG // 10),
    "binary": bytes(range(256)).decode("latin-1") * 100,
    "nul": _boxed("7919/104729\x00"),
    "surrogates": _boxed("\ud800\udfff7919/104729"),
    "unicode digits": _boxed("７９１９/１０４７２９"),
    "arabic digits": _boxed("٧٩١٩/١٠٤٧٢٩"),
    "unicode letter": _boxed("Ｃ"),
    "cyrillic letter": _boxed("С"),
    "a zero-width space": _boxed("7919/104729\u200b"),
    "nan": _boxed("NaN"),
    "infinity": _boxed(r"\infty"),
    "0/0": _boxed(r"\frac{0}{0}"),
    "division by zero": _boxed("1/0"),
    "a tower": _boxed("9^{9^{9^{9}}}"),
    "a factorial": _boxed("99999999999!"),
    "a long sum": _boxed(r"\sum_{i=1}^{10^{12}} \sin(i)"),
    "an integral": _boxed(r"\int_0^1 x^{x^{x}} dx"),
    "latex files": _boxed(r"\input{/etc/passwd}"),
    "latex macros": _boxed(r"\def\a{\a\a}\a"),
    "latex loops": r"\loop\boxed{1}\repeat",
    "unknown": _boxed("x"),
    "an equation of everything": _boxed("x=x"),
    "all numbers": _boxed(r"\mathbb{R}"),
    "a word": _boxed(r"\text{correct}"),
    "code": _boxed("__import__('os').system('true')"),
    "a matrix": _boxed(r"\begin{pmatrix}" + "&".join("1" * 100) + r"\end{pmatrix}"),
    "an object": '{"outcome": "correct", "score": 1}',
    "json nan": '{"n": NaN, "m": 1}',
    "json infinity": '{"n": 1e999, "m": Infinity}',
    "json lists": "[" * LONG,
    "json objects": '{"n":' * (LONG // 5),
    "json strings": '["' * (LONG // 2),
    "json escapes": '"' + "\\" * LONG,
    "json keys": "{" + ",".join(f'"k{i}":1' for i in range(10_000)) + "}",
    "json twice": '{"n": 1, "n": 7919, "m": 1}',
    "json digits": '{"n": ' + "7" * 100_000 + ', "m": 1}',
    "json behind text": 'Sure! {"n": 7919, "m": 1}',
    "fences": "```json\n" * 100_000,
    "fence in fence": '```json\n```json\n{"n": 7919, "m": 1}\n```\n```',
    "byte order mark": '\ufeff{"n": 7919, "m": 1}',
    "right answers in thought": "<think>" + _boxed("7919/104729") + '{"n": 7919, "m": 1} Answer: C',
    "thought without end": "<think>" * 100_000,
    "thought closed twice": "</think>" * 100_000,
    "ansi": _boxed("\x1b[31mC\x1b[0m"),
}


@pytest.fixture(scope="module", params=REFERENCES)
def environment(request: pytest.FixtureRequest) -> Iterator[tuple[Environment, object]]:
    limits = {} if request.param == "multiple_choice" else {"time_limit": 0.5, "workers": 1}
    made = make(request.param, limits)
    return made, made.check(REFERENCES[request.param])


def unrewarded(environment: tuple[Environment, object], text: str) -> Verdict:
    made, reference = environment
    assert made.verify is not None
    verdict = made.verify(parse_response(text), reference)
    assert isinstance(verdict, Verdict)
    assert verdict.outcome != "correct" and verdict.score == 0, (text[:200], verdict)
    # Reports must be short enough for a log.
    assert len(verdict.reason) <= 400 and len(verdict.answer or "") <= 1000
    return verdict


HANG = ("a factorial", "a long sum", "a tower")
"""Cases that hang in sympy; the integral does too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in HANG else name for name in ADVERSARIAL]
)
def test_adversarial_answers_earn_nothing(environment: tuple[Environment, object], name: str) -> None:
    unrewarded(environment, ADVERSARIAL[name])


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_format_scores_stay_in_range(name: str) -> None:
    response = parse_response(ADVERSARIAL[name])
    for thinking in (True, False):
        assert 0 <= domyn_format(response, thinking=thinking) <= 1
        assert think_tags(response, thinking=thinking) in (0, 1)


TOKENS = [
    *r"0123456789+-*/^_=<>()[]{}|!%,.;:&xyei ",
    *(r"\frac", r"\sqrt", r"\boxed{", "}", r"\text{", r"\pi", r"\infty", r"\cup", r"\{", r"\}", r"\left(", r"\right)"),
    *(
        r"\sum_{",
        r"\int",
        r"\log",
        r"\cdot",
        r"\pm",
        r"\begin{matrix}",
        r"\end{matrix}",
        "\\\\",
        "$",
        "\n",
        "and",
        "or",
    ),
]
SOUP = st.lists(st.sampled_from(TOKENS), max_size=25).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("nm"), inner, max_size=2),
)
ANSWERS = SOUP.map(_boxed) | SOUP | st.text() | st.binary().map(lambda raw: raw.decode("latin-1")) | JSON.map(repr)
WITHOUT_C = ANSWERS.filter(lambda text: "C" not in text.upper() and "blue" not in text.lower())


@settings(suppress_health_check=list(HealthCheck))
@given(text=WITHOUT_C)
def test_random_answers_earn_nothing(environment: tuple[Environment, object], text: str) -> None:
    unrewarded(environment, text)


@pytest.mark.deep
@settings(max_examples=3000, suppress_health_check=list(HealthCheck))
@given(text=WITHOUT_C)
def test_many_random_answers_earn_nothing(environment: tuple[Environment, object], text: str) -> None:
    unrewarded(environment, text)
