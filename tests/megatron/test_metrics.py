"""metrics.jsonl from the scalars that Megatron writes."""

import errno
import io
import json
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_ext.megatron import rank


class Scalars:
    """Simulated TensorBoard that stores its scalars."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        self.seen.append((tag, float(value), step))

    def flush(self) -> None:
        self.seen.append(("flushed", 0.0, 0))


def writer(path: Path, *, first_step: int = 0, tensorboard: Scalars | None = None) -> Any:
    from nemo_ext.megatron.metrics import MetricsWriter

    return MetricsWriter(
        path,
        first_step=first_step,
        tokens_per_step=100,
        tokens_at=lambda step: 100 * step,
        flops_per_token=6.0,
        flops_per_token_6n=3.0,
        peak_flops=1200.0,
        tensorboard=tensorboard,
    )


def log_step(metrics: Any, step: int, loss: float, *, seconds: float = 2.0) -> None:
    for tag, value in (
        ("learning-rate", 1e-3),
        ("learning-rate vs samples", 1e-3),
        ("lm loss", loss),
        ("grad-norm", 0.5),
        ("iteration-time", seconds),
    ):
        metrics.add_scalar(tag, value, step)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_with_its_speed(tmp_path: Path) -> None:
    metrics = writer(tmp_path / "m.jsonl")
    log_step(metrics, 1, 4.0)
    log_step(metrics, 2, 3.0)
    metrics.close()

    first, second = lines(tmp_path / "m.jsonl")
    assert first == {
        "step": 1,
        "tokens": 100,
        "lr": 1e-3,
        "loss": 4.0,
        "grad_norm": 0.5,
        "seconds_per_step": 2.0,
        "tokens_per_second": 50.0,
        "mfu": 0.25,
        "mfu_6n": 0.125,
    }
    assert second["step"] == 2 and second["tokens"] == 200


def test_without_megatrons_time_the_time_since_the_last_line_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 110.0])  # the metrics begin, step 5 is logged
    monkeypatch.setattr("nemo_ext.megatron.metrics.time", SimpleNamespace(perf_counter=lambda: next(times)))
    metrics = writer(tmp_path / "m.jsonl")
    metrics.add_scalar("lm loss", 4.0, 5)
    metrics.close()

    (line,) = lines(tmp_path / "m.jsonl")
    assert (line["seconds_per_step"], line["tokens_per_second"]) == (2.0, 50.0)


def test_a_step_has_the_processor_seconds_of_steps_only(tmp_path: Path) -> None:
    from nemo_ext.megatron.metrics import CpuClock, MetricsWriter

    used = iter([0.0, 10.0, 12.0, 12.5, 40.0, 43.0])  # begin, the metrics', two steps, a checkpoint's ends, a step
    clock = CpuClock(lambda: next(used))
    clock.start()
    metrics = MetricsWriter(
        tmp_path / "m.jsonl",
        first_step=0,
        tokens_per_step=100,
        tokens_at=lambda step: 100 * step,
        flops_per_token=6.0,
        flops_per_token_6n=3.0,
        peak_flops=None,
        cpu_seconds=clock.seconds,
    )
    log_step(metrics, 2, 4.0)
    clock.stop()
    clock.start()
    log_step(metrics, 3, 3.0)
    metrics.close()

    assert [line["cpu_seconds_per_step"] for line in lines(tmp_path / "m.jsonl")] == [1.0, 3.5]


def test_an_evaluation_is_a_separate_line_after_its_step(tmp_path: Path) -> None:
    metrics = writer(tmp_path / "m.jsonl")
    log_step(metrics, 1, 4.0)
    metrics.add_scalar("lm loss validation", 3.5, 1)
    metrics.add_scalar("lm loss validation vs samples", 3.5, 8)
    metrics.add_scalar("kl to teacher validation", 0.25, 1)
    metrics.close()

    step, *evaluation = lines(tmp_path / "m.jsonl")
    assert step["loss"] == 4.0
    assert evaluation == [
        {"step": 1, "tokens": 100, "val_loss": 3.5},
        {"step": 1, "tokens": 100, "val_kl_to_teacher": 0.25},
    ]


def test_a_loss_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    metrics = writer(tmp_path / "m.jsonl")
    log_step(metrics, 1, math.nan)
    metrics.close()

    assert lines(tmp_path / "m.jsonl")[0]["loss"] is None


def test_a_resumed_run_writes_the_steps_after_its_checkpoint_again(tmp_path: Path) -> None:
    metrics = writer(tmp_path / "m.jsonl")
    for step in (1, 2, 3):
        log_step(metrics, step, float(step))
    metrics.close()
    with (tmp_path / "m.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')  # cut short by a kill

    resumed = writer(tmp_path / "m.jsonl", first_step=2)
    log_step(resumed, 3, 30.0)
    resumed.close()

    assert [line["loss"] for line in lines(tmp_path / "m.jsonl")] == [1.0, 2.0, 30.0]


def test_energy_is_in_the_line_of_the_next_step(tmp_path: Path) -> None:
    metrics = writer(tmp_path / "m.jsonl")
    for step in (1, 2):
        log_step(metrics, step, 4.0)
        metrics.add_scalar("iter-energy/gpu", 100.0 * step, step)
    log_step(metrics, 3, 4.0)
    metrics.close()

    assert [line.get("joules_per_gpu") for line in lines(tmp_path / "m.jsonl")] == [None, 100.0, 200.0]


def test_tensorboard_gets_everything(tmp_path: Path) -> None:
    scalars = Scalars()
    metrics = writer(tmp_path / "m.jsonl", tensorboard=scalars)
    log_step(metrics, 1, 4.0)
    metrics.close()

    assert ("learning-rate vs samples", 1e-3, 1) in scalars.seen
    assert scalars.seen[-1][0] == "flushed"


def test_a_hanging_tensorboard_does_not_block_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs after its thread has ended on a full disk."""
    from nemo_ext.megatron import metrics as module

    class Stuck(Scalars):
        def flush(self) -> None:
            time.sleep(600)

    monkeypatch.setattr(module, "SECONDS_TO_FLUSH", 0.1)
    metrics = writer(tmp_path / "m.jsonl", tensorboard=Stuck())
    log_step(metrics, 1, 4.0)
    metrics.close()

    assert [line["step"] for line in lines(tmp_path / "m.jsonl")] == [1]


def test_a_log_that_cannot_be_written_does_not_block_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(rank.os, "_exit", ended)
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit) as exit_:
        rank.leave(7)
    assert exit_.value.code == 7
