"""The same command on a machine with CUDA: the local back end, with Megatron's and our own modules on the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_local_back_end_learns_on_the_device(
    train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path, precision: str
) -> None:
    lines = train_ranks(tmp_path, "model.backend=local", f"precision={precision}")

    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]


def test_the_fused_squared_relu_changes_no_loss(
    train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    words = ("model.backend=local", "model=domyn_small_tiny", "precision=bf16")

    plain = train_ranks(tmp_path / "plain", *words)
    fused = train_ranks(tmp_path / "fused", *words, "+model.fused_squared_relu=true")

    # Megatron compiles its own, which rounds as the kernel does; sums on the device may come in another order.
    assert [line["loss"] for line in fused] == pytest.approx([line["loss"] for line in plain], rel=2e-3)


@pytest.mark.parametrize("model", ["domyn_small_tiny", "llama_nemotron_tiny", "olmo1_tiny", "olmo3_tiny"])
def test_the_other_families_learn_on_the_device(
    train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path, model: str
) -> None:
    lines = train_ranks(tmp_path, "model.backend=local", f"model={model}")

    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


@pytest.mark.parametrize("model", ["nemotron3_nano_tiny", "domyn_small_tiny", "llama_nemotron_tiny", "olmo3_tiny"])
def test_fp8_learns_as_bf16_does(train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path, model: str) -> None:
    """With Transformer Engine where it is installed, else with torch's products of float8 matrices."""
    words = [f"model={model}", "train.tokens=25600", "megatron.lr=5e-4", "megatron.save_interval=50"]

    found = {
        precision: train_ranks(tmp_path / precision, *words, f"precision={precision}")
        for precision in ("bf16", "fp8_current")
    }

    last = {name: sum(line["loss"] for line in lines[-10:]) / 10 for name, lines in found.items()}
    assert len(found["bf16"]) == 50
    assert last["fp8_current"] != last["bf16"]
    assert last["fp8_current"] == pytest.approx(last["bf16"], rel=0.01)
