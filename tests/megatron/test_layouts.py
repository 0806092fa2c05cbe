"""Matrix of trainings and layouts: in every layout, ranks learn the same as one rank.

Trainings: text, packs, rows of mixed lengths, a student with an online teacher and from the teacher's files. Runs
start from weights of another run, because ranks of different layouts draw different weights from one seed.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from nemo_ext.job import run_directory

pytestmark = pytest.mark.usefixtures("megatron")
"""In the worker that has imported Megatron, so that runs from which others start are made once."""

Train = Callable[..., list[dict[str, Any]]]

TENSOR = ("megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true")
LAYOUTS = {
    "tensor": TENSOR,
    "pipeline": (
        "megatron.pipeline_model_parallel_size=2",
        *(
            "megatron.recompute_granularity=full",
            "megatron.recompute_method=uniform",
            "megatron.recompute_num_layers=1",
        ),
    ),
    "expert": ("megatron.expert_model_parallel_size=2", "megatron.use_distributed_optimizer=true"),
    "data": ("megatron.use_distributed_optimizer=true",),
    "plain data": (),
    "plain pipeline": ("megatron.pipeline_model_parallel_size=2",),
}
"""On two ranks: recomputing pipeline stages; expert parallelism with data parallelism and a distributed optimizer."""

DENSE = ("model=llama_nemotron_tiny",)
HYBRID = ("megatron.num_experts=4", "megatron.hidden_size=128", "model.pattern=ME*E")
"""Students: without experts and Mamba, and with a number of experts other than the teacher's eight."""
PREDICTING = (
    "++megatron.moe_latent_size=48",
    "model.pattern='ME*E{latent=32}/*E{latent=24}/*E{latent=24}'",
    "megatron.mtp_loss_scaling_factor=0.3",
)
"""Latent experts of three widths, and two depths of multi-token prediction."""
STUDENTS = {"dense": DENSE, "hybrid": HYBRID, "prediction": PREDICTING}
THREE_STEPS = ("train.tokens=1536", "train.warmup_tokens=0", "megatron.save_interval=2")
ONE_STEP = ("train.tokens=512", "train.warmup_tokens=0")


def losses(lines: list[dict[str, Any]], name: str = "loss") -> list[float]:
    return [line[name] for line in lines]


def checkpoint(run_dir: Path) -> str:
    return f"megatron.pretrained_checkpoint={run_dir / run_directory.CHECKPOINTS}"


@dataclass(frozen=True)
class Job:
    """Three steps of a training: overrides, and the section `data` of their config."""

    words: tuple[str, ...]
    data: Mapping[str, Any] | None = None


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, single: Path, train_ranks: Train) -> Callable[[str], Job]:
    """Trainings by name."""
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")

    @cache
    def student(name: str) -> str:
        run_dir = factory.mktemp("student")
        train_ranks(run_dir, *STUDENTS[name], *ONE_STEP)
        return checkpoint(run_dir)

    @cache
    def make(name: str) -> Job:
        one_row = ("megatron.micro_batch_size=1", "megatron.global_batch_size=4", "train.tokens=768")
        if name == "text":
            return Job((checkpoint(single), "train.tokens=1536"))
        if name == "prediction":
            return Job((*THREE_STEPS, *PREDICTING, student(name)))
        if name == "packs":
            filled = request.getfixturevalue("packed_config")(
                request.getfixturevalue("packs"), "run_dir=unused", "megatron.micro_batch_size=1"
            )["megatron"]
            names = ("train_data_path", "valid_data_path", "calculate_per_token_loss")
            words = [f"megatron.{name}={str(filled[name]).lower()}" for name in names]
            return Job((checkpoint(single), "megatron.mock_data=false", *one_row, *words))
        if name == "mixed lengths":
            a, b = request.getfixturevalue("streams")
            blend = [f"megatron.{split}_data_path=[3,{a},1,{b}]" for split in ("train", "valid")]
            data = {"mixed_lengths": {"short": 16, "short_share": 0.5, "document_boundaries": True}}
            return Job((checkpoint(single), "megatron.mock_data=false", *one_row, *blend), data)
        if name == "files":
            told = (f"megatron.logits_load_dir={request.getfixturevalue('saved_logits')}",)
            return Job((*THREE_STEPS, *DENSE, student("dense"), *told))
        _, kind, top_k = name.split()
        told = (f"distillation.teacher={single}", f"distillation.top_k={top_k}", "distillation.lm_weight=0.5")
        return Job((*THREE_STEPS, *STUDENTS[kind], student(kind), *told))

    return make


