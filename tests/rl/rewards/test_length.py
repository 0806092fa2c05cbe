import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.chat.response import parse_response
from nemo_ext.rl.rewards.length import linear_length_penalty, overlong_mask, overlong_penalty


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (4096, -0.125), (8192, -0.25), (100_000, -0.25)])
def test_domyn_s_linear_penalty(tokens: int, penalty: float) -> None:
    assert linear_length_penalty(tokens) == penalty


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0), (16_384, 0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1), (20_481, -1)]
)
def test_dapo_s_overlong_penalty(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_tokens=20_480, buffer_tokens=4096) == penalty


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 10**6), st.data())
def test_longer_is_never_better(one: int, other: int, max_tokens: int, data: st.DataObject) -> None:
    shorter, longer = sorted((one, other))
    buffer_tokens = data.draw(st.integers(1, max_tokens))
    limits = {"max_tokens": max_tokens, "buffer_tokens": buffer_tokens}

    assert 0 >= linear_length_penalty(shorter) >= linear_length_penalty(longer) >= -0.25
    assert 0 >= overlong_penalty(shorter, **limits) >= overlong_penalty(longer, **limits) >= -1


@pytest.mark.parametrize("buffer_tokens", [0, -1, 11])
def test_the_buffer_is_part_of_the_length(buffer_tokens: int) -> None:
    with pytest.raises(ValueError, match="buffer_tokens must be from 1 to max_tokens=10"):
        overlong_penalty(3, max_tokens=10, buffer_tokens=buffer_tokens)


def test_lengths_are_checked() -> None:
    with pytest.raises(ValueError, match="tokens must be at least 0, not -1"):
        linear_length_penalty(-1)
    with pytest.raises(ValueError, match="max_tokens must be positive, not 0"):
        linear_length_penalty(1, max_tokens=0)


def test_responses_that_were_cut_off_are_masked() -> None:
    assert overlong_mask([parse_response("a"), parse_response("b", finished=False)]) == [True, False]
