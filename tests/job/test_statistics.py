"""Statistics compared with scipy and numpy, and properties that hold for any scores."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.job import statistics
from nemo_ext.job.statistics import (
    bootstrap,
    difference,
    grand_mean,
    holm,
    maj_at,
    mcnemar,
    pass_at,
    permutation,
    problem_means,
    sensitivity,
    signal_and_noise,
)

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=30)


def scores(count: int, *, seed: int = 0) -> np.ndarray:
    """Right and wrong answers."""
    return (np.random.default_rng(seed).random(count) < 0.4).astype(float)


def test_means_by_problem_are_of_its_samples_alone() -> None:
    found = problem_means([1, 0, 1, 1], [0, 0, 3, 1])
    assert found[[0, 1, 3]].tolist() == [0.5, 1.0, 1.0]
    assert np.isnan(found[2])


@given(SCORES, st.integers(0, 3), st.integers(1, 5))
def test_more_samples_of_a_problem_change_no_other(values: list[float], problem: int, more: int) -> None:
    problems = np.arange(len(values)) % 4
    before = problem_means(values, problems)
    after = problem_means([*values, *[1.0] * more], [*problems, *[problem] * more])
    others = [number for number in range(len(before)) if number != problem]
    assert np.array_equal(before[others], after[others], equal_nan=True)


@given(SCORES, st.randoms(use_true_random=False))
def test_the_order_of_problems_never_matters(values: list[float], random: object) -> None:
    order = list(range(len(values)))
    random.shuffle(order)  # type: ignore[attr-defined]
    one, other = np.array(values), np.array(values)[::-1]
    for statistic in (
        lambda a, b: bootstrap(a, draws=50, seed=1),
        lambda a, b: bootstrap(np.stack([a, b], 1), draws=50, seed=1).ravel(),
        lambda a, b: bootstrap(a, draws=50, seed=1, weights=b + 1),
        lambda a, b: permutation(a - b, draws=50, seed=1),
        lambda a, b: vars(difference(a, b, draws=50, seed=1))["interval"],
        lambda a, b: grand_mean([a, b], [1, 2], draws=50)[1],
        lambda a, b: sensitivity([a, b], draws=50)[1],
    ):
        assert statistic(one[order], other[order]) == pytest.approx(statistic(one, other), abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(k: int) -> None:
    for right in range(9):
        samples = [1] * right + [0] * (8 - right)
        draws = list(combinations(samples, k))
        assert pass_at([8], [right], k)[0] == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_holds_for_many_samples_and_is_nan_for_too_few() -> None:
    assert pass_at([10_000], [3], 5000)[0] == pytest.approx(1 - comb(9997, 5000) / comb(10_000, 5000), abs=1e-12)
    assert np.isnan(pass_at([4, 4], [0, 4], 5)).all()
    assert pass_at([1, 200], [1, 0], 1).tolist() == [1, 0]


def test_majorities() -> None:
    found = [["a", "b", "a", "b"], ["a", "b", None], [None, None, None], ["b", None, None], ["a", "b", "c"], ["a"]]
    right = [[1, 0, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 1], [1]]
    assert maj_at(found, right, 3) == pytest.approx([1, 0.5, 0, 1, 1 / 3, np.nan], nan_ok=True)
    assert maj_at(found[:1], right[:1], 4)[0] == 0.5


@pytest.mark.parametrize("values", [scores(60), np.random.default_rng(1).normal(size=60)], ids=["0/1", "any"])
def test_the_bootstrap_is_scipys(values: np.ndarray) -> None:
    reference = scipy.stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    step = 1.01 / 60 if set(values) == {0, 1} else 0.03 * (reference.high - reference.low)
    assert bootstrap(values, draws=20_000, seed=1) == pytest.approx((reference.low, reference.high), abs=step)
    narrow = bootstrap(values, draws=20_000, seed=1, level=0.5)
    assert reference.low < narrow[0] < narrow[1] < reference.high


def test_weights_and_columns_agree_with_resampling_by_hand() -> None:
    rng = np.random.default_rng(3)
    values, weights = rng.normal(size=80), rng.integers(1, 50, size=80).astype(float)
    one = bootstrap(values, draws=20_000, seed=1, weights=weights)

    counts = rng.multinomial(80, np.full(80, 1 / 80), size=20_000)
    by_hand = np.quantile((counts @ (values * weights)) / (counts @ weights), [0.025, 0.975])
    assert one == pytest.approx(by_hand, abs=0.05 * (one[1] - one[0]))
    both = bootstrap(np.stack([values, values + 2], 1), draws=500, seed=1)
    assert both.shape == (2, 2)
    assert both[1] - both[0] == pytest.approx([2, 2])


def test_similar_values_resampled_together_give_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).normal(size=3000)
    weights = np.random.default_rng(5).uniform(1, 2, size=3000)
    apart = [bootstrap(values, draws=4000, seed=1, weights=each) for each in (None, weights)]
    monkeypatch.setattr(statistics, "GROUPS", 512)
    together = [bootstrap(values, draws=4000, seed=1, weights=each) for each in (None, weights)]
    for one, other in zip(apart, together, strict=True):
        assert one == pytest.approx(other, abs=0.08 * (one[1] - one[0]))


def test_intervals_have_their_stated_coverage() -> None:
    rng, held = np.random.default_rng(6), 0
    for _ in range(200):
        low, high = bootstrap(rng.binomial(4, 0.6, size=100) / 4, draws=400, seed=1)
        held += low <= 0.6 <= high
    assert 0.90 <= held / 200 <= 0.99


def test_samples_of_one_problem_are_not_independent_problems() -> None:
    one = scores(50)
    low, high = bootstrap(one, draws=2000, seed=1)
    copies = problem_means(np.tile(one, 8), np.tile(np.arange(50), 8))
    assert bootstrap(copies, draws=2000, seed=1) == (low, high)
    assert bootstrap([1.0], seed=1) is None


@pytest.mark.parametrize(
    "problems", [pytest.param(1000, marks=pytest.mark.deep), pytest.param(1_000_000, marks=pytest.mark.slow)]
)
def test_a_million_samples_are_fast(problems: int) -> None:
    values = np.random.default_rng(7).normal(size=1_000_000)
    means = problem_means(values, np.arange(1_000_000) % problems)
    low, high = bootstrap(means, draws=10_000, seed=1)
    width = 2 * 1.96 * means.std() / problems**0.5
    assert high - low == pytest.approx(width, rel=0.1)
    assert low < means.mean() < high


def test_grand_means_weight_benchmarks_and_resample_within_each() -> None:
    one, other = scores(40), scores(400, seed=1)
    mean, interval = grand_mean([one, other], [1, 3], draws=20_000)
    assert mean == pytest.approx((one.mean() + 3 * other.mean()) / 4)
    error = np.sqrt(one.var() / 40 + 9 * other.var() / 400) / 4
    assert interval == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.15 * error)
    by_problems, _ = grand_mean([one, other], [40, 400])
    assert by_problems == pytest.approx(np.concatenate([one, other]).mean())
    assert grand_mean([one, [1.0]], [1, 0])[0] == one.mean()
    assert grand_mean([one, [1.0]], [1, 1])[1] is None
    with pytest.raises(ValueError, match="all weights of the grand mean are zero"):
        grand_mean([one], [0])


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_binomial_test(b: int, c: int) -> None:
    assert mcnemar(b, c) == mcnemar(c, b)
    if b + c:
        assert mcnemar(b, c) == scipy.stats.binomtest(b, b + c, 0.5).pvalue
    else:
        assert mcnemar(b, c) == 1


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.75]), min_size=2, max_size=9))
def test_the_exact_permutation_test_is_scipys(differences: list[float]) -> None:
    reference = scipy.stats.permutation_test(
        (np.array(differences), np.zeros(len(differences))),
        lambda x, y: np.abs(np.mean(x - y)),
        permutation_type="samples",
        n_resamples=np.inf,
        alternative="greater",
        vectorized=False,
    )
    assert permutation(differences, seed=1) == pytest.approx(reference.pvalue)


def test_random_permutations_agree_with_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = np.random.default_rng(8).normal(0.4, 1, size=14)
    exact = permutation(differences, seed=1)
    monkeypatch.setattr(statistics, "EXACT", 0)
    assert permutation(differences, draws=40_000, seed=1) == pytest.approx(exact, abs=0.01)
    assert permutation(np.ones(50), draws=999, seed=1) == 1 / 1000  # never 0
    assert permutation([0.0, 0.0], seed=1) == 1


def test_a_test_has_its_stated_error_rate() -> None:
    rng = np.random.default_rng(9)
    alarms = sum(permutation(rng.normal(size=30), draws=199, seed=1) < 0.05 for _ in range(400))
    assert alarms / 400 < 0.09


def test_differences_use_mcnemar_for_one_answer_per_problem_and_permutations_otherwise() -> None:
    a, b = scores(100), scores(100, seed=1)
    one = difference(a, b, draws=500, seed=1)
    assert (one.test, one.p) == ("McNemar", mcnemar(one.only_a, one.only_b))
    assert (one.only_a, one.only_b) == (int((a > b).sum()), int((b > a).sum()))
    assert one.interval[0] < one.mean < one.interval[1]
    assert one.mean == pytest.approx(b.mean() - a.mean())
    assert difference(a, b, samples=2, draws=500, seed=1).test == "permutation"
    assert difference(a / 2, b, draws=500, seed=1).test == "permutation"
    weighted = difference(a, b, draws=500, seed=1, weights=np.arange(100) + 1)
    assert weighted.mean == pytest.approx(np.average(b - a, weights=np.arange(100) + 1))


def test_equal_answers_still_give_an_interval() -> None:
    """About the rule of three: 0 of 100 allows a rate of 3 to 4 in 100."""
    right, wrong = np.ones(100), np.zeros(100)
    low, high = difference(right, right, seed=1).interval
    assert -low == high and 0.03 < high < 0.04
    low, high = difference(wrong, right, seed=1).interval
    assert 1 - 0.08 < low < 1 - 0.06 and high == 1
    low, high = difference(np.tile(right, 10), np.tile(right, 10), seed=1).interval
    assert high < 0.004
    assert difference(3 * right, 3 * right, seed=1).interval is None  # no bound is known
    assert difference(right, right, seed=1, weights=np.arange(100) + 1).interval is None


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1, 1]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_holm_only_raises_and_keeps_the_order(p: list[float]) -> None:
    found = holm(p)
    assert all(new >= old for new, old in zip(found, p, strict=True))
    assert max(found) <= 1
    order = np.argsort(p, kind="stable")
    assert (np.diff(np.array(found)[order]) >= 0).all()


def test_prompt_sensitivity_is_the_deviation_of_means_and_its_interval_includes_noise() -> None:
    rng = np.random.default_rng(10)
    ability = rng.random(400)
    same = rng.binomial(8, ability, size=(5, 400)) / 8
    std, (low, high) = sensitivity(same, draws=2000)
    assert std == pytest.approx(np.std(same.mean(axis=1), ddof=1))
    assert low == 0  # prompts that make no difference
    assert high < 0.02
    apart = rng.binomial(8, np.clip(ability + np.linspace(-0.1, 0.1, 5)[:, None], 0, 1)) / 8
    std, (low, high) = sensitivity(apart, draws=2000)
    assert 0.03 < low < std < high
    assert sensitivity([[1.0], [0.0]])[1] is None
    with pytest.raises(ValueError, match="two prompts"):
        sensitivity([[1.0, 0.0]])


def test_signal_and_noise_by_hand() -> None:
    found = signal_and_noise([0.5, 0.52, 0.48], [0.4, 0.6])
    assert (found.apart, found.spread) == pytest.approx((0.2, 0.02))
    assert (found.signal, found.noise, found.ratio) == pytest.approx((0.4, 0.04, 10))
    assert signal_and_noise([0.5, 0.5], [0.4, 0.6]).ratio == np.inf
    with pytest.raises(ValueError, match="two last checkpoints"):
        signal_and_noise([0.5], [0.4, 0.6])
