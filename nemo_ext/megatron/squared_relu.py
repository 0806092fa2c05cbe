"""Squared ReLU, relu(x)^2, in one pass over memory, for the FFNs of Domyn-Small and Nemotron 3.

Megatron's own (`core/activations.py`) consists of two torch functions. Eagerly they move 14 tensors through memory,
forward and backward together, here 5; but Megatron has torch.compile fuse them, `disable_jit_fuser` or not, so the gain
has to be measured (benchmarks/gpu.py). Its fused `weighted_squared_relu_impl`
(`core/fusions/fused_weighted_squared_relu.py`) is for routed experts: it needs a weight per token and reduces over the
width for that weight's gradient, so with weights of one it would work here, at a higher cost. Megatron checks for its
own function only in `core/transformer/moe/experts.py` (grouped experts), which keep it.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.activations import squared_relu as megatron_squared_relu
from megatron.core.transformer import TransformerConfig
from torch import Tensor

try:
    from nemo_ext.megatron import squared_relu_kernels as kernels
except ImportError:  # no Triton
    kernels = None  # type: ignore[assignment]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the kernels read; they compute in fp32, which would lose digits of anything wider."""
FP8_CAPABILITY = (8, 9)
"""First CUDA compute capability with conversions to float8_e4m3fn."""


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 of any shape, contiguous; keeps x for the backward pass, which is 2 relu(x) grad.

    Equal to Megatron's uncompiled function and its gradient bit for bit, including infinities and NaN: the products are
    exact or rounded once in both. One exception: fp16 gradients where 2x is above 65504, which are infinite in Megatron
    and rounded from fp32 here. Where the kernels cannot run (no Triton, no CUDA device, another dtype) this is
    Megatron's function.
    """
    return _SquaredReLU.apply(x) if _has_kernels(x) else megatron_squared_relu(x)


def squared_relu_to_fp8(x: Tensor, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """relu(x)^2 times a scale in FP8, for an FP8 matrix product, and the largest output for the next step's scale.

    Rounded once, from fp32; numbers above 448 become 448. Not differentiable.

    Args:
        x: tensor of any shape.
        scale: factor of the outputs; a one-element tensor on the device of x needs no synchronisation.

    Returns:
        The scaled outputs (float8_e4m3fn, in x's shape), and the largest unscaled output (a scalar in fp32, 0 for an
        empty x, infinite if any output is NaN).

    Raises:
        ValueError: the scale is not one positive number.
    """
    if not isinstance(scale, Tensor):
        if not 0 < scale < float("inf"):
            raise ValueError(
                f"scale={scale}: give a positive number, such as 448 / the largest output of earlier steps"
            )
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    if scale.numel() != 1:
        raise ValueError(f"scale has {scale.numel()} numbers: the kernel scales the whole tensor by one")
    scale = scale.detach().to(device=x.device, dtype=torch.float32)
    if _has_kernels(x) and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= FP8_CAPABILITY):
        return kernels.to_fp8(x.detach().contiguous(), scale)
    y = torch.square(torch.relu(x.detach().float()))
    finite = y.nan_to_num(nan=float("inf"), posinf=float("inf"))
    amax = finite.amax() if x.numel() else torch.zeros((), device=x.device)
    return (y * scale).clamp(max=448.0).to(torch.float8_e4m3fn), amax


def with_fused_squared_relu(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a builder of an MLP (`MLP`, `SharedExpertMLP`) to use the fused activation.

    The MLP gets a copy of its config with another `activation_func`, so other modules and the checkpoint are unchanged.
    Upstream's hook for activations, `MLPSubmodules.activation_func`, needs `use_te_activation_func`, which
    TransformerConfig refuses with squared ReLU. A config with another activation or a gate is a ValueError.
    """

    def builder(*args: Any, config: TransformerConfig, **kwargs: Any) -> Any:
        if config.activation_func is not megatron_squared_relu or config.gated_linear_unit:
            name = getattr(config.activation_func, "__name__", config.activation_func)
            gate = " with a gate" if config.gated_linear_unit else ""
            raise ValueError(
                f"fused_squared_relu is for squared ReLU without a gate, not {name}{gate}: leave it out, or set "
                "activation_func=megatron.core.activations.squared_relu and gated_linear_unit=False"
            )
        own = copy.copy(config)
        own.activation_func = squared_relu
        return build(*args, config=own, **kwargs)

    return builder


def _has_kernels(x: Tensor) -> bool:
    return kernels is not None and x.dtype in DTYPES and x.numel() > 0 and (x.is_cuda or bool(kernels.INTERPRETED))


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return kernels.forward(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return kernels.backward(x, grad.contiguous())
