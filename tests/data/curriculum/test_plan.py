import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.data.curriculum.plan import Candidates, Plan, make_plan
from nemo_ext.data.curriculum.prompts import key_of
from nemo_ext.data.curriculum.schedule import fixed
from nemo_ext.data.curriculum.settings import Settings

DOMAINS = ("code", "math", "stem")


def candidates_of(domains: list[int], rates: list[float], *, texts: list[int] | None = None) -> Candidates:
    count = len(domains)
    return Candidates(
        key=np.array([key_of(f"p{number}") for number in range(count)], dtype=np.uint64),
        text=np.array(texts if texts is not None else range(count), dtype=np.uint64),
        domain=np.array(domains, dtype=np.int16),
        rate=np.array(rates),
        used=np.zeros(count, dtype=np.int64),
        domains=DOMAINS,
    )


def drawn_at_random(count: int, *, copies: int = 0, seed: int = 0) -> Candidates:
    """Prompts of all domains and pass rates; `copies` of them have the text of another."""
    draw = np.random.default_rng(seed)
    texts = np.arange(count)
    if copies:
        texts[draw.choice(count, copies, replace=False)] = draw.choice(count, copies)
    return candidates_of(
        draw.integers(0, 3, count).tolist(), (draw.integers(0, 9, count) / 8).tolist(), texts=texts.tolist()
    )


def shares_of(candidates: Candidates) -> dict[str, float]:
    return dict(zip(DOMAINS, np.bincount(candidates.domain, minlength=3).tolist(), strict=True))


def plan_of(candidates: Candidates, **settings: object) -> Plan:
    shares = fixed(settings.pop("shares", None) or shares_of(candidates), DOMAINS)  # type: ignore[arg-type]
    levels = settings.pop("levels", 8)
    given = Settings(output="made", **{"batch": 8} | settings)  # type: ignore[arg-type]
    return make_plan(candidates, shares, given, levels=levels)  # type: ignore[arg-type]


def repeats_in_steps(plan: Plan, candidates: Candidates) -> int:
    return sum(len(row) - len(set(row)) for row in candidates.text[plan.order].tolist())


PROMPTS = st.builds(drawn_at_random, st.integers(40, 300), copies=st.integers(0, 20), seed=st.integers(0, 1000))


@given(PROMPTS, st.integers(1, 10))
def test_nothing_is_lost_or_drawn_twice(candidates: Candidates, batch: int) -> None:
    plan = plan_of(candidates, batch=batch)

    drawn = plan.order.ravel().tolist()
    assert len(set(drawn)) == len(drawn)
    assert repeats_in_steps(plan, candidates) == 0
    # Shares are proportional to the prompts, so all domains end together, except for rounding.
    if not plan.stopped:
        assert len(candidates) - len(drawn) < batch + 2 * len(DOMAINS) + batch


@given(PROMPTS, st.integers(2, 10), st.integers(5, 60))
def test_a_pool_is_exhausted_before_it_is_reused(candidates: Candidates, batch: int, steps: int) -> None:
    plan = plan_of(candidates, batch=batch, steps=steps, exhausted="repeat", shares={"code": 3, "math": 1, "stem": 1})

    assert plan.order.shape == (steps, batch) and not plan.stopped
    assert repeats_in_steps(plan, candidates) == 0
    times = np.bincount(plan.order.ravel(), minlength=len(candidates))
    alone = np.bincount(candidates.text.astype(np.int64))[candidates.text.astype(np.int64)] == 1
    for domain in range(3):
        own = times[(candidates.domain == domain) & alone]
        # Only prompts whose text has copies may have to wait for the next step.
        assert own.max(initial=0) - own.min(initial=own.max(initial=0)) <= 1
        assert (plan.epochs[domain] > 0) == (times[candidates.domain == domain].max() > 1)


@given(PROMPTS, st.data())
def test_a_plan_from_any_step_is_the_rest_of_the_whole_plan(candidates: Candidates, data: st.DataObject) -> None:
    steps = len(plan_of(candidates, batch=6).order)
    whole = plan_of(candidates, batch=6, steps=steps)
    first = data.draw(st.integers(0, len(whole.order) - 1))
    used = np.bincount(whole.order[:first].ravel(), minlength=len(candidates))

    rest = plan_of(
        dataclasses.replace(candidates, used=used), batch=6, steps=steps, first_step=first, shares=shares_of(candidates)
    )

    assert rest.order.tolist() == whole.order[first:].tolist()
    np.testing.assert_array_equal(rest.targets, whole.targets[first:])


