"""Small files of prompts and rollouts."""

from pathlib import Path

import numpy as np
import pytest

from tests.json_lines import write_jsonl


@pytest.fixture
def problems(tmp_path: Path) -> Path:
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
    write_jsonl(tmp_path / "prompts.jsonl", records)
    write_jsonl(tmp_path / "rollouts.jsonl", rollouts)
    return tmp_path
