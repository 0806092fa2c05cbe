"""Key figures of stages, read from the files of their jobs."""

import json
from pathlib import Path
from typing import Any

import yaml

from nemo_ext.pipeline.figures import Figures, figures_of


def lines(path: Path, *records: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_training_has_its_newest_loss_and_tokens(tmp_path: Path) -> None:
    assert figures_of("train", tmp_path) == Figures()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"megatron": {"train_iters": 8}}))
    lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 5.0, "tokens": 64}, {"step": 2, "loss": 4.0, "tokens": 128})

    assert figures_of("train", tmp_path) == Figures(text="loss 4.000", tokens=128, step=2, target=8)
    lines(tmp_path / "metrics.jsonl", {"step": 2, "loss": 4.0, "tokens": 128}, {"step": 2, "val_loss": 4.5})
    assert figures_of("train", tmp_path).text == "loss 4.000, validation 4.500"


def test_reinforcement_learning_has_its_first_reward_and_the_mean_of_the_last_tenth(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"rl": {"schedule": {"steps": 30}}}))
    lines(
        tmp_path / "metrics.jsonl", *({"step": step, "reward": step / 10, "num_tokens": step} for step in range(1, 21))
    )

    expected = Figures(text="reward 0.100 -> 1.950", tokens=20, step=20, target=30)
    assert figures_of("rl", tmp_path) == expected


def test_an_evaluation_has_its_mean_with_the_interval(tmp_path: Path) -> None:
    results = {"benchmarks": {}, "mean": {"accuracy": 0.25, "interval": [0.2, 0.3], "benchmarks": 2}}
    (tmp_path / "results.json").write_text(json.dumps(results))

    assert figures_of("evaluate", tmp_path).text == "accuracy 25.0% [20.0, 30.0]"
    assert figures_of("convert", tmp_path) == Figures()