@pytest.fixture(scope="module")
def alone(
    job: Callable[[str], Job], tmp_path_factory: pytest.TempPathFactory, train_ranks: Train
) -> Callable[[str], list[dict[str, Any]]]:
    """Losses logged by one rank in a training."""
    return cache(lambda name: train_ranks(tmp_path_factory.mktemp("alone"), *job(name).words, data=job(name).data))


EVERY = {
    "text": ("tensor", "pipeline", "expert", "data"),
    "packs": ("tensor", "pipeline", "expert", "plain data", "plain pipeline"),
    "prediction": ("tensor", "pipeline", "expert"),
    "mixed lengths": ("tensor", "pipeline", "expert", "plain data"),
    "files": ("tensor", "plain pipeline", "plain data"),
    **{f"teacher dense {top_k}": ("tensor", "plain pipeline", "plain data") for top_k in ("null", "8")},
    **{f"teacher hybrid {top_k}": ("tensor", "plain pipeline", "expert") for top_k in ("null", "8")},
}
SLOW = {
    *product(("text",), ("tensor", "pipeline", "expert")),
    *product(("prediction",), ("tensor", "pipeline", "expert")),
    *(("packs", "tensor"), ("packs", "expert"), ("mixed lengths", "pipeline"), ("files", "tensor")),
    *(("teacher dense null", "plain data"), ("teacher hybrid null", "tensor"), ("teacher hybrid 8", "plain pipeline")),
}
"""Each layout and each training; `make deep` runs the other combinations."""


def pairs() -> Iterator[Any]:
    for name, layouts in EVERY.items():
        for layout in layouts:
            mark = pytest.mark.slow if (name, layout) in SLOW else pytest.mark.deep
            yield pytest.param(name, layout, marks=mark, id=f"{name}, {layout}")


@pytest.mark.parametrize(("name", "layout"), [*pairs()])
def test_two_ranks_learn_the_same_as_one(
    job: Callable[[str], Job], alone: Callable[[str], Any], train_ranks: Train, tmp_path: Path, name: str, layout: str
) -> None:
    expected = alone(name)

    together = train_ranks(tmp_path, *job(name).words, *LAYOUTS[layout], ranks=2, data=job(name).data)

    assert len(expected) == 3
    assert losses(together) == pytest.approx(losses(expected), rel=1e-5)
    assert losses(together, "grad_norm") == pytest.approx(losses(expected, "grad_norm"), rel=1e-4)
    for key in ("mtp_1_loss", "mtp_2_loss") if name == "prediction" else ():
        assert losses(together, key) == pytest.approx(losses(expected, key), rel=1e-5)
    if name.startswith(("teacher", "files")):
        assert losses(together, "kl_to_teacher") == pytest.approx(losses(expected, "kl_to_teacher"), rel=1e-5)


@pytest.mark.slow
def test_parts_of_sequences_learn_the_same_as_one_rank(train_ranks: Train, tmp_path: Path) -> None:
    """Without attention, for which it needs Transformer Engine."""
    train_ranks(tmp_path / "start", "model.pattern=ME-", *ONE_STEP)
    words = ("model.pattern=ME-", "train.tokens=1536", checkpoint(tmp_path / "start"))

    alone = train_ranks(tmp_path / "one", *words)
    together = train_ranks(tmp_path / "two", *words, "megatron.context_parallel_size=2", ranks=2)

    assert len(alone) == 3
    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(together, "grad_norm") == pytest.approx(losses(alone, "grad_norm"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("packs", 0.5), ("mixed lengths", 0.8)])
