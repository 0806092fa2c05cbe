"""The script that measures a GPU's rates, at toy sizes on the CPU, and its arithmetic on a machine of known speed."""

import importlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nemo_ext.architecture.gpus import GPUS, gpu_file

FOLDER = Path(__file__).parents[2] / "benchmarks"
STEP_MS = 2.0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_rates")


class Clock:
    """A machine on which every step that runs takes `STEP_MS`."""

    device, rounds = "cpu", 1

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_(grad)

    def measure(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        for step in steps.values():
            step()
        timing = importlib.import_module("gpu_timing").Timing
        return {name: timing(STEP_MS, STEP_MS, STEP_MS) for name in steps}


def test_rates_are_flops_and_bytes_over_seconds(script: ModuleType) -> None:
    rates, seconds = script.Rates(Clock(), small=True), STEP_MS / 1e3

    assert rates.matmul()[4096] == pytest.approx(3 * 2 * 64 * 64 * 64 / seconds)
    assert rates.grouped()[2048] == pytest.approx(3 * 2 * 16 * 32 * 32 * 16 / seconds)
    assert rates.memory() == pytest.approx(3 * 2 * 4096 / seconds)
    attention = rates.attention()
    assert attention.forward == pytest.approx(4 * 2 * 16 * (64 + 1) / 2 * 64 / seconds)


def test_a_rate_that_cannot_be_measured_is_the_base_s(
    script: ModuleType, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):  # also after a test that imported a stand-in
        monkeypatch.setitem(sys.modules, name, None)
    base = GPUS["H100-80GB"]
    rates = script.Rates(Clock(), small=True)
    rates.scan = lambda: 7.0
    found = script.measured(base, rates)

    assert (found.scan, found.node, found.matmul["fp8"]) == (7.0, base.node, base.matmul["fp8"])
    assert found.matmul["bf16"] != base.matmul["bf16"]
    assert "not measured: fp8: " in capsys.readouterr().err
    assert not {"scan", "memory", "attention"} & set(found.estimates)
    assert {"sustained", "grouped", "node.latency"} <= set(found.estimates), "grouped products in FP8 are not measured"
    scaled = script.measured(GPUS["B200-180GB"], rates)
    assert "matmul" in scaled.estimates, "its products in FP8 are estimates"


@pytest.mark.slow
def test_two_ranks_write_a_file_that_predictions_read(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(FOLDER / "gpu_rates.py")]
    words = ["--base", "A100-64GB", "--device", "cpu", "--small", "--output", str(tmp_path / "mine.yaml")]
    subprocess.run([*command, *words], check=True, capture_output=True, timeout=300)

    found, base = gpu_file(str(tmp_path / "mine.yaml")), GPUS["A100-64GB"]
    assert found.node != base.node and found.between == base.between
    assert found.node.mesh and "2 ranks" in found.source
    assert "node.all_to_all" not in found.estimates and "between.latency" in found.estimates
