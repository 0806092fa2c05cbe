import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.rl.rewards.comparison import (
    GroupRewards,
    Judgement,
    LengthControl,
    base_rewards,
    circular_comparisons,
    group_rewards,
    length_weights,
)

Judgements = dict[tuple[int, int], Judgement | None]
NO_CONTROL = LengthControl(thinking=0, answer=0, thinking_bonus=0, answer_bonus=0)


def judgement(first: float, second: float, ranking: float = 3) -> Judgement:
    return Judgement(helpfulness=(first, second), ranking=ranking)


def honest(qualities: list[float], *, both_orders: bool = True) -> Judgements:
    """Judgements of a judge that knows the quality of each answer."""
    return {
        (one, other): judgement(qualities[one], qualities[other])
        for one, other in circular_comparisons(len(qualities), both_orders=both_orders)
    }


# Comparisons


@pytest.mark.parametrize(
    ("size", "pairs"),
    [(0, []), (1, []), (2, [(0, 1), (1, 0)]), (4, [(0, 1), (1, 2), (2, 3), (3, 0)])],
)
def test_each_is_compared_with_the_next(size: int, pairs: list[tuple[int, int]]) -> None:
    assert circular_comparisons(size) == pairs


@given(st.integers(2, 64))
def test_in_both_orders_each_is_first_as_often_as_second(size: int) -> None:
    pairs = circular_comparisons(size, both_orders=True)

    assert len(set(pairs)) == len(pairs) == (2 * size if size > 2 else 2)
    assert {(other, one) for one, other in pairs} == set(pairs)
    assert len(set(Counter(one for one, _ in pairs).values())) == 1


# Judgements


@pytest.mark.parametrize(
    ("given_", "scores"),
    [
        (judgement(4, 2, 6), (4, 2)),  # the ranking matters in a tie alone
        (judgement(3, 3, 1), (5.5, 0.5)),
        (judgement(3, 3, 4), (2.5, 3.5)),
        (judgement(5, 5, 1), (7.5, 2.5)),
        (judgement(1, 1, 3.5), (1, 1)),
    ],
)
def test_ties_are_broken_by_the_ranking(given_: Judgement, scores: tuple[float, float]) -> None:
    assert given_.scores == scores


@pytest.mark.parametrize(("first", "ranking"), [(0, 3), (6, 3), (math.nan, 3), (3, 0), (3, 7), (3, math.nan)])
def test_judgements_are_in_range(first: float, ranking: float) -> None:
    with pytest.raises(ValueError, match="expected"):
        judgement(first, 3, ranking)


# Base rewards


def test_base_is_the_mean_over_both_matches() -> None:
    judgements: Judgements = {(0, 1): judgement(4, 2), (1, 2): judgement(3, 5), (2, 0): judgement(1, 2)}

    assert base_rewards(3, judgements) == (((4 + 2) / 2, (2 + 3) / 2, (5 + 1) / 2), (True, True, True))


def test_a_match_that_was_judged_in_one_order_only_weighs_as_much_as_the_other() -> None:
    judgements: Judgements = {(0, 1): judgement(4, 2), (1, 0): judgement(1, 5), (1, 2): judgement(3, 5), (2, 1): None}

    base, _ = base_rewards(3, judgements)

    assert base[1] == ((2 + 1) / 2 + 3) / 2


def test_a_response_without_a_match_gets_the_mean_of_the_others() -> None:
    judgements: Judgements = {(0, 1): judgement(5, 2), (1, 2): None, (2, 3): None, (3, 0): None}

    assert base_rewards(4, judgements) == ((5, 2, 3.5, 3.5), (True, True, False, False))


@pytest.mark.parametrize("judgements", [{}, {(0, 1): None, (1, 2): None, (2, 0): None}], ids=str)
def test_without_any_judgement_all_are_neutral(judgements: Judgements) -> None:
    assert base_rewards(3, judgements) == ((3, 3, 3), (False, False, False))


# Lengths


@pytest.mark.parametrize(
    ("lengths", "weights"),
    [
        ([], ()),
        ([7], (0,)),
        ([7, 7, 7], (0, 0, 0)),
        ([10, 30], (0.5, -0.5)),
        ([0, 100, 50], (0.5, -0.5, 0)),
        ([10, 20, 20, 30], (0.5, 0, 0, -0.5)),
    ],
)
def test_length_weights(lengths: list[int], weights: tuple[float, ...]) -> None:
    assert length_weights(lengths) == weights


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=32))
def test_length_weights_are_zero_sum_and_fall_with_length(lengths: list[int]) -> None:
    weights = length_weights(lengths)

    assert sum(weights) == pytest.approx(0, abs=1e-9)
    for (shorter, more), (longer, less) in pairwise(sorted(zip(lengths, weights, strict=True))):
        assert more >= less if shorter == longer else more > less