def test_training_from_random_weights_learns(
    job: Callable[[str], Job], train_ranks: Train, tmp_path: Path, name: str, share: float
) -> None:
    words = [word for word in job(name).words if "pretrained_checkpoint" not in word]
    evaluated = ("train.tokens=2560", "megatron.eval_interval=5", "train.validate_at_start=true")

    found = losses(train_ranks(tmp_path, *words, *evaluated, data=job(name).data))

    assert len(found) == 10 and found[-1] < share * found[0]
    lines = run_directory.read_metrics(tmp_path / run_directory.METRICS)
    validated = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert list(validated) == [0, 5, 10] and validated[10] < share * validated[0]


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_resumes_under_tensor_parallelism(
    single: Path, train_ranks: Train, tmp_path: Path
) -> None:
    checkpoints = tmp_path / run_directory.CHECKPOINTS
    shutil.copytree(single / run_directory.CHECKPOINTS, checkpoints)
    shutil.rmtree(checkpoints / "iter_0000010")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("5")

    resumed = train_ranks(tmp_path, *TENSOR, ranks=2)

    whole = [line for line in run_directory.read_metrics(single / run_directory.METRICS) if "loss" in line]
    assert [line["step"] for line in resumed] == [6, 7, 8, 9, 10]
    assert losses(resumed) == pytest.approx(losses(whole[5:]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        # QK norm over all heads, norm on the output
        (("model=olmo3_tiny",), ("q_layernorm", "k_layernorm", "output_norm")),
        # linear-replaced blocks
        (("model=llama_nemotron_tiny",), ("self_attention.weight", "mlp.weight")),
        (PREDICTING, ("latent_proj", "enorm", "hnorm", "eh_proj", "mtp.layers.1.final_layernorm")),
    ],
)
def test_tensor_parallel_ranks_learn_the_same_weights(
    train_ranks: Train, tmp_path: Path, family: tuple[str, ...], parameters: tuple[str, ...]
) -> None:
    """A wrong gradient of a few weights would not be visible in losses."""
    two_steps = ("train.tokens=1024", "train.warmup_tokens=0", "megatron.lr=1e-3")
    train_ranks(tmp_path / "start", *family, *ONE_STEP)

    alone, together = tmp_path / "one", tmp_path / "two"
    train_ranks(alone, *family, checkpoint(tmp_path / "start"), *two_steps)
    train_ranks(together, *family, checkpoint(tmp_path / "start"), *two_steps, *TENSOR, ranks=2)

    first, expected, got = (saved_weights(run_dir, parameters) for run_dir in (tmp_path / "start", alone, together))
    assert expected.keys() == got.keys() and len(expected) >= len(parameters)
    for name, weight in expected.items():
        moved = (weight - first[name]).abs().max()
        assert moved > 1e-4, f"{name} was not trained"
        assert (got[name] - weight).abs().max() < 0.05 * moved, name


def saved_weights(run_dir: Path, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Complete weights of the newest checkpoint of any layout, selected by parts of their names."""
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
def test_virtual_pipeline_stages_learn_the_same_as_one_rank(train_ranks: Train, tmp_path: Path) -> None:
    train_ranks(tmp_path / "start", "model.pattern=ME*EME-E", *ONE_STEP)
    start = ("train.tokens=1536", checkpoint(tmp_path / "start"))

    alone = train_ranks(tmp_path / "one", "model.pattern=ME*EME-E", *start)
    two = ("model.pattern=ME|*E|ME|-E", "megatron.pipeline_model_parallel_size=2", "train.validate_at_start=true")
    together = train_ranks(tmp_path / "two", *two, *start, ranks=2)

    assert losses(together) == pytest.approx(losses(alone), rel=1e-5)
    first = run_directory.read_metrics(tmp_path / "two" / run_directory.METRICS)[0]
    assert first["step"] == 0 and 5 < first["val_loss"] < 7  # of the model before its checkpoint is loaded


@pytest.mark.slow
def test_blocks_with_other_numbers_of_experts_all_balance_their_experts(train_ranks: Train, tmp_path: Path) -> None:
    train_ranks(tmp_path, 'model.pattern="E{experts=8}E{experts=4}"', *ONE_STEP)
    biases = saved_weights(tmp_path, ("expert_bias",))
    assert [bias.numel() for _, bias in sorted(biases.items())] == [8, 4]
    for name, bias in biases.items():
        assert bias.abs().max() > 0, f"{name} was not updated"
