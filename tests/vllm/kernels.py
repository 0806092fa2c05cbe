"""What vLLM has no kernels for on a CPU, written out in torch: experts without gates, rounding to FP8, and Mamba-2's
convolution with drafts, some of which were rejected. NVFP4 is vLLM's own emulation, which it offers on GPUs only.

Everything around them stays vLLM's: routing, scaling, shared experts, loading.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, silu

ACTIVATIONS = {"relu2_no_mul": lambda up: up.relu().square(), "silu_no_mul": silu, "gelu_no_mul": gelu}
LARGEST = 448.0
"""Largest number of float8_e4m3fn."""


def install() -> None:
    """Puts them where vLLM looks for its own."""
    import vllm._custom_ops as ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe import config
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.platforms import PlatformEnum

    ops.scaled_fp8_quant = to_fp8
    for kind in (modelopt.ModelOptFp8Config, modelopt.ModelOptNvFp4Config, modelopt.ModelOptMixedPrecisionConfig):
        kind.get_supported_act_dtypes = lambda _: [torch.float32]
    modelopt.select_fp8_moe_backend = lambda **_: (Fp8MoeBackend.EMULATION, Experts)
    modelopt.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.EMULATION, Experts)
    linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] = [linear.EmulationNvFp4LinearKernel]
    mamba_mixer2.causal_conv1d_update = _with_drafts(mamba_mixer2.causal_conv1d_update)
    config.current_platform = _WithExperts(config.current_platform)
    Experts._supports_no_act_and_mul = staticmethod(lambda: True)  # type: ignore[method-assign]
    Experts._supports_activation = staticmethod(lambda kind: kind.value in ACTIVATIONS)  # type: ignore[method-assign]
    Experts.process_weights_after_loading = lambda *_: None  # type: ignore[method-assign]
    Experts.apply = _apply  # type: ignore[method-assign]


class _WithExperts:
    """The platform; it says that it runs experts without gates, which vLLM asks before it asks for kernels."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_xpu(self) -> bool:
        return True


def _apply(
    self: Any,
    *,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    **more: Any,
) -> None:
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, place = torch.where(topk_ids == expert)
        made = _product(self, 1, hidden_states[token], w1, expert)
        made = _product(self, 2, ACTIVATIONS[activation.value](made), w2, expert)
        output.index_add_(0, token, (made * topk_weights[token, place, None]).to(output.dtype))


def _product(experts: Any, layer: int, inputs: Tensor, weights: Tensor, expert: int) -> Tensor:
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import run_nvfp4_emulations

    scales, of_inputs = getattr(experts, f"w{layer}_scale"), getattr(experts, f"a{layer}_scale")
    if weights.dtype == torch.uint8:
        whole, of_inputs = getattr(experts, f"g{layer}_alphas"), getattr(experts, f"a{layer}_gscale")
        return run_nvfp4_emulations(inputs, of_inputs, weights[expert], scales[expert], whole[expert], swizzle=False)
    if scales is None or of_inputs is None:
        return inputs @ weights[expert].T
    rounded, scale = to_fp8(inputs, of_inputs)
    return ((rounded.float() * scale) @ (weights[expert].float() * scales[expert]).T).to(inputs.dtype)


def _with_drafts(update: Any) -> Any:
    """Wraps vLLM's convolution of a step, which on a CPU takes all drafts of the step before for accepted (0.32)."""

    def updated(x: Tensor, states: Tensor, weight: Tensor, bias: Tensor, *words: Any, **more: Any) -> Tensor:
        accepted, bounds = more.get("num_accepted_tokens"), more.get("query_start_loc")
        if accepted is None or bounds is None:
            return update(x, states, weight, bias, *words, **more)
        made, width = torch.zeros_like(x), weight.shape[1]
        slots = more["conv_state_indices"][:, 0].tolist()
        for slot, begin, end, first in zip(slots, bounds[:-1], bounds[1:], (accepted - 1).tolist(), strict=True):
            if slot != 0:  # the block of padding
                seen = torch.cat([states[slot, :, first : first + width - 1], x[begin:end].T], dim=-1)
                made[begin:end] = silu(conv1d(seen[None], weight[:, None], bias, groups=len(weight)))[0].T
                states[slot, :, : seen.shape[1] - 1] = seen[:, 1:]
        return made

    return updated


def to_fp8(values: Tensor, scale: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Numbers of one scale in FP8, and the scale."""
    assert scale.numel() == 1
    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