# Both


def test_the_paper_s_reward_by_hand() -> None:
    # Qualities 5, 4, 3, 2, 1; their 80th percentile is 4.2, so only the first may have a bonus.
    rewards = group_rewards(
        honest([5, 4, 3, 2, 1]), thinking_lengths=[10, 20, 30, 40, 50], answer_lengths=[40, 30, 20, 10, 10]
    )

    assert rewards.base == (5, 4, 3, 2, 1)
    thinking = [0.5, 0.25, 0, -0.25, -0.5]
    mean = (0 + 1 / 3 + 2 / 3 + 1 + 1) / 5
    answer = [0 - mean, 1 / 3 - mean, 2 / 3 - mean, 1 - mean, 1 - mean]
    assert rewards.length == pytest.approx([(one + other) / 2 for one, other in zip(thinking, answer, strict=True)])
    assert rewards.bonus == (0.5, 0, 0, 0, 0)
    assert rewards.rewards == pytest.approx(
        list(map(sum, zip(rewards.base, rewards.length, rewards.bonus, strict=True)))
    )
    assert (rewards.judged, rewards.missing) == ((True,) * 5, 0)


def test_the_shortest_has_a_bonus_only_if_it_is_good() -> None:
    def bonus(qualities: list[float]) -> tuple[float, ...]:
        return group_rewards(honest(qualities), thinking_lengths=[1, 9, 9, 9], answer_lengths=[1, 9, 9, 9]).bonus

    assert bonus([5, 1, 1, 1]) == (1.0, 0, 0, 0)
    assert bonus([1, 5, 5, 5]) == (0, 0, 0, 0)
    assert bonus([3, 3, 3, 3])[1:] == (0, 0, 0)


def test_the_threshold_itself_is_not_above_the_threshold() -> None:
    equal: Judgements = {pair: judgement(3, 3, 3.5) for pair in circular_comparisons(4)}

    assert group_rewards(equal, thinking_lengths=[1, 2, 3, 4], answer_lengths=[1, 2, 3, 4]).bonus == (0, 0, 0, 0)


def test_the_equally_short_are_treated_equally() -> None:
    qualities = [5.0, 5.0] + [1.0] * 14
    rewards = group_rewards(
        {(0, 2): judgement(5, 1), (1, 3): judgement(5, 1)} | {(n, n + 1): judgement(1, 2) for n in range(4, 15)},
        thinking_lengths=[1, 1] + [9] * 14,
        answer_lengths=[5] * len(qualities),
    )

    assert rewards.bonus[:2] == (1.0, 1.0)  # the shortest traces; all answers are equally short


def test_an_empty_answer_is_not_a_short_answer() -> None:
    rewards = group_rewards(honest([5, 4, 2, 2]), thinking_lengths=[0, 9, 9, 9], answer_lengths=[0, 5, 10, 10])

    assert rewards.length[0] == pytest.approx(0.5 * 0.75 + 0.5 * (0 - 0.25))
    assert rewards.bonus[0] == 0


def test_without_any_judgement_brevity_earns_nothing() -> None:
    rewards = group_rewards(
        dict.fromkeys(circular_comparisons(4)), thinking_lengths=[1, 2, 3, 4], answer_lengths=[4, 3, 2, 1]
    )

    assert rewards.rewards == (3, 3, 3, 3)
    assert (rewards.judged, rewards.missing) == ((False,) * 4, 4)


def test_a_response_that_was_not_judged_can_have_no_bonus() -> None:
    tie = judgement(1, 1, 3.5)
    judgements: Judgements = {(1, 2): judgement(5, 1), (3, 4): tie, (5, 6): tie, (6, 0): None}

    rewards = group_rewards(judgements, thinking_lengths=[1] + [9] * 6, answer_lengths=[1] + [9] * 6)

    # Its base, the mean of 5, 1, 1, 1, 1, 1, is above their 80th percentile.
    assert rewards.base[0] == pytest.approx(10 / 6)
    assert rewards.bonus == (0,) * 7


@pytest.mark.parametrize("size", [0, 1])
def test_groups_too_small_to_compare(size: int) -> None:
    rewards = group_rewards({}, thinking_lengths=[5] * size, answer_lengths=[5] * size)

    assert rewards.rewards == (3.0,) * size


def test_two_responses() -> None:
    judgements: Judgements = {(0, 1): judgement(4, 2), (1, 0): judgement(3, 5)}

    rewards = group_rewards(judgements, thinking_lengths=[9, 9], answer_lengths=[8, 4])

    assert rewards.base == (4.5, 2.5)
    assert rewards.length == (-0.25, 0.25)
    assert rewards.bonus == (0.5, 0)  # as short a trace as the other, and better


judgements_of = st.builds(judgement, st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))


