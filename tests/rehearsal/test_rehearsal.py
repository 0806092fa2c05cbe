"""Ranks of small jobs against the cost model and against torch's own allocator."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_ext.job.config import compose
from nemo_ext.rehearsal.job import rehearse
from nemo_ext.rehearsal.settings import rehearsed

TINY = ("recipe=nemotron3_nano/quickstart", "run_dir=unused", "data=mock", "megatron.bf16=true")


def of(*words: str, stages: Any = "all", folder: Path) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = rehearse(compose("rehearse", [*TINY, *words]), stages, folder)["ranks"]
    return ranks


def test_stages_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rehearse.stages=\[0, 3\]: the layout has pipeline ranks 0 to 0"):
        of(stages=[0, 3], folder=tmp_path)


def test_of_phases_the_longest_is_rehearsed() -> None:
    config, _ = rehearsed(compose("rehearse", ["recipe=domyn_small/foundation"]))
    flags = config["megatron"]
    assert (flags["seq_length"], flags["global_batch_size"]) == (16384, 256)
    assert flags["max_position_embeddings"] >= 16384


def test_a_layout_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a multiple of tensor_parallel 3"):
        of("launcher.nproc_per_node=3", "megatron.tensor_model_parallel_size=3", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("launcher.nproc_per_node=2", "megatron.use_distributed_optimizer=true"),
        (
            "launcher.nproc_per_node=4",
            "megatron.tensor_model_parallel_size=2",
            "megatron.sequence_parallel=true",
            "megatron.pipeline_model_parallel_size=2",
        ),
        (
            "launcher.nproc_per_node=8",
            "megatron.micro_batch_size=2",
            "megatron.expert_model_parallel_size=4",
            "megatron.moe_token_dispatcher_type=alltoall",
        ),
        ("model=llama_nemotron_tiny", "launcher.nproc_per_node=2", "megatron.context_parallel_size=2"),
        (
            "model=olmo3_tiny",
            "launcher.nproc_per_node=2",
            "megatron.pipeline_model_parallel_size=2",
            "model.pattern=*-|*-|*-|*-",
        ),
    ],
    ids=["data", "tensor_pipeline", "expert", "context", "interleaved"],
)
def test_what_is_exact_and_flops(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank in of(*words, folder=tmp_path):
        guess = rank["estimate"]
        assert rank["parameters"] == guess["parameters"]
        for kind in ("weights", "gradients", "optimizer"):
            assert rank["peak"][kind] == pytest.approx(guess[kind], rel=0.02), kind
        assert sum(rank["flops"].values()) == pytest.approx(guess["flops"], rel=0.1)
        assert rank["peak"]["activations"] > 0
    assert not (tmp_path / "unused").exists(), "nothing is written where training would"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["model=domyn_small_tiny", "model=olmo3_tiny", "model=nemotron3_nano_tiny model.pattern=M*M-M"]
)
def test_a_peak_is_what_torch_allocates(words: str, tmp_path: Path) -> None:
    """With the kernels of this machine on both sides; routing wants values, so there are no experts."""
    config, _ = rehearsed(compose("rehearse", [*TINY, *words.split(), "megatron.micro_batch_size=4"]))
    asked = {"config": config, "rank": 0, "world": 1, "micro_batches": 2}
    file, record = tmp_path / "asked.json", tmp_path / "record.json"
    file.write_text(json.dumps({**asked, "kernels": False}))
    subprocess.run([sys.executable, "-m", "nemo_ext.rehearsal.rank", file, record], check=True)
    file.write_text(json.dumps(asked))
    real = subprocess.run(
        [sys.executable, Path(__file__).with_name("truth.py"), file], check=True, capture_output=True, text=True
    )

    said = json.loads(record.read_text())["peak_bytes"]
    assert said == pytest.approx(int(real.stdout.split()[-1]), rel=0.05)
