import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nemo_ext.rl.rewards.advantages import group_advantages, zero_variance

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0]


def test_group_normalised() -> None:
    expected = (np.array(REWARDS) - 0.4) / (np.sqrt(0.24) + 1e-6)

    np.testing.assert_allclose(group_advantages(REWARDS), expected)


def test_mean_without_std() -> None:
    np.testing.assert_allclose(group_advantages(REWARDS, normalise="none"), np.array(REWARDS) - 0.4)


def test_leave_one_out_with_unbiased_std() -> None:
    baselines = [0.25, 0.5, 0.5, 0.25, 0.5]
    deviation = torch.tensor(REWARDS).std(unbiased=True).item() + 1e-6

    advantages = group_advantages(REWARDS, baseline="leave_one_out", normalise="unbiased_std")

    np.testing.assert_allclose(advantages, (np.array(REWARDS) - baselines) / deviation, rtol=1e-5)


def test_groups_are_along_the_last_axis() -> None:
    batch = [REWARDS, [1.0] * 5]

    advantages = group_advantages(batch)

    np.testing.assert_array_equal(advantages[0], group_advantages(REWARDS))
    np.testing.assert_array_equal(advantages[1], 0)
    np.testing.assert_array_equal(zero_variance(batch), [False, True])


groups = arrays(np.float64, st.integers(2, 16), elements=st.integers(-300, 300).map(lambda whole: whole / 100))
rules = [
    (baseline, normalise) for baseline in ("mean", "leave_one_out") for normalise in ("std", "unbiased_std", "none")
]


@pytest.mark.parametrize(("baseline", "normalise"), rules)
@given(group=groups, data=st.data())
def test_advantages_sum_to_zero_and_follow_their_responses(baseline, normalise, group, data) -> None:  # type: ignore[no-untyped-def]
    order = data.draw(st.permutations(range(len(group))))

    advantages = group_advantages(group, baseline=baseline, normalise=normalise)
    shifted = group_advantages(group + 5, baseline=baseline, normalise=normalise)

    assert abs(advantages.sum()) < 1e-6
    reordered = group_advantages(group[order], baseline=baseline, normalise=normalise)
    np.testing.assert_allclose(reordered, advantages[order], atol=1e-9)
    np.testing.assert_allclose(shifted, advantages, atol=1e-6)


@pytest.mark.parametrize(("baseline", "normalise"), rules)
@pytest.mark.parametrize("group", [[0.1] * 7, [1 / 3] * 3, [5.0]], ids=str)
def test_nothing_is_learnt_without_variance(baseline, normalise, group) -> None:  # type: ignore[no-untyped-def]
    assert not group_advantages(group, baseline=baseline, normalise=normalise, epsilon=0.0).any()


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8))
def test_leave_one_out_is_the_mean_of_the_others(rewards: list[float]) -> None:
    advantages = group_advantages(rewards, baseline="leave_one_out", normalise="none")

    for place, reward in enumerate(rewards):
        others = rewards[:place] + rewards[place + 1 :]
        assert advantages[place] == pytest.approx(reward - np.mean(others), abs=1e-9)


@pytest.mark.parametrize("rewards", [[1.0, np.nan], [np.inf, 0.0], [], 3.0, np.zeros((2, 0))], ids=str)
def test_rewards_are_checked(rewards: object) -> None:
    with pytest.raises(ValueError, match=r"rewards (must have shape|are not finite)"):
        group_advantages(rewards)  # type: ignore[arg-type]
