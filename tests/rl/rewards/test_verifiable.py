import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.rewards.format import domyn_format, think_tags
from nemo_ext.rl.rewards.verifiable import (
    accuracy_format_reward,
    domyn_math_reward,
    linear_length_penalty,
    outcome_reward,
)
from nemo_ext.rl.verdict import Verdict

CORRECT, WRONG, ERROR = Verdict.correct(), Verdict.wrong("7"), Verdict.error("time limit")
HALF = Verdict.wrong("3 of 6 tests", score=0.5)


@pytest.mark.parametrize(
    ("verdict", "format_score", "tokens", "total"),
    [
        (CORRECT, 1.0, 0, 4.0),
        (CORRECT, 1.0, 8192, 3.75),
        (CORRECT, 0.5, 4096, 3.375),
        (WRONG, 1.0, 0, 1.0),
        (HALF, 0.0, 0, 0.0),
        (ERROR, 0.0, 0, -2.4),
        (ERROR, 0.0, 9000, -2.65),
    ],
)
def test_domyn_math_reward(verdict: Verdict, format_score: float, tokens: int, total: float) -> None:
    reward = domyn_math_reward(verdict, format_score=format_score, tokens=tokens)

    assert reward.total == pytest.approx(total)
    assert set(reward.parts) == {"correctness", "format", "length"}


def test_domyn_math_reward_of_a_whole_response() -> None:
    response = parse_response("<think>1 + 1</think>It is \\boxed{2}.", tokens=2048)

    on, off = (
        domyn_math_reward(CORRECT, format_score=domyn_format(response, thinking=thinking), tokens=2048).total
        for thinking in (True, False)
    )

    assert (on, off) == (3 + 1 - 0.0625, 3 + 0.5 - 0.0625)


@given(st.sampled_from([CORRECT, WRONG, HALF, ERROR]), st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 10**9))
def test_domyn_s_reward_never_leaves_its_range(verdict: Verdict, format_score: float, tokens: int) -> None:
    assert -2.65 - 1e-9 <= domyn_math_reward(verdict, format_score=format_score, tokens=tokens).total <= 4


def test_a_wrong_answer_in_form_earns_less_than_a_right_one_out_of_form() -> None:
    wrong = domyn_math_reward(WRONG, format_score=1.0, tokens=0).total
    right = domyn_math_reward(CORRECT, format_score=0.0, tokens=8192).total

    assert wrong < right


@pytest.mark.parametrize(("verdict", "reward"), [(CORRECT, 1.0), (WRONG, 0.0), (HALF, 0.0), (ERROR, 0.0)])
def test_outcome_reward_is_binary(verdict: Verdict, reward: float) -> None:
    assert outcome_reward(verdict) == reward


def test_accuracy_and_format() -> None:
    response = parse_response("<think>hm</think>yes")
    reward = accuracy_format_reward(CORRECT, format_score=think_tags(response, thinking=False), format_weight=0.2)

    assert reward.parts == {"accuracy": 1.0, "format": 0.0}
    assert accuracy_format_reward(WRONG, format_score=1.0, format_weight=0.2).total == 0.2


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (4096, -0.125), (8192, -0.25), (100_000, -0.25)])
def test_domyn_s_linear_penalty(tokens: int, penalty: float) -> None:
    assert linear_length_penalty(tokens) == penalty
