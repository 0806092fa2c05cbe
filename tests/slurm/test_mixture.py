"""A mixture on a real Slurm: small runs as an array, then a task that fits, trains on the optimum and writes it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.deep
@pytest.mark.slurm
def test_real_runs_in_an_array_give_a_mixture(slurm: Any, nemo_ext: Callable[..., str], tmp_path: Path) -> None:
    for name, line in (("web", "a page with words, number {}"), ("code", "def f{0}(x): return {0} + x")):
        texts = [json.dumps({"text": 20 * line.format(number)}) for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
        nemo_ext(
            "tokenize", f"input={tmp_path}/{name}.jsonl", f"output={tmp_path}/{name}", "tokenizer=byte", "workers=1"
        )
    small = (
        "scale=laptop megatron.seq_length=64 megatron.global_batch_size=4 megatron.micro_batch_size=4 train.tokens=2e3"
    )
    streams = "streams=[{name: web, weight: 1}, {name: code, weight: 1}]"
    data = f"data_root={tmp_path} data.tokenizer={{kind:byte}} '{streams}'"
    asked = "suite=quick evaluate.benchmarks=[python_bits,docstring_bits] evaluate.limit=2 evaluate.draws=50"
    words = [f"train=model=olmo3_tiny {small} {data}", f"evaluate={asked} serving.device=cpu", "mixture.runs=2"]
    site = ["job=mixture", "slurm.shards=2", "cluster=testbed", "slurm.folder=record"]

    nemo_ext("submit", *site, f"output={tmp_path}/mix", *words)

    slurm.wait(lambda: not slurm.call("squeue", "-h"), seconds=1200, what=lambda: "two arrays")
    assert nemo_ext("status", "record").count("finished") == 3
    found = json.loads((tmp_path / "mix" / "mixture.json").read_text())
    losses = [run["bits_per_byte"]["python_bits"] for run in found["runs"].values()]
    assert len(set(losses)) == 3
    assert all(0 < loss < 20 for loss in losses)
    assert found["bits_per_byte"]["python_bits"]["measured"] > 0
