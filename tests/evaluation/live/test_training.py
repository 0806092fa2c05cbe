"""Evaluations in trainings on one and two ranks: all layouts give equal results, and training is unaffected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.evaluation.live import folder_of
from nemo_ext.evaluation.store import Store
from nemo_ext.job import run_directory
from nemo_ext.megatron.report import write_report

pytestmark = pytest.mark.xdist_group(name="live")
slow, deep = pytest.mark.slow, pytest.mark.deep

Train = Callable[..., list[dict[str, Any]]]
BENCHMARKS = ("choice", "docstring_bits", "sums")
LAYOUTS = {
    "tensor": ("megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"),
    "pipeline": ("megatron.pipeline_model_parallel_size=2",),
    "expert": ("megatron.expert_model_parallel_size=2",),
    "data with the distributed optimizer": (
        "megatron.use_distributed_optimizer=true",
        "megatron.overlap_grad_reduce=true",
        "megatron.overlap_param_gather=true",
    ),
}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides: three small benchmarks, every five steps."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "sums.jsonl").write_text("".join(json.dumps({"a": a, "sum": 2 * a}) + "\n" for a in range(3)))
    benchmark = {"data": ["sums.jsonl"], "prompt": "{{ a }} + {{ a }}?", "environment": "math", "samples": 2}
    benchmark |= {"reference": {"answer": "sum|string"}, "max_tokens": 8, "sampling": {"temperature": 0.5}}
    (folder / "sums.yaml").write_text(json.dumps(benchmark))
    names = [*BENCHMARKS[:2], str(folder / "sums.yaml")]
    (folder / "suite.yaml").write_text(json.dumps({"benchmarks": names}))
    keys = {"every": 5, "suite": folder / "suite.yaml", "data_root": folder, "limit": 3, "tokenizer": "byte"}
    new = "data_root"
    return "precision=fp32", *(f"{'+' if key == new else ''}evaluate.{key}={value}" for key, value in keys.items())


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, train_ranks: Train, wanted: tuple[str, ...]) -> Path:
    """Ten steps on one rank with evaluations."""
    run_dir = tmp_path_factory.mktemp("single")
    train_ranks(run_dir, *wanted)
    return run_dir


def evaluated(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "evaluate" in line]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: line["evaluate"] | line["evaluate_bits"] for line in lines}


def answers(run_dir: Path, step: int) -> dict[Any, Any]:
    """Text or log-likelihoods of every sample."""
    stored = Store(folder_of(run_dir, step) / "store").answers()
    found = {sample.key: sample.logprobs or sample.answer for sample in stored}
    assert len(found) == 12 and all(found.values())
    return found


def weights(run_dir: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    (folder,) = (run_dir / run_directory.CHECKPOINTS).glob("iter_0000010")
    described = FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    # The distributed optimizer saves its buffers with uninitialised memory between parameters.
    tensors = {
        name: each
        for name, each in described
        if isinstance(each, TensorStorageMetadata) and not name.startswith("optimizer.distributed")
    }
    whole = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in tensors.items()}
    load(whole, storage_reader=FileSystemReader(folder), no_dist=True)
    return whole


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(None, marks=slow),
        pytest.param("expert", marks=deep),
        pytest.param("data with the distributed optimizer", marks=deep),
    ],
)
def test_evaluations_do_not_change_a_training(
    single: Path, train_ranks: Train, wanted: tuple[str, ...], tmp_path: Path, layout: str | None
) -> None:
    import torch

    evaluating, plain = single, tmp_path / "plain"
    own, ranks = ((), 1) if layout is None else (LAYOUTS[layout], 2)
    if layout is not None:
        evaluating = tmp_path / "evaluating"
        train_ranks(evaluating, *wanted, *own, ranks=ranks)

    train_ranks(plain, *(word for word in wanted if "every" not in word), *own, ranks=ranks)

    assert list(evaluated(evaluating)) == [0, 5, 10] and not evaluated(plain)
    assert losses(evaluating) == losses(plain) and len(losses(plain)) == 10
    with_them, without = weights(evaluating), weights(plain)
    assert with_them.keys() == without.keys() and len(without) > 50
    assert all(torch.equal(with_them[name], value) for name, value in without.items())


def losses(run_dir: Path) -> list[tuple[float, float]]:
    lines = [line for line in run_directory.read_metrics(run_dir / run_directory.METRICS) if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in lines]


@slow
def test_it_is_evaluated_at_the_start_at_steps_and_at_the_end(single: Path) -> None:
    found = evaluated(single)

    assert list(found) == [0, 5, 10] and all(set(each) == set(BENCHMARKS) for each in found.values())
    assert found[10]["docstring_bits"] != found[0]["docstring_bits"]
    told = write_report(single).read_text()
    assert f"| docstring_bits | bits per byte | {found[0]['docstring_bits']:.3f} at step 0 -> " in told
    assert "| sums | accuracy |" in told


@slow
def test_a_resumed_run_evaluates_no_step_twice(
    single: Path, train_ranks: Train, wanted: tuple[str, ...], tmp_path: Path
) -> None:
    """As if killed after step 10 with only the checkpoint of step 5; the later results are logged again."""
    run_dir = tmp_path / "run"
    shutil.copytree(single, run_dir)
    shutil.rmtree(run_dir / run_directory.CHECKPOINTS / "iter_0000010")
    (run_dir / run_directory.CHECKPOINTS / "latest_checkpointed_iteration.txt").write_text("5")
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "evaluate").rglob("results.json")}

    train_ranks(run_dir, *wanted)

    assert evaluated(run_dir) == evaluated(single)
    assert {path: path.stat().st_mtime_ns for path in (run_dir / "evaluate").rglob("results.json")} == before


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=slow if layout == "pipeline" else deep) for layout in LAYOUTS]
)
def test_two_ranks_match_one_rank(
    single: Path, train_ranks: Train, wanted: tuple[str, ...], tmp_path: Path, layout: str
) -> None:
    """With the same weights, from the other run's last step."""
    start = (
        f"megatron.pretrained_checkpoint={single / run_directory.CHECKPOINTS}",
        "train.tokens=512",
        "train.warmup_tokens=0",
    )

    train_ranks(tmp_path, *wanted, *start, *LAYOUTS[layout], ranks=2)

    expected, found = answers(single, 10), answers(tmp_path, 0)
    assert found.keys() == expected.keys()
    for key, answer in expected.items():
        assert found[key] == (answer if isinstance(answer, str) else pytest.approx(answer, abs=1e-4)), key
    assert list(evaluated(tmp_path)) == [0, 1]  # the second after one step, its last


@slow
def test_an_evaluation_that_fails_does_not_end_the_training(
    train_ranks: Train, wanted: tuple[str, ...], tmp_path: Path
) -> None:
    """A folder of another model's answers is refused."""
    record = folder_of(tmp_path, 5) / ".job" / "made_of.json"
    record.parent.mkdir(parents=True)
    record.write_text('{"model": "another", "checkpoint": null}')

    assert len(train_ranks(tmp_path, *wanted)) == 10

    assert list(evaluated(tmp_path)) == [0, 10]
    assert "evaluation at step 5 failed: ValueError" in (tmp_path / run_directory.LOG).read_text()
