"""Tensors that a rank would write, compared with a checkpoint that Megatron wrote."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_ext.job.config import compose
from nemo_ext.rehearsal.ranks import rehearse
from nemo_ext.rehearsal.saved import combine, sum_tensors

TINY = ("recipe=nemotron3_nano/quickstart", "data=mock", "megatron.bf16=true", "megatron.micro_batch_size=2")
SHARED = ("megatron.use_distributed_optimizer=true",)


def test_sums_over_ranks() -> None:
    def rank(stage: int) -> dict[str, object]:
        tensors = [
            {"name": f"decoder.layers.{stage}.mixer.weight", "bytes": 100, "own_bytes": 50},
            {"name": "chained_0.optimizer.distributed.param", "bytes": 600, "own_bytes": 75 + stage},
        ]
        return {**sum_tensors(tensors), "names": [line["name"] for line in tensors], "writers": 8}

    ranks = [rank(0), rank(2)]
    assert ranks[0]["own_bytes"] == 125
    sums = combine(ranks, 1.5)
    assert sums == {
        "bytes": 2100,
        "model_bytes": 300,
        "optimizer_bytes": 1800,
        "own_bytes": 127,
        "tensors": 3,
        "writers": 8,
        "estimated": True,
    }
    assert not any("names" in rank for rank in ranks)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(SHARED, marks=pytest.mark.slow, id="distributed"),
        pytest.param((), marks=pytest.mark.deep, id="plain"),
    ],
)
def test_names_and_shapes_match_a_written_checkpoint(
    words: tuple[str, ...], launched: Callable[..., str], tmp_path: Path
) -> None:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    one = ("megatron.train_iters=1", "megatron.lr_warmup_iters=0", "megatron.lr_wsd_decay_iters=1")
    batch = ("megatron.global_batch_size=2", "megatron.eval_iters=0", f"run_dir={tmp_path / 'run'}")
    launched("train", *TINY, *words, *one, *batch)
    reader = FileSystemReader(tmp_path / "run" / "checkpoints" / "iter_0000001")
    stored = reader.read_metadata().state_dict_metadata
    real = {
        name: (list(each.size), str(each.properties.dtype))
        for name, each in stored.items()
        if isinstance(each, TensorStorageMetadata)
    }

    made = rehearse(compose("rehearse", [*TINY, *words, "run_dir=unused"]), "all", tmp_path / "ranks")
    listed = json.loads(Path(made["ranks"][0]["checkpoint"]["list"]).read_text())
    assert {line["name"]: (line["shape"], f"torch.{line['type']}") for line in listed} == real
    size = sum(file.stat().st_size for file in reader.path.glob("*.distcp"))
    assert made["checkpoint"]["bytes"] == pytest.approx(size, rel=0.05)
    assert made["checkpoint"]["own_bytes"] == made["checkpoint"]["bytes"]


@pytest.mark.slow
def test_ranks_divide_a_checkpoint(tmp_path: Path) -> None:
    parallel = ("launcher.nproc_per_node=8", "megatron.expert_model_parallel_size=4")
    words = (*TINY, *SHARED, *parallel, "megatron.moe_token_dispatcher_type=alltoall", "run_dir=unused")
    made = rehearse(compose("rehearse", words), "all", tmp_path)
    saved, parameters = made["checkpoint"], 2_454_960
    assert saved["optimizer_bytes"] == pytest.approx(12 * parameters, rel=0.01)
    assert saved["model_bytes"] == pytest.approx(2 * parameters, rel=0.01)
    assert saved["own_bytes"] == pytest.approx(saved["bytes"] / 8, rel=0.05)
