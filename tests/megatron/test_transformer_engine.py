"""Settings for Transformer Engine, without Transformer Engine."""

import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nemo_ext.job.config import compose
from nemo_ext.megatron.arguments import command_line

UNFUSED = "NVTE_UNFUSED_ATTN"


@pytest.fixture
def build(megatron: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Builds a stage of one of Megatron's linear layers, without apex."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, layers
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    from nemo_ext.megatron import transformer_engine

    def stage(
        backend: str = "auto", dtype: torch.dtype = torch.bfloat16, impl: str = "transformer_engine"
    ) -> ColumnParallelLinear:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
        config.gradient_accumulation_fusion, config.params_dtype = True, dtype
        config.transformer_impl, config.attention_backend = impl, AttnBackend[backend]

        def made() -> Any:
            if backend == "auto":  # as LanguageModule._set_attention_backend does
                assert os.environ.get(UNFUSED) in (None, "1")
                os.environ[UNFUSED] = "1"
            init = torch.nn.init.ones_
            return ColumnParallelLinear(8, 8, config=config, init_method=init, bias=False, gather_output=False)

        return transformer_engine.build(config, made)

    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    with patch.dict(os.environ):
        os.environ.pop(UNFUSED, None)
        yield stage


def test_without_apex_only_the_output_layer_has_no_fused_gradients(build: Callable[..., Any]) -> None:
    layer = build()
    assert layer.gradient_accumulation_fusion is False
    assert layer.config.gradient_accumulation_fusion is True  # which Transformer Engine's layers read
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        build(impl="local")


def test_16_bit_models_have_no_unfused_attention_by_default(build: Callable[..., Any]) -> None:
    for _ in range(2):  # virtual stages, a teacher: Megatron refuses what the first build left behind
        build()
        assert os.environ[UNFUSED] == "0"
    build(dtype=torch.float32)  # for which there is no other
    assert os.environ[UNFUSED] == "1"
    build()
    assert os.environ[UNFUSED] == "1", "the user's"
    del os.environ[UNFUSED]
    build(backend="unfused")
    assert UNFUSED not in os.environ


def test_a_forward_pass_without_a_kernel_names_the_package_to_install(megatron: None) -> None:
    from nemo_ext.megatron.transformer_engine import explained

    with pytest.raises(ValueError, match=r"install flash-attn .* megatron.attention_backend=unfused"), explained():
        raise ValueError("No dot product attention backend is available for the provided inputs. Please run with")
    with pytest.raises(ValueError, match=r"^another$"), explained():
        raise ValueError("another")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fused_cross_entropy_is_exact_only_for_bf16(dtype: torch.dtype, megatron: None) -> None:
    """Its backward pass writes BF16, to which autograd rounds the gradient of BF16 logits anyway."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    torch.manual_seed(0)
    logits, labels = 4 * torch.randn(6, 2, 512), torch.randint(512, (6, 2))
    results = []
    with torch.compiler.set_stance("force_eager"):
        for loss_of in (vocab_parallel_cross_entropy, fused_vocab_parallel_cross_entropy):
            leaf = logits.to(dtype, copy=True).requires_grad_()
            loss = loss_of(leaf * 1, labels, tp_group=torch.distributed.group.WORLD)
            (loss * torch.arange(1.0, 13.0).view(6, 2)).sum().backward()
            results.append((loss.detach(), leaf.grad))

    (loss, slope), (fused_loss, fused_slope) = results
    assert torch.equal(loss, fused_loss)
    assert torch.equal(slope, fused_slope) == (dtype == torch.bfloat16)


def test_runs_with_experts_have_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_ext.megatron import arguments

    monkeypatch.setattr(arguments, "backend_of", lambda config: "transformer_engine")
    monkeypatch.setattr(arguments, "_engine_installed", lambda: True)
    hybrid, dense = (
        command_line(compose("train", ["run_dir=unused", "data=mock", *words]))
        for words in (("megatron.moe_permute_fusion=false",), ("model=llama_nemotron_tiny",))
    )
    assert "--use-fused-weighted-squared-relu" in hybrid and "--moe-permute-fusion" not in hybrid
    assert not {"--use-fused-weighted-squared-relu", "--moe-permute-fusion"} & {*dense}


@pytest.mark.parametrize(("bf16", "fused"), [(True, True), (False, False)])
def test_bf16_runs_fuse_the_cross_entropy(bf16: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_ext.megatron import arguments

    monkeypatch.setattr(arguments, "backend_of", lambda config: "transformer_engine")
    config = compose("train", ["run_dir=unused", "data=mock", f"megatron.bf16={str(bf16).lower()}"])

    assert ("--cross-entropy-loss-fusion" in command_line(config)) == fused
    exact = {**config, "megatron": {**config["megatron"], "deterministic_mode": True}}  # Megatron refuses both
    assert "--cross-entropy-loss-fusion" not in command_line(exact)
    with pytest.raises(ValueError, match=r"cross_entropy_loss_fusion needs megatron.bf16=true"):
        command_line({**config, "megatron": {**config["megatron"], "bf16": False, "cross_entropy_loss_fusion": True}})
