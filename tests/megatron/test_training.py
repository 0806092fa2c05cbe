"""Settings that the trainer makes before it runs: resumed optimizers, checkpoint writers, threads."""

import queue
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_ext.job import run_directory


def test_a_resumed_run_takes_rates_and_betas_from_the_config(
    single: Path, train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    def resumed(*words: str) -> list[dict[str, Any]]:
        run_dir = tmp_path / str(len(words))
        shutil.copytree(single / run_directory.CHECKPOINTS, run_dir / run_directory.CHECKPOINTS)
        shutil.rmtree(run_dir / run_directory.CHECKPOINTS / "iter_0000010")
        (run_dir / run_directory.CHECKPOINTS / "latest_checkpointed_iteration.txt").write_text("5")
        return train_ranks(run_dir, *words)

    before = [line for line in run_directory.read_metrics(single / run_directory.METRICS) if "loss" in line][5:]
    slower = resumed("megatron.lr=1e-3", "megatron.min_lr=1e-5")
    lighter = resumed("megatron.adam_beta1=0.5")

    assert [line["lr"] for line in slower] == pytest.approx([line["lr"] / 2 for line in before], rel=1e-4)
    assert [line["lr"] for line in lighter] == [line["lr"] for line in before]
    assert lighter[0]["loss"] == before[0]["loss"] and lighter[1]["loss"] != before[1]["loss"]


def test_a_distributed_optimizer_resumes_without_fused_kernels(
    train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    words = ("megatron.use_distributed_optimizer=true",)
    whole = train_ranks(tmp_path, *words)
    shutil.rmtree(tmp_path / run_directory.CHECKPOINTS / "iter_0000010")
    (tmp_path / run_directory.CHECKPOINTS / "latest_checkpointed_iteration.txt").write_text("5")

    resumed = train_ranks(tmp_path, *words)

    assert [line["loss"] for line in resumed if line["step"] > 5] == [
        line["loss"] for line in whole if line["step"] > 5
    ]


def test_a_resumed_run_with_a_decoupled_rate_takes_both_rates_from_the_config(
    train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    def train(run_dir: Path, lr: float, decoupled: float, steps: int) -> list[dict[str, Any]]:
        rates = f"megatron.lr={lr}", "megatron.min_lr=0", f"megatron.decoupled_lr={decoupled}"
        return train_ranks(run_dir, *rates, f"megatron.train_iters={steps}", "megatron.lr_decay_iters=10")

    train(tmp_path / "same", 2e-3, 1e-3, 5)
    for name in ("slower", "embedding"):
        shutil.copytree(tmp_path / "same", tmp_path / name)
    same = train(tmp_path / "same", 2e-3, 1e-3, 7)[-2:]
    slower = train(tmp_path / "slower", 1e-4, 5e-4, 7)[-2:]  # now the lower of both
    embedding = train(tmp_path / "embedding", 2e-3, 5e-4, 7)[-2:]

    assert [line["lr"] for line in slower] == pytest.approx([line["lr"] / 20 for line in same], rel=1e-3)
    assert [line["lr"] for line in embedding] == [line["lr"] for line in same]
    assert embedding[0]["loss"] == same[0]["loss"] and embedding[1]["loss"] != same[1]["loss"]


def test_only_asynchronous_writing_has_a_helper_process(megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from nemo_ext.megatron.trainer import write_checkpoints_without_helper

    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    write_checkpoints_without_helper(Namespace(async_save=True))
    assert filesystem_async._results_queue is None

    write_checkpoints_without_helper(Namespace(async_save=False))
    assert isinstance(filesystem_async.get_write_results_queue(), queue.Queue)


def test_an_asynchronous_checkpoint_has_the_weights_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan

    from nemo_ext.megatron.trainer import copy_before_writing

    writer_class = filesystem_async.FileSystemWriterAsync
    monkeypatch.setattr(filesystem_async, "_results_queue", queue.Queue())
    monkeypatch.setattr(writer_class, "prepare_write_data", writer_class.prepare_write_data)
    copy_before_writing(Namespace(async_save=True))
    moment, planner, writer = torch.zeros(3), DefaultSavePlanner(), writer_class(tmp_path, thread_count=1)
    planner.set_up_planner({"moment": moment}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = create_default_global_save_plan([planner.create_local_plan()])
    (plan,) = writer.prepare_global_plan(plans)
    writer.prepare_write_data(plan, planner)
    moment += 1  # training goes on

    assert writer.write_buckets is not None
    ((_, _, (_, tensors)),) = writer.write_buckets
    assert [each.tolist() for _, each in tensors] == [[0, 0, 0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="threads are for machines without CUDA")
def test_threads_are_set_by_the_user(monkeypatch: pytest.MonkeyPatch, megatron: None) -> None:
    from nemo_ext.megatron.trainer import share_cores

    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    share_cores(2)
    assert chosen == []

    monkeypatch.delenv("OMP_NUM_THREADS")
    share_cores(2)
    assert chosen == [4]
