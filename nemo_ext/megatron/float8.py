"""FP8 matrix products in torch: matrices rounded to float8 with a scale a tensor or a block, forward and backward.

With a scale a tensor the product itself is one of float8 matrices (`torch.nn.functional.scaled_mm`: tensor cores on
GPUs since Ada, and on CPUs a product of the same numbers). Block scales, and older GPUs, are simulated: the same
rounding, then a product of the rounded matrices in the precision of the activations.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, pad, scaled_mm

Block = tuple[int, int]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
"""cuBLAS wants sizes of float8 matrices in multiples of it; zeros are added where they are not."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How FP8 is scaled. A matrix has its rows along the sum of a product.

    Attributes:
        activation: rows and columns that share a scale, of inputs and gradients; None for the whole tensor.
        weight: the same, of weights.
        power_of_two: scales are powers of two, as MXFP8's are, and Transformer Engine's of blocks.
    """

    activation: Block | None = None
    weight: Block | None = None
    power_of_two: bool = False


SCALINGS: dict[str, Scaling] = {
    "tensorwise": Scaling(),
    "blockwise": Scaling((1, 128), (128, 128), power_of_two=True),
    "mxfp8": Scaling((1, 32), (1, 32), power_of_two=True),
}
"""By the names of `precision_plan.recipe`; delayed scaling, with scales of earlier steps, is Transformer Engine's."""


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """A matrix in float8.

    Attributes:
        values: `[rows, columns]` in float8.
        scale: what they are multiplied by, float32: `[]`, or one a block `[block rows, block columns]`.
        block: numbers in a block; None for the whole tensor.
    """

    values: Tensor
    scale: Tensor
    block: Block | None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The numbers that it stands for."""
        if self.block is None:
            return (self.values.float() * self.scale).to(dtype)
        rows, columns = self.values.shape
        scale = self.scale.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return (self.values.float() * scale).to(dtype)


def quantise(
    matrix: Tensor, block: Block | None = None, *, dtype: torch.dtype = E4M3, power_of_two: bool = False
) -> Float8Matrix:
    """Round a matrix to float8; the largest number of each block becomes the largest of float8.

    Args:
        matrix: `[rows, columns]`, neither zero.
        block: rows and columns that share a scale; the last ones may be smaller. None: the whole tensor.
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: scales are rounded up to powers of two.
    """
    rows, columns = matrix.shape
    high, wide = block or (rows, columns)
    down, across = ceil(rows / high), ceil(columns / wide)
    whole = pad(matrix.float(), (0, across * wide - columns, 0, down * high - rows)).view(down, high, across, wide)
    scale = whole.abs().amax(dim=(1, 3)) / torch.finfo(dtype).max
    scale = torch.where(scale == 0, 1.0, scale)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    # A scale in float32 may be rounded down, and what is beyond the largest number becomes NaN.
    limit = torch.finfo(dtype).max
    values = (whole / scale[:, None, :, None]).clamp(-limit, limit).to(dtype)
    values = values.view(down * high, across * wide)[:rows, :columns].contiguous()
    return Float8Matrix(values, scale.squeeze() if block is None else scale, block)


def has_float8_products(device: torch.device) -> bool:
    """Whether a device multiplies float8 matrices: CPUs, and GPUs of compute capability 8.9 or more."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def product(left: Float8Matrix, right: Float8Matrix, dtype: torch.dtype) -> Tensor:
    """`left @ right.T`: `[m, k]` and `[n, k]` to `[m, n]`, in a dtype."""
    if left.block is not None or right.block is not None or not has_float8_products(left.values.device):
        return linear(left.dequantised(dtype), right.dequantised(dtype))
    rows, columns = len(left.values), len(right.values)
    found: Tensor = scaled_mm(
        _padded(left.values),
        _padded(right.values).t(),
        left.scale,
        ScalingType.TensorWise,
        right.scale,
        ScalingType.TensorWise,
        output_dtype=dtype,
    )
    return found[:rows, :columns]


def _padded(values: Tensor) -> Tensor:
    missing = [-size % _MULTIPLE for size in values.shape]
    return pad(values, (0, missing[1], 0, missing[0])) if any(missing) else values


def float8_linear(inputs: Tensor, weight: Tensor, scaling: Scaling, *, gradients: torch.dtype = E4M3) -> Tensor:
    """`inputs @ weight.T` in FP8, its two gradients too.

    Each product takes its matrices rounded along its own sum, as Transformer Engine does (rowwise and columnwise).

    Args:
        inputs: `[..., in]`, in float32, bfloat16 or float16.
        weight: `[out, in]`.
        scaling: of SCALINGS.
        gradients: float8 of the gradients of the output.

    Returns:
        `[..., out]`, in the dtype of the inputs.
    """
    if not inputs.numel():  # an expert without tokens
        return linear(inputs, weight)
    found: Tensor = _Float8Linear.apply(inputs.reshape(-1, inputs.shape[-1]), weight, scaling, gradients)
    return found.view(*inputs.shape[:-1], len(weight))


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, scaling: Scaling, gradients: torch.dtype) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.scaling, ctx.gradients = scaling, gradients
        return product(_activation(inputs, scaling), _weight(weight, scaling), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            low = _activation(gradient, scaling, ctx.gradients)
            of_inputs = product(low, _weight(weight.t(), scaling), inputs.dtype)
        if ctx.needs_input_grad[1]:
            low = _activation(gradient.t(), scaling, ctx.gradients)
            of_weight = product(low, _activation(inputs.t(), scaling), weight.dtype)
        return of_inputs, of_weight, None, None


def _activation(matrix: Tensor, scaling: Scaling, dtype: torch.dtype = E4M3) -> Float8Matrix:
    return quantise(matrix, scaling.activation, dtype=dtype, power_of_two=scaling.power_of_two)


def _weight(matrix: Tensor, scaling: Scaling) -> Float8Matrix:
    return quantise(matrix, scaling.weight, power_of_two=scaling.power_of_two)
