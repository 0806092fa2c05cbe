"""Fixtures for runs of Megatron's trainer: a first run, packs, streams, and log-probabilities of a teacher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_ext.data.packs.packed_files import PackingSettings, write_packed
from nemo_ext.data.packs.sample_files import write_samples
from nemo_ext.data.text.indexed_dataset import write_index
from nemo_ext.data.training import with_data
from nemo_ext.job import run_directory
from nemo_ext.job.config import compose

Train = Callable[..., list[dict[str, Any]]]
EOD = 256


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, train_ranks: Train) -> Path:
    """A run of a hybrid MoE model, ten steps on one rank, with checkpoints of steps 5 and 10."""
    run_dir = tmp_path_factory.mktemp("single")
    train_ranks(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def saved_logits(single: Path, tmp_path_factory: pytest.TempPathFactory, train_ranks: Train) -> Path:
    """The eight most probable tokens of every position by that model; the run that saved them is the folder above."""
    run_dir = tmp_path_factory.mktemp("saving")
    frozen = (
        "megatron.freeze_all_layers=true",
        "megatron.async_save=true",
        "megatron.use_persistent_ckpt_worker=true",
        "megatron.async_strategy=mcore",
        "megatron.logits_save_dtype=fp32",
        "megatron.eval_iters=0",
    )
    dims = (f"megatron.logits_save_dir={run_dir / 'logits'}", "megatron.logits_save_top_k=8")
    steps = ("train.tokens=1536", "train.warmup_tokens=0", "megatron.save_interval=2")
    start = f"megatron.pretrained_checkpoint={single / run_directory.CHECKPOINTS}"
    train_ranks(run_dir, *steps, *frozen, *dims, start)
    return run_dir / "logits"


@pytest.fixture(scope="session")
def packs_at() -> Callable[..., None]:
    """Writes packs of 64 tokens; samples are a short repeated phrase, so that the model can learn them."""

    def write(prefix: Path, count: int = 200, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)

        def sample() -> tuple[np.ndarray, np.ndarray]:
            length = int(generator.integers(4, 40))
            ids = np.resize(np.array([7, 11, 13, 17]), length) + int(generator.integers(0, 4))
            return ids, (np.arange(length) >= 2).astype(np.uint8)

        samples = write_samples(
            prefix.with_name(f"{prefix.name}.samples"), (sample() for _ in range(count)), vocab_size=257
        )
        write_packed(prefix, [samples], PackingSettings(capacity=64), vocab_size=257, progress=False)

    return write


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory, packs_at: Callable[..., None]) -> Path:
    """A folder with packs `train` and `valid`."""
    folder = tmp_path_factory.mktemp("packs")
    packs_at(folder / "train")
    packs_at(folder / "valid", count=40, seed=1)
    return folder


@pytest.fixture(scope="session")
def packed_config() -> Callable[..., dict[str, Any]]:
    """A training config on a folder of packs, as a user writes it."""

    def make(folder: Path, *overrides: str) -> dict[str, Any]:
        config = compose("train", ["data=mock", "megatron.seq_length=64", "megatron.num_workers=0", *overrides])
        for name in ("mock_data", "tokenizer_type", "vocab_size"):
            config["megatron"].pop(name)
        config["data"] = {"packed": {"train": str(folder / "train"), "valid": str(folder / "valid")}}
        return with_data(config)

    return make


@pytest.fixture(scope="session")
def streams(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two streams to blend: documents of 1 to 50 tokens, each a counting sequence and its end token."""
    folder = tmp_path_factory.mktemp("streams")
    for seed, name in enumerate("ab"):
        generator = np.random.default_rng(seed)
        documents = [
            np.append((np.arange(length) + start) % 200, EOD)
            for length, start in generator.integers(1, 200, (400, 2)) % np.array([50, 200]) + np.array([1, 0])
        ]
        np.concatenate(documents).astype(np.uint16).tofile(folder / f"{name}.bin")
        write_index(folder / f"{name}.idx", np.array([len(document) for document in documents]), np.uint16)
    return [str(folder / name) for name in "ab"]