@st.composite
def groups(draw: st.DrawFn) -> tuple[Judgements, list[int], list[int]]:
    size = draw(st.integers(1, 12))
    pairs = circular_comparisons(size, both_orders=draw(st.booleans()))
    judgements = {pair: draw(st.none() | judgements_of) for pair in pairs}
    lengths = st.lists(st.integers(0, 50), min_size=size, max_size=size)
    return judgements, draw(lengths), draw(lengths)


def rewards_of(judgements: Judgements, thinking: list[int], answer: list[int]) -> GroupRewards:
    return group_rewards(judgements, thinking_lengths=thinking, answer_lengths=answer)


@given(groups(), st.data())
def test_rewards_follow_their_responses(group: tuple[Judgements, list[int], list[int]], data: st.DataObject) -> None:
    judgements, thinking, answer = group
    order = data.draw(st.permutations(range(len(thinking))))
    renamed = {(order.index(one), order.index(other)): given_ for (one, other), given_ in judgements.items()}

    rewards = rewards_of(judgements, thinking, answer)
    moved = rewards_of(renamed, [thinking[place] for place in order], [answer[place] for place in order])

    assert moved.rewards == pytest.approx([rewards.rewards[place] for place in order])


@given(groups())
def test_rewards_are_finite_and_bounded_and_lengths_sum_to_zero(group: tuple[Judgements, list[int], list[int]]) -> None:
    rewards = rewards_of(*group)

    assert all(-1.5 <= base <= 7.5 for base in rewards.base)
    assert all(-1 < length < 1 for length in rewards.length)
    assert sum(rewards.length) == pytest.approx(0, abs=1e-9)
    assert set(rewards.bonus) <= {0, 0.5, 1.0}
    assert all(map(math.isfinite, rewards.rewards))


@given(groups())
def test_control_off_leaves_the_base(group: tuple[Judgements, list[int], list[int]]) -> None:
    judgements, thinking, answer = group

    rewards = group_rewards(judgements, thinking_lengths=thinking, answer_lengths=answer, control=NO_CONTROL)

    assert rewards.rewards == rewards.base


def test_a_preference_for_the_first_response_cancels_in_both_orders() -> None:
    biased: Judgements = {pair: judgement(5, 1) for pair in circular_comparisons(6)}

    assert set(base_rewards(6, biased)[0]) == {3}


@pytest.mark.parametrize(
    "wrong", [{"thinking": -1}, {"answer_bonus": math.nan}, {"percentile": 101}, {"percentile": math.nan}]
)
def test_control_is_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LengthControl(**wrong)


@pytest.mark.gym
@given(
    st.integers(2, 16).flatmap(
        lambda size: st.tuples(
            st.lists(judgements_of, min_size=2 * size, max_size=2 * size),
            st.lists(st.integers(1, 40), min_size=size, max_size=size),
            st.lists(st.integers(1, 40), min_size=size, max_size=size),
        )
    ),
    st.booleans(),
)
def test_agrees_with_nemo_gym_but_for_the_bonus(
    drawn: tuple[list[Judgement], list[int], list[int]], both_orders: bool
) -> None:
    gym = pytest.importorskip("resources_servers.genrm_compare.utils")
    given_, thinking, answer = drawn
    pairs = circular_comparisons(len(thinking), both_orders=both_orders)
    judgements = dict(zip(pairs, given_, strict=False))
    objects = [
        {
            "output": [
                {"type": "reasoning", "summary": [{"text": "t" * trace}]},
                {"type": "message", "content": [{"type": "output_text", "text": "a" * length}]},
            ]
        }
        for trace, length in zip(thinking, answer, strict=True)
    ]

    theirs, _, their_base, _ = gym.aggregate_scores(
        comparison_results=[(*judged.helpfulness, judged.ranking) for judged in judgements.values()],
        comparison_metadata=[(*pair, 0) for pair in pairs],
        response_objs=objects,
        aggregator_method="simple_tiebreaker",
        default_score=3.0,
        reasoning_bonus=0.0,
        answer_bonus=0.0,
        top_percentile=0.2,
        group_reasoning_length_penalty_coeff=0.5,
        group_answer_length_penalty_coeff=0.5,
    )
    ours = group_rewards(
        judgements,
        thinking_lengths=thinking,
        answer_lengths=answer,
        control=LengthControl(thinking_bonus=0, answer_bonus=0),
    )

    assert ours.base == pytest.approx(their_base)
    assert ours.rewards == pytest.approx(theirs)


@pytest.mark.gym
@pytest.mark.parametrize("size", [3, 4, 16])
def test_compares_the_pairs_that_nemo_gym_does(size: int) -> None:
    gym = pytest.importorskip("resources_servers.genrm_compare.utils")

    assert circular_comparisons(size, both_orders=False) == gym.generate_comparison_pairs("circular", size)
