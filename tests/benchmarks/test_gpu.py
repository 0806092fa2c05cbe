"""The script of GPU ratios at toy sizes: every part runs, and what it compares computes the same."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("gpu_parts")


@pytest.mark.deep
def test_every_part_runs_at_toy_sizes(tmp_path: Path) -> None:
    output = tmp_path / "gpu.md"
    command = [sys.executable, "-W", "ignore", str(FOLDER / "gpu.py"), "--device", "cpu", "--small"]

    ended = subprocess.run(
        [*command, "--output", str(output)], cwd=FOLDER.parent, capture_output=True, text=True, timeout=300, check=False
    )

    assert ended.returncode == 0, ended.stderr[-3000:]
    table = output.read_text()
    assert ended.stdout == table
    assert table.count("**FP8 against BF16") == 2
    assert table.count("**3 FFNs") == 3
    assert table.count("**Mamba-2 scan") == 1
    without = [line for line in table.splitlines() if "cannot run" in line]
    assert without == [
        "| Triton (mamba_ssm) | - | - | cannot run: RuntimeError: mamba_ssm's kernels need a CUDA device |"
    ]
    assert "the figures do not apply to GPUs" in table


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA device")
def test_without_a_device_it_says_what_to_do(parts: ModuleType) -> None:
    gpu = importlib.import_module("gpu")

    with pytest.raises(SystemExit, match="--device cpu --small"):
        gpu.main(gpu.parse([]))


def test_a_broken_part_does_not_end_the_others(
    parts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    gpu = importlib.import_module("gpu")

    def broken(sizes: object, machine: object) -> None:
        raise RuntimeError("engine | broken")

    words = ["--device", "cpu", "--small", "--output", str(tmp_path / "gpu.md"), "--parts", "fp8", "ssd"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpu.PARTS, "fp8", broken)
        patch.setenv("TRITON_INTERPRET", "1")
        gpu.main(gpu.parse(words))

    table = (tmp_path / "gpu.md").read_text()
    assert "| all | - | - | cannot run: RuntimeError: engine / broken |" in table
    assert "**Mamba-2 scan" in table
