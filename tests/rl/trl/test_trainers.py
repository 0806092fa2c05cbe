"""What our trainers put in place of TRL's own computations, without a model."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_ext.rl.algorithms import Advantage

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (Advantage(baseline="leave_one_out", normalise="none"), [1, -1 / 3, -1 / 3, -1 / 3]),
        (Advantage(baseline="leave_one_out", normalise="unbiased_std"), [2, -2 / 3, -2 / 3, -2 / 3]),
        (Advantage(baseline="mean", normalise="std"), [3**0.5, *[-(3**-0.5)] * 3]),
        (None, [7, 7, 7, 7]),
    ],
)
@pytest.mark.parametrize("process", [0, 1])
def test_advantages_are_those_of_the_algorithm(
    advantage: Advantage | None, expected: list[float], process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of four on two processes; the first group has no variance."""
    import torch
    from trl import GRPOTrainer

    from nemo_ext.rl.trl.trainers import _Grpo

    def score(self: Any, inputs: list[Any]) -> dict[str, Any]:
        self._calculate_rewards()
        return {"advantages": torch.full((4,), 7.0)}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", score)
    rewards = torch.tensor([[0.1]] * 4 + [[1.0], [0.0], [0.0], [0.0]])
    monkeypatch.setattr(GRPOTrainer, "_calculate_rewards", lambda self: rewards)
    trainer = _Grpo.__new__(_Grpo)
    trainer.model, trainer.num_generations, trainer.advantage = SimpleNamespace(training=True), 4, advantage
    trainer.accelerator = SimpleNamespace(process_index=process)

    made = trainer._generate_and_score_completions([])["advantages"]

    flat = [0.0] * 4 if advantage else [7.0] * 4
    assert made.tolist() == pytest.approx(expected if process else flat, rel=1e-4)
