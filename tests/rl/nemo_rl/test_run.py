"""Errors of `run`, and detection of runs that NeMo-RL ended early."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_ext.job.run_directory import METRICS, read_metrics
from nemo_ext.pipeline.figures import figures_of
from nemo_ext.rl.nemo_rl.run import End, WithEnvironments, _end, run

TASKS = [{"id": str(n), "environment": "math", "prompt": "?", "reference": {"answer": "1"}} for n in range(4)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "unknown algorithm None"),
        ({"algorithm": "gpro"}, "did you mean 'grpo'"),
        ({"algorithm": "grpo", "nemo_rl": {}}, "the key 'tasks' is missing"),
        ({"algorithm": "grpo", "nemo_rl": {}, "tasks": {}, "pairs": {}}, "unknown key 'pairs'"),
        ({"algorithm": "dpo", "nemo_rl": {}, "pairs": {}, "tasks": {}}, "unknown key 'tasks'"),
    ],
)
def test_invalid_settings_are_reported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(config)


@pytest.mark.nemo_rl
@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"environments": {"maths": {}}}, (), "did you mean 'math'"),
        ({"environments": {"math": {"settings": {"time_limit": -1}}}}, (), "time_limit"),
        ({}, ("++data_plane.enabled=true",), "data_plane.enabled"),
        ({}, ("grpo.val_period=5",), "set tasks.validation.path"),
        ({"group": {"length_control": {}}}, ("grpo.use_dynamic_sampling=true",), "choose one of the two"),
        ({"tasks": {"train": {"path": "bad.jsonl"}}}, (), "bad.jsonl:1: task 0: reference"),
        (
            {"tasks": {"train": {"directory": ".", "blend": {"tasks": 1, "bad": 1}, "adapt": {}}}},
            ("grpo.async_grpo.enabled=true",),
            "tasks.train.adapt cannot be combined with grpo.async_grpo.enabled",
        ),
    ],
)
def test_refused_before_anything_starts(
    change: dict[str, Any],
    overrides: tuple[str, ...],
    message: str,
    nemo_rl: ModuleType,
    grpo_config: Callable[..., dict[str, Any]],
    jsonl: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = jsonl("tasks.jsonl", TASKS)
    jsonl("bad.jsonl", [{**TASKS[0], "reference": {}}])
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(importlib.import_module("nemo_ext.rl.nemo_rl.run"), "_start_ray", lambda: None)
    config = {
        "algorithm": "grpo",
        "nemo_rl": grpo_config("grpo.val_period=0", "grpo.val_at_start=false", "grpo.max_num_steps=1", *overrides),
        "tasks": {"train": {"path": str(path)}},
        **change,
    }

    with pytest.raises(ValueError, match=message):
        run(config)


def ended(checkpoints: Path | None = None, **grpo: Any) -> Any:
    grpo = {"max_num_steps": 5, "async_grpo": {"enabled": True}, **grpo}
    checkpointing = {"enabled": checkpoints is not None, "checkpoint_dir": str(checkpoints)}
    return SimpleNamespace(config={"grpo": grpo, "checkpointing": checkpointing})


def test_how_an_asynchronous_run_ended() -> None:
    told, not_told = ([SimpleNamespace(last_saved=value)] for value in (True, False))

    with pytest.raises(RuntimeError, match="after step 3 of 5"):
        _end(ended(), 3, 5, not_told)
    assert _end(ended(), 5, 5, not_told) == End(5, stopped=False)
    assert _end(ended(), 3, 5, told) == End(3, stopped=True)
    assert _end(ended(), 5, 5, told) == End(5, stopped=False)
    assert _end(ended(stop_at_validation_threshold=0.9), 3, 5, not_told) == End(3, stopped=False)


def test_the_last_step_comes_from_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="after step 0 of 5"):
        _end(ended(tmp_path), 5, 5, [])
    for step in (2, 5):
        (tmp_path / f"step_{step}" / "policy" / "weights" / "iter_0000000").mkdir(parents=True)
        (tmp_path / f"step_{step}" / "training_info.json").write_text("{}")

    assert _end(ended(tmp_path), 0, 5, []) == End(5, stopped=False)  # it had nothing left to do
    with pytest.raises(RuntimeError, match="after step 5 of 6"):
        _end(ended(tmp_path), 6, 6, [])  # the last step failed after it had logged something


def test_key_figures_are_in_metrics_jsonl(tmp_path: Path) -> None:
    metrics = tmp_path / METRICS

    def logged(*lines: tuple[str, int, dict[str, Any]]) -> None:
        log = WithEnvironments(lambda *given, **named: None, {}, {}, metrics=metrics)
        for prefix, step, values in lines:
            log(values, step, prefix=prefix)

    first = ("train", 1, {"total_turns": 3}), ("train", 1, {"reward": np.float32(0.25), "loss": 0.5})
    logged(*first, ("validation", 1, {"accuracy": 0.5}), ("train", 2, {"reward": 0.5}), ("train", 3, {"reward": 0.0}))
    with metrics.open("a") as stream:
        stream.write('{"step": 4, "lo')  # killed while it wrote
    # Resumed after step 1.
    logged(("validation", 2, {"accuracy": 0.25}), ("train", 2, {"reward": 0.75}), ("timing/train", 2, {"reward": 9}))

    assert read_metrics(metrics) == [
        {"step": 1, "loss": 0.5, "reward": 0.25},
        {"step": 1, "eval_reward": 0.5},
        {"step": 2, "eval_reward": 0.25},
        {"step": 2, "reward": 0.75},
    ]
    assert figures_of("rl", tmp_path).text == "reward 0.250 -> 0.750, validation reward 0.500 -> 0.250"


def test_guards_and_environments_are_in_metrics_jsonl_under_the_names_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.get", lambda taken: taken)
    actors = {"nemo_ext_math": SimpleNamespace(take_metrics=SimpleNamespace(remote=lambda: {"correct": 0.5}))}
    metrics = tmp_path / METRICS
    log = WithEnvironments(lambda *given, **named: None, actors, actors, metrics=metrics, limits=True)
    log.of_step["guards"] = lambda step: {"replayed_routes": 0.98}

    trained = {"token_mult_prob_error": 1.2, "num_masked_seqs_by_logprob_error": 1, "num_valid_samples": 3.0}
    log(trained, 1, prefix="train")
    log({"accuracy": 0.25}, 1, prefix="validation")

    assert read_metrics(metrics) == [
        {"step": 1, "guards/mismatch": 1.2, "guards/masked_responses": 0.25},
        {"step": 1, "math/correct": 0.5},
        {"step": 1, "guards/replayed_routes": 0.98},
        {"step": 1, "eval_reward": 0.25},
        {"step": 1, "eval_math/correct": 0.5},
    ]


def test_environments_are_logged_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, int, dict[str, Any]]] = []
    taken = SimpleNamespace(remote=lambda: {"correct": 0.5})
    actors = {"nemo_ext_math": SimpleNamespace(take_metrics=taken)}
    monkeypatch.setattr("ray.get", lambda found: found)
    log = WithEnvironments(lambda metrics, step, prefix: logged.append((prefix, step, metrics)), actors, {})

    for prefix, step in (("train", 1), ("train", 1), ("timing/train", 1), ("validation", 1), ("train", 2)):
        log({"loss": 1.0}, step, prefix=prefix)

    found = [(step, metrics) for prefix, step, metrics in logged if prefix == "train/environments"]
    assert found == [(1, {"math/correct": 0.5}), (2, {"math/correct": 0.5})]
    assert log.last_step == 2 and len(logged) == 7
