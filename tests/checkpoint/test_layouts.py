"""A converted checkpoint starts a run at any tensor, pipeline and expert parallel size; its exports are complete."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_ext.checkpoint import hf
from nemo_ext.job.config import compose

SETTINGS = hf.Settings()
STANDING_STILL = (
    "train.tokens=512",
    "train.warmup_tokens=0",
    "megatron.lr=1e-30",  # Megatron requires a positive rate; this one does not change fp32 weights
    "megatron.min_lr=0",
    "megatron.save_interval=1",
)
LAYOUTS = {
    "tensor and sequence": ("megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"),
    "pipeline": ("megatron.pipeline_model_parallel_size=2",),
    "expert": ("megatron.expert_model_parallel_size=2",),
}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("nemotron3_nano_tiny", "expert", marks=pytest.mark.slow),
        pytest.param("nemotron3_nano_tiny", "tensor and sequence", marks=pytest.mark.slow),
        pytest.param("nemotron3_nano_tiny", "pipeline", marks=pytest.mark.deep),
        pytest.param("olmo3_tiny", "tensor and sequence", marks=pytest.mark.deep),
        pytest.param("llama_nemotron_tiny", "tensor and sequence", marks=pytest.mark.deep),
    ],
)
def test_weights_survive_a_layout_bit_for_bit(
    model: str, layout: str, hf_folder: Callable[..., Any], train_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    sections = compose("describe", [f"model={model}"])
    folder, _ = hf_folder(sections)
    hf.convert(hf.plan(folder, tmp_path / "megatron", SETTINGS, sections), SETTINGS, progress=False)
    moe = ("megatron.moe_router_bias_update_rate=0",) if model.startswith("nemotron3") else ()

    pretrained = f"megatron.pretrained_checkpoint={tmp_path / 'megatron'}"
    lines = train_ranks(
        tmp_path / "run", f"model={model}", pretrained, *STANDING_STILL, *moe, *LAYOUTS[layout], ranks=2
    )
    plan = hf.plan(tmp_path / "run", tmp_path / "export", SETTINGS)
    hf.convert(plan, SETTINGS, progress=False)

    assert lines[0]["grad_norm"] > 0
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first, last = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "export"))
    apart = {key for key in first if first[key] != last[key]}
    assert not apart
    assert any("optimizer state" in remark for remark in plan.remarks)
