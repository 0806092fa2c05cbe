"""Adaptive shares of datasets, without an engine."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.rl.adaptive import AdaptiveShares, signals_of
from nemo_ext.rl.plan import plan_tasks
from nemo_ext.rl.settings import Adapt
from tests.json_lines import write_jsonl

SIGNALS = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=12)
SHARES = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)


def shares_of(shares: list[float], **given: float) -> AdaptiveShares:
    return AdaptiveShares(dict(zip("abc", shares, strict=True)), Adapt(**given), seed=3)


def test_a_signal_is_the_mean_absolute_advantage() -> None:
    rewards = [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, -10]]

    assert signals_of(rewards) == pytest.approx([0, 0, 1, 3**0.5 / 2, 3**0.5 / 2], rel=1e-5)


@given(SHARES, st.lists(SIGNALS, max_size=5), st.floats(0.01, 1))
def test_weights_sum_to_one_and_none_starves(shares: list[float], steps: list, keep: float) -> None:
    made = shares_of(shares, keep=keep, groups=4)
    first = dict(made.weights)
    assert list(first.values()) == pytest.approx([share / sum(shares) for share in shares])

    for step in steps:
        made.learn(*zip(*step, strict=True))

        assert sum(made.weights.values()) == pytest.approx(1)
        assert all(made.weights[name] >= keep * first[name] * (1 - 1e-9) for name in first)
        assert all(0 <= signal <= 1 for signal in made.signals.values())


def test_weights_move_to_the_dataset_with_signal_and_back() -> None:
    made = shares_of([0.5, 0.25, 0.25], keep=0.2, groups=8)

    for _ in range(40):
        before = made.weights["a"]
        made.learn([0, 0, 1, 1, 2], [0.0, 0.0, 0.8, 0.8, 0.8])
        assert made.weights["a"] < before
    assert made.weights["a"] == pytest.approx(0.2 * 0.5, abs=1e-3)
    assert made.weights["b"] == pytest.approx(made.weights["c"], rel=0.05)
    for _ in range(40):
        made.learn([0, 1, 2], [0.8, 0.8, 0.8])
    assert made.weights["a"] > 0.49


def test_without_any_signal_the_configured_shares_are_kept() -> None:
    made = shares_of([0.5, 0.3, 0.2], groups=1)

    for _ in range(1000):
        made.learn([0, 1, 2], [0, 0, 0])

    assert made.weights == pytest.approx({"a": 0.5, "b": 0.3, "c": 0.2})


@given(SHARES, st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_draws_follow_the_weights(shares: list[float], counts: list[int]) -> None:
    made = shares_of(shares)

    drawn = [prompt for count in counts for prompt in made.draw(count)]

    assert made.drawn == len(drawn) == sum(counts)
    for number, weight in enumerate(made.weights.values()):
        own = [place for dataset, place in drawn if dataset == number]
        assert own == list(range(len(own))), "each prompt of a dataset's order once, in turn"
        assert abs(len(own) - weight * len(drawn)) < 2


@given(SHARES, st.lists(SIGNALS, min_size=1, max_size=6), st.integers(0, 5))
def test_a_resumed_run_draws_the_same_prompts(shares: list[float], steps: list, stop: int) -> None:
    whole, parts = shares_of(shares, groups=3), shares_of(shares, groups=3)

    for number, step in enumerate(steps):
        if number == stop:
            kept, parts = json.loads(json.dumps(parts.state())), shares_of(shares, groups=3)
            parts.restore(kept)
        assert parts.draw(7) == whole.draw(7)
        for made in (whole, parts):
            made.learn(*zip(*step, strict=True))

    assert parts.state() == whole.state()


def test_invalid_signals_and_states_are_refused() -> None:
    made = shares_of([1, 1, 1])

    for signals in ([0.5], [0.5, 1.5], [0.5, float("nan")]):
        with pytest.raises(ValueError, match="signals must be 2 numbers from 0 to 1"):
            made.learn([0, 1], signals)
    with pytest.raises(ValueError, match="shares are for the datasets"):
        AdaptiveShares({"a": 1, "d": 1}, Adapt(), seed=3).restore(made.state())


def test_a_plan_adapts_between_the_files_of_its_blend(tmp_path: Path) -> None:
    for name in "ab":
        records = (
            {"id": f"{name}{n}", "environment": "math", "prompt": f"{name}{n}", "reference": {"answer": "1"}}
            for n in range(4)
        )
        write_jsonl(tmp_path / f"{name}.jsonl", records)
    blend = {"directory": str(tmp_path), "blend": {"a": 3, "b": 1}}

    plan = plan_tasks({**blend, "adapt": {"groups": 2}}, steps=2, prompts=8)
    shares = plan.adaptive()

    assert shares is not None and shares.weights == pytest.approx({"a": 0.75, "b": 0.25})
    drawn = [plan.nth(*place).id for place in shares.draw(16)]
    assert Counter(name[0] for name in drawn) == {"a": 12, "b": 4}
    assert set(Counter(drawn).values()) == {1, 3}, "a's four tasks in each of its three passes, b's once"
    assert plan_tasks(blend, steps=2, prompts=8).adaptive() is None
    for wrong, said in (
        ({"path": "x", "adapt": {}}, r"adapt requires tasks\.train\.directory"),
        ({**blend, "adapt": {"keep": 0}}, r"tasks\.train\.adapt\.keep=0"),
        ({**blend, "adapt": {"kept": 1}}, "did you mean 'keep'"),
        ({**blend, "blend": {"a": {"share": 3, "cap_epochs": 9}, "b": 1}, "adapt": {}}, "cannot respect cap_epochs"),
        ({**blend, "blend": {"a": 3}, "adapt": {}}, "at least two streams with a share"),
    ):
        with pytest.raises(ValueError, match=said):
            plan_tasks(wrong, steps=2, prompts=8)


def test_draws_follow_changed_weights() -> None:
    made = shares_of([1, 1, 2], groups=1)
    made.draw(10)
    for _ in range(20):
        made.learn([0, 1, 2], [0.0, 0.5, 0.5])

    counts = np.bincount([dataset for dataset, _ in made.draw(1000)], minlength=3)

    assert counts / 1000 == pytest.approx(list(made.weights.values()), abs=0.002)
