"""Findings on a training run before it is queued."""

from types import SimpleNamespace

from nemo_ext.job.config import compose
from nemo_ext.megatron.preflight import findings


def test_a_run_whose_memory_is_not_estimated_can_be_queued() -> None:
    site = SimpleNamespace(cluster=SimpleNamespace(node=SimpleNamespace(gpu="H100-80GB", gpu_memory_gib=80, fp8=())))
    config = compose("train", ["recipe=olmo1/1b", "run_dir=unused", "megatron.use_megatron_fsdp=true"])

    found = next(findings(config, site, paths=False, here=False))

    assert found.kind == "note"
    assert "not estimated with FSDP" in found.text
