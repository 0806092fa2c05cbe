"""Blocks and speed in a child's report."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_ext.puzzle.report import _blocks, _states, _summary
from nemo_ext.puzzle.stages import evaluate
from nemo_ext.puzzle.stages.measure import ROUNDS

COSTS = {"parameters": 100, "active_parameters": 100, "cache_bytes": 8, "prefill_seconds": 1.0, "decode_seconds": 1.0}


def row(name: str, pattern: str, blocks: int, **values: Any) -> dict[str, Any]:
    measured = {"forward_seconds": 0.01, "speedups": [1.0] * 5}
    return {"name": name, "pattern": pattern, "blocks": blocks, "loss": 2.0, "tokens": 64, "costs": COSTS} | (
        values or measured
    )


PARENT = row("parent", "(*-)x3", 6)
CHILD = row("child", "*--*-", 5)


def test_the_blocks_match_the_headline() -> None:
    rows = [PARENT, CHILD, row("fused", "*-{ffn=96}*-", 4), row("healed", "*-{ffn=96}*-", 4)]

    assert ", 4 blocks in sequence instead of 6" in _summary(rows)
    assert _blocks(rows) == "4 blocks: `*-{ffn=96}*-`\n\nBefore fusion, 5 blocks: `*--*-`"


def test_without_fusion_there_is_one_pattern() -> None:
    assert _blocks([PARENT, CHILD]) == "5 blocks: `*--*-`"


@pytest.mark.parametrize(
    ("rounds", "shown"),
    [
        ([0.27, 1.02, 0.98, 1.01, 0.99], "0.99x (0.27 to 1.02, noise)"),
        ([0.92, 0.93, 0.9, 0.91, 0.95], "0.92x (0.90 to 0.95)"),
        ([1.4, 1.5, 1.45, 1.6, 1.3], "1.45x (1.30 to 1.60)"),
    ],
)
def test_a_speed_within_its_spread_is_called_noise(rounds: list[float], shown: str) -> None:
    found = _states([PARENT, row("child", "*-", 2, forward_seconds=0.01, speedups=rounds)])

    assert f"| {shown} |" in found and found.count("noise") == shown.count("noise")
    assert "| 1x |" in found


def test_measurements_without_rounds_keep_their_spread() -> None:
    parent = row("parent", "*-", 2, forward_seconds=0.01, forward_spread=0.002)
    child = row("child", "*-", 2, forward_seconds=0.0109, forward_spread=0.0)

    assert "| 0.92x (0.83 to 1.01, noise) |" in _states([parent, child])


@pytest.mark.slow
def test_models_are_timed_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal models are timed in alternation, so neither is favoured."""
    order: list[str] = []

    def model(name: str) -> Any:
        return SimpleNamespace(logits=lambda tokens: order.append(name))

    monkeypatch.setattr(evaluate, "SECONDS", 0.001)
    seconds = evaluate.forward_seconds([model("a"), model("b")], torch.zeros(1, 1))

    turns = sum(now != before for before, now in pairwise(order)) + 1
    assert [len(each) for each in seconds] == [ROUNDS, ROUNDS] and turns == 2 * (ROUNDS + 2)  # warm-up and calibration
    assert all(each > 0 for rounds in seconds for each in rounds)
