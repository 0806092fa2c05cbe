"""Parents whose blocks are distributed over ranks: all results of Puzzle, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_ext.job.config import compose
from nemo_ext.puzzle.job import check

CUDA = torch.cuda.is_available()
WORDS = ("run_dir=unused", "data=mock", "precision=bf16", "model=nemotron3_nano_tiny")


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(2, marks=[pytest.mark.slow, pytest.mark.skipif(CUDA, reason="these ranks are CPUs")]),
        pytest.param(1, marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]),
    ],
)
def test_sharded_blocks_give_the_same_results_as_complete_ones(
    on_ranks: Callable[..., None], ranks: int, tmp_path: Path
) -> None:
    config = compose("train", [*WORDS, 'model.pattern="M*E-*-"'])
    (tmp_path / "config.json").write_text(json.dumps(config))
    on_ranks(Path(__file__).with_name("sharded_rank.py"), tmp_path, ranks)
    whole = torch.load(tmp_path / "whole.pt")

    for kind in ("shard", "offload"):
        shared = torch.load(tmp_path / f"{kind}.pt")
        for key in ("scores", "importance", "tensors", "loss", "rounds"):
            torch.testing.assert_close(shared[key], whole[key], rtol=0, atol=0)
        torch.testing.assert_close(shared["dependency"], whole["dependency"], rtol=0, atol=0, equal_nan=True)
        blocks = whole["held"] - whole["outside"]
        assert whole["outside"] + blocks / ranks <= shared["held"] < whole["outside"] + 1.04 * blocks / ranks
        files = sorted((tmp_path / "whole").rglob("*.safetensors"))
        assert len(files) > 20
        for file in files:
            one, other = load_file(file), load_file(tmp_path / kind / file.relative_to(tmp_path / "whole"))
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_ranks_that_share_blocks_need_equally_many_batches() -> None:
    words = ["data=mock", "launcher.nproc_per_node=2", "puzzle.calibration={sequences: 12, batch: 4}"]
    check(compose("puzzle", words))
    with pytest.raises(ValueError, match=r"puzzle.calibration has 3 batches for 2 ranks, but puzzle.fsdp requires"):
        check(compose("puzzle", [*words, "puzzle.fsdp=shard"]))
    with pytest.raises(ValueError, match=r"fsdp=.shared.: input should be .shard. or .offload."):
        check(compose("puzzle", [*words, "puzzle.fsdp=shared"]))
