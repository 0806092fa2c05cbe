"""Small files of prompts and rollouts."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Write = Callable[[Path, Iterable[Mapping[str, Any]]], Path]


@pytest.fixture
def problems(tmp_path: Path, jsonl_of: Write) -> Path:
    """A directory with prompts.jsonl, 300 prompts of two domains, and rollouts.jsonl, eight of each."""
    draw = np.random.default_rng(5)
    records = [
        {"id": f"p{n}", "domain": ("code", "math")[n % 2], "prompt": f"problem {n}", "answer": str(n)}
        for n in range(300)
    ]
    solved = draw.integers(0, 9, 300)
    rollouts = [
        {"id": f"p{n}", "reward": float(rollout < solved[n]), "tokens": 100 + rollout}
        for n in range(300)
        for rollout in range(8)
    ]
    draw.shuffle(rollouts)  # type: ignore[arg-type]
    jsonl_of(tmp_path / "prompts.jsonl", records)
    jsonl_of(tmp_path / "rollouts.jsonl", rollouts)
    return tmp_path
