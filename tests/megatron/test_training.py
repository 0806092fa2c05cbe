"""Megatron's own trainer on one and two ranks: every layout learns the same, checkpoints change layout and back end."""

import queue
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from nemo_ext.job import run_directory

pytestmark = pytest.mark.xdist_group(name="training")
"""Fixtures that train are made once."""

Train = Callable[..., list[dict[str, Any]]]

LAYOUTS = {
    "tensor": ("megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"),
    "pipeline": ("megatron.pipeline_model_parallel_size=2",),
    "expert": ("megatron.expert_model_parallel_size=2",),
    "data with the distributed optimizer": ("megatron.use_distributed_optimizer=true",),
}


START = ("train.tokens=512", "train.warmup_tokens=0")
"""One step, for a checkpoint to start from."""


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, train_ranks: Train) -> Path:
    """A run of ten steps on one rank, with checkpoints of steps 5 and 10."""
    run_dir = tmp_path_factory.mktemp("single")
    train_ranks(run_dir)
    return run_dir


def test_a_run_learns_and_logs_every_step(single: Path) -> None:
    lines = [line for line in run_directory.read_metrics(single / run_directory.METRICS) if "loss" in line]

    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["tokens"] for line in lines] == [512 * step for step in range(1, 11)]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    for line in lines:
        assert line["lr"] > 0 and line["grad_norm"] > 0 and line["tokens_per_second"] > 0 and 0 < line["mfu"] < 2
    # Constant after the warm-up, then WSD's decay over the last fifth: the last step is at the minimum.
    rates = [line["lr"] for line in lines]
    assert rates[1:8] == pytest.approx([2e-3] * 7) and rates[-1] == pytest.approx(2e-5)


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


def from_weights_of(run_dir: Path) -> tuple[str, str]:
    """Three steps from another run's weights: ranks of different layouts draw different weights from one seed."""
    return f"megatron.pretrained_checkpoint={run_dir / run_directory.CHECKPOINTS}", "train.tokens=1536"


@pytest.fixture(scope="module")
def alone(single: Path, tmp_path_factory: pytest.TempPathFactory, train_ranks: Train) -> list[dict[str, Any]]:
    """What one rank logs over three steps from those weights."""
    return train_ranks(tmp_path_factory.mktemp("alone"), *from_weights_of(single))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_learn_what_one_rank_learns(
    single: Path, alone: list[dict[str, Any]], train_ranks: Train, tmp_path: Path, layout: str
) -> None:
    together = train_ranks(tmp_path, *from_weights_of(single), *LAYOUTS[layout], ranks=2)

    assert len(alone) == 3
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert [line["grad_norm"] for line in together] == pytest.approx([line["grad_norm"] for line in alone], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("olmo3_tiny", ("q_layernorm", "k_layernorm", "output_norm")),  # QK norm over all heads, norm on the output
        ("llama_nemotron_tiny", ("self_attention.weight", "mlp.weight")),  # linear-replaced blocks
    ],
)
def test_tensor_parallel_ranks_learn_the_same_weights(
    train_ranks: Train, tmp_path: Path, model: str, parameters: tuple[str, ...]
) -> None:
    """Losses would hide a wrong gradient of a few weights."""
    family, both = f"model={model}", ("train.tokens=1536", "train.warmup_tokens=0", "megatron.lr=1e-3")
    train_ranks(tmp_path / "start", family, *START)
    weights = f"megatron.pretrained_checkpoint={tmp_path / 'start' / run_directory.CHECKPOINTS}"

    alone, together = tmp_path / "one", tmp_path / "two"
    train_ranks(alone, family, weights, *both)
    train_ranks(together, family, weights, *both, *LAYOUTS["tensor"], ranks=2)

    first, expected, got = (saved_weights(run_dir, parameters) for run_dir in (tmp_path / "start", alone, together))
    assert expected.keys() == got.keys() and len(expected) >= len(parameters)
    for name, weight in expected.items():
        moved = (weight - first[name]).abs().max()
        assert moved > 1e-4, f"{name} was not trained"
        assert (got[name] - weight).abs().max() < 0.05 * moved, name


def saved_weights(run_dir: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Whole weights of the newest checkpoint, whatever the layout that saved them, by parts of their names."""
    folder = run_dir / run_directory.CHECKPOINTS / f"iter_{run_directory.last_checkpoint(run_dir):07d}"
    reader = FileSystemReader(str(folder))
    weights = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in reader.read_metadata().state_dict_metadata.items()
        if not key.startswith("optimizer.") and any(name in key for name in names) and hasattr(stored, "size")
    }
    load(weights, storage_reader=reader, no_dist=True)
    return weights


@pytest.mark.slow
def test_virtual_pipeline_stages_learn_what_one_rank_learns(train_ranks: Train, tmp_path: Path) -> None:
    train_ranks(tmp_path / "start", "model.pattern=ME*EME-E", *START)
    start = ("train.tokens=1536", f"megatron.pretrained_checkpoint={tmp_path / 'start' / run_directory.CHECKPOINTS}")

    alone = train_ranks(tmp_path / "one", "model.pattern=ME*EME-E", *start)
    two = ("model.pattern=ME|*E|ME|-E", "megatron.pipeline_model_parallel_size=2")
    together = train_ranks(tmp_path / "two", *two, *start, ranks=2)
    measured = train_ranks(tmp_path / "three", *two, *START, "train.validate_at_start=true", ranks=2)

    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert len(measured) == 1
    first = run_directory.read_metrics(tmp_path / "three" / run_directory.METRICS)[0]
    assert first["step"] == 0 and 5 < first["val_loss"] < 7


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_goes_on_under_tensor_parallelism(
    single: Path, train_ranks: Train, tmp_path: Path
) -> None:
    checkpoints = tmp_path / run_directory.CHECKPOINTS
    shutil.copytree(single / run_directory.CHECKPOINTS, checkpoints)
    shutil.rmtree(checkpoints / "iter_0000010")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("5")

    resumed = train_ranks(tmp_path, *LAYOUTS["tensor"], ranks=2)

    whole = [line for line in run_directory.read_metrics(single / run_directory.METRICS) if "loss" in line]
    assert [line["step"] for line in resumed] == [6, 7, 8, 9, 10]
    assert losses(resumed) == pytest.approx(losses(whole[5:]), rel=1e-5)


@pytest.mark.slow
def test_blocks_with_other_numbers_of_experts_all_balance_their_experts(train_ranks: Train, tmp_path: Path) -> None:
    train_ranks(tmp_path, 'model.pattern="E{experts=8}E{experts=4}"', "train.tokens=1024", "train.warmup_tokens=0")
    biases = saved_weights(tmp_path, ("expert_bias",))
    assert [bias.numel() for _, bias in sorted(biases.items())] == [8, 4]
    for name, bias in biases.items():
        assert bias.abs().max() > 0, f"{name} was not updated"
