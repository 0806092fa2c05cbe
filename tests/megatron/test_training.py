"""What the trainer sets before it runs: writers of checkpoints and threads."""

import queue
from argparse import Namespace
from pathlib import Path

import pytest
import torch


def test_what_is_written_needs_no_process_unless_another_one_writes(
    megatron: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from nemo_ext.megatron.trainer import write_checkpoints_without_helper

    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    write_checkpoints_without_helper(Namespace(async_save=True))
    assert filesystem_async._results_queue is None

    write_checkpoints_without_helper(Namespace(async_save=False))
    assert isinstance(filesystem_async.get_write_results_queue(), queue.Queue)


def test_an_asynchronous_checkpoint_holds_what_was_when_it_was_begun(
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
def test_threads_are_those_of_the_user(monkeypatch: pytest.MonkeyPatch, megatron: None) -> None:
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
