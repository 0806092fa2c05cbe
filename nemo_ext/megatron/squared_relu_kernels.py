"""Triton kernels of squared ReLU: one pass over memory forward, one backward, fp32 inside.

Imported if Triton is installed; `squared_relu.py` decides when they run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8_MAX: tl.constexpr = tl.constexpr(448.0)
"""Largest number of float8_e4m3fn."""


# x <= 0 and not x > 0: NaN stays NaN, as in torch.relu, forward and backward.
@triton.jit  # type: ignore[untyped-decorator]
def _forward(x_ptr, y_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    positive = tl.where(x <= 0.0, 0.0, x)
    tl.store(y_ptr + at, (positive * positive).to(y_ptr.dtype.element_ty), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(x_ptr, grad_ptr, out_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=at < count).to(tl.float32)
    # Selected after the product: 0 times an infinite gradient is NaN, where torch gives 0.
    out = tl.where(x <= 0.0, 0.0, 2.0 * x * grad)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def _to_fp8(x_ptr, y_ptr, scale_ptr, amax_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    positive = tl.where(x <= 0.0, 0.0, x)
    squared = positive * positive
    # Triton's maximum ignores NaN, which would hide a broken step from readers of amax.
    tl.atomic_max(amax_ptr, tl.max(tl.where(squared != squared, float("inf"), squared), axis=0))
    scaled = squared * tl.load(scale_ptr)
    scaled = tl.where(scaled > FP8_MAX, FP8_MAX, scaled)
    tl.store(y_ptr + at, scaled.to(y_ptr.dtype.element_ty), mask=at < count)


INTERPRETED = not isinstance(_forward, triton.JITFunction)
"""True if Triton's interpreter runs the kernels (TRITON_INTERPRET=1), also on the CPU."""
# The interpreter takes as long for a small block as for a large one.
_BLOCK = 2**16 if INTERPRETED else 2048


def _grid(count: int) -> tuple[int]:
    return (triton.cdiv(count, _BLOCK),)


def forward(x: Tensor) -> Tensor:
    """relu(x)^2 of a contiguous, non-empty tensor."""
    y = torch.empty_like(x)
    _forward[_grid(x.numel())](x, y, x.numel(), BLOCK=_BLOCK)
    return y


def backward(x: Tensor, grad: Tensor) -> Tensor:
    """2 relu(x) grad, for contiguous tensors of one shape."""
    out = torch.empty_like(x)
    _backward[_grid(x.numel())](x, grad, out, x.numel(), BLOCK=_BLOCK)
    return out


def to_fp8(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `squared_relu.squared_relu_to_fp8`, for a contiguous, non-empty tensor and a scale on its device."""
    y = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    _to_fp8[_grid(x.numel())](x, y, scale, amax, x.numel(), BLOCK=_BLOCK)
    return y, amax