@given(PROMPTS, st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(candidates: Candidates, random: object) -> None:
    places = list(range(len(candidates)))
    random.shuffle(places)  # type: ignore[attr-defined]
    # The order of prompts with equal texts is not defined, so the texts are made different.
    candidates = dataclasses.replace(candidates, text=np.arange(len(candidates), dtype=np.uint64))
    moved = dataclasses.replace(
        candidates,
        **{name: getattr(candidates, name)[places] for name in ("key", "text", "domain", "rate", "used")},
    )

    first, second = plan_of(candidates), plan_of(moved)

    assert candidates.key[first.order].tolist() == moved.key[second.order].tolist()


def test_another_seed_is_another_order_with_the_same_shares() -> None:
    candidates = drawn_at_random(400)

    first, again, other = plan_of(candidates), plan_of(candidates), plan_of(candidates, seed=7)

    assert first.order.tolist() == again.order.tolist()
    assert first.order.tolist() != other.order.tolist()
    per_step = lambda plan: [Counter(row) for row in candidates.domain[plan.order].tolist()]  # noqa: E731
    assert per_step(first) == per_step(other)


def test_with_enough_prompts_the_mean_follows_the_target() -> None:
    draw = np.random.default_rng(0)
    candidates = candidates_of([1] * 20_000, (draw.integers(0, 17, 20_000) / 16).tolist())

    plan = plan_of(candidates, batch=64, steps=60, shares={"math": 1}, levels=16)

    actual = candidates.rate[plan.order].mean(axis=1)
    # At the ends the Gaussian is cut off at 0 and 1.
    np.testing.assert_allclose(actual[5:-5], plan.targets[5:-5], atol=0.03)
    spread = candidates.rate[plan.order[20:40]].std(axis=1).mean()
    assert spread == pytest.approx(0.15, abs=0.02)
    assert not plan.off_target.any()


def test_an_exhausted_level_is_replaced_by_the_largest() -> None:
    # Ten easy prompts, then only hard ones and more of the hardest.
    candidates = candidates_of([1] * 60, [1.0] * 10 + [0.5] * 20 + [0.0] * 30)

    plan = plan_of(candidates, batch=10, steps=6, shares={"math": 1}, mean_first=1.0, mean_last=1.0, sigma=0.01)

    rates = candidates.rate[plan.order]
    assert (rates[0] == 1).all() and plan.off_target[0] == 0
    assert sorted(rates[1].tolist()) == [0.0] * 10, "the largest pool, down to the next one's size"
    assert plan.off_target[1:].tolist() == [10] * 5


def test_the_schedule_ends_when_a_domain_is_exhausted() -> None:
    candidates = candidates_of([0] * 30 + [1] * 100, [0.5] * 130)

    plan = plan_of(candidates, batch=10, steps=50, shares={"code": 1, "math": 1})

    assert plan.order.shape == (6, 10)
    assert plan.stopped == "domain code has too few prompts left for step 6"
    assert plan.targets[-1] == pytest.approx(0.2), "the mean falls over the actual number of steps"


def test_more_copies_of_a_text_than_steps_end_the_schedule() -> None:
    candidates = candidates_of([1] * 40, [0.5] * 40, texts=[0] * 30 + list(range(1, 11)))

    plan = plan_of(candidates, batch=4, shares={"math": 1})

    assert repeats_in_steps(plan, candidates) == 0
    assert "math has" in plan.stopped and "already" in plan.stopped


@pytest.mark.parametrize(
    ("domains", "shares", "message"),
    [
        (
            [1] * 5,
            {"math": 1},
            r"left for a step of batch=8 \(code has 0, math has 5, stem has 0\)",
        ),
        ([1] * 6 + [0] * 9, {"math": 1}, "domain math has 6 distinct prompts"),
        ([1] * 20, {"math": 1, "code": 1}, "domain code has 0 distinct prompts"),
    ],
)
def test_too_few_prompts_for_a_step_are_refused(domains: list[int], shares: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(candidates_of(domains, [0.5] * len(domains)), shares=shares, steps=2)
