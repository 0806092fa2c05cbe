"""Transformer Engine settings for which Megatron has no flags, applied when a model is built and run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

if TYPE_CHECKING:
    from megatron.core.models.hybrid.hybrid_model import HybridModel

UNFUSED_ATTENTION = "NVTE_UNFUSED_ATTN"
"""Environment variable that allows unfused attention, which Transformer Engine reads whenever it chooses a kernel."""
APEX = "_grad_accum_fusion_available"
"""Name of the variable in Megatron's tensor_parallel/layers.py that tells whether apex's kernel for fused weight
gradients is installed."""


def build(config: TransformerConfig, stage: Callable[[], "HybridModel"]) -> "HybridModel":
    """Build a pipeline stage without unfused attention, and with fused weight gradients even if apex is missing.

    - Attention: `attention_backend=auto` falls back to unfused attention, which stores all scores, with only a line in
      a log. In 16 bits this is prevented unless the environment has NVTE_UNFUSED_ATTN=1, so that `explained` reports
      the missing kernel.
    - Weight gradients: Transformer Engine's layers add them to `main_grad` themselves. The output layer, which is
      Megatron's own linear layer, needs apex for this and could not be built without it; its gradients are not fused.

    Args:
        config: config of the model.
        stage: function that builds the stage.
    """
    allowed = os.environ.get(UNFUSED_ATTENTION)
    if allowed == "0":
        del os.environ[UNFUSED_ATTENTION]  # Megatron rejects it with `auto`
    if config.transformer_impl != "transformer_engine":
        return stage()
    no_kernel = config.gradient_accumulation_fusion and not getattr(layers, APEX, True)
    with patch.object(layers, APEX, True) if no_kernel else nullcontext():
        model = stage()
    if no_kernel:
        for module in model.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.gradient_accumulation_fusion = False
    if config.attention_backend == AttnBackend.auto and config.params_dtype != torch.float32 and allowed != "1":
        os.environ[UNFUSED_ATTENTION] = "0"
    return model


@contextmanager
def explained() -> Iterator[None]:
    """Return a context that turns Transformer Engine's error about a missing attention kernel into an explanation.

    Raises:
        ValueError: neither fused nor flash attention is available; the message names the packages to install.
    """
    try:
        yield
    except ValueError as error:
        if "No dot product attention backend" not in str(error):
            raise
        raise ValueError(
            "Transformer Engine has neither fused (cuDNN) nor flash attention for this model here: install "
            "flash-attn (pip install --no-build-isolation flash-attn) or a cuDNN 9 that loads; NVTE_DEBUG=1 "
            "NVTE_DEBUG_LEVEL=2 logs why each was rejected. megatron.attention_backend=unfused allows the unfused "
            "kernel, which is slower and stores all attention scores"
        ) from error
