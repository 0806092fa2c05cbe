"""FP8 and NVFP4 matrix products in torch, forward and backward: matrices are rounded with a scale per tensor or block.

With one scale per tensor, the product itself runs on float8 matrices (`torch.nn.functional.scaled_mm`, on tensor cores
from Ada on). Block scales are simulated, as are NVFP4 and products on older GPUs: matrices are rounded in the same
way, then multiplied in the precision of the activations.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, pad, scaled_mm

from nemo_ext.architecture.precision import NVFP4_BLOCK as BLOCK
from nemo_ext.megatron.nvfp4 import quantise_nvfp4, rotated

Block = tuple[int, int]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
"""Divisor that cuBLAS requires of float8 matrix sizes; other matrices are padded with zeros."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """FP8 scaling of both matrices in a product; the summed dimension is the last one of each matrix.

    Attributes:
        activation: size (rows, columns) of the blocks of inputs and gradients that share a scale; None for the whole
            tensor.
        weight: the same for weights.
        power_of_two: True to round scales to powers of two, as in MXFP8 and Transformer Engine's block scaling.
        nvfp4: True for NVFP4: gradients are rounded stochastically, and both inputs of the weight gradient are rotated.
        inputs: False to leave inputs and gradients in their precision, and round only weights.
    """

    activation: Block | None = None
    weight: Block | None = None
    power_of_two: bool = False
    nvfp4: bool = False
    inputs: bool = True


NVFP4: dict[str, Scaling] = {
    "w4a4": Scaling((1, BLOCK), (BLOCK, BLOCK), nvfp4=True),
    "w4a16": Scaling((1, BLOCK), (1, BLOCK), nvfp4=True, inputs=False),
}
"""Mapping from `precision_plan.nvfp4` to scalings in training."""
NVFP4_STORED: dict[str, Scaling] = {**NVFP4, "w4a4": Scaling((1, BLOCK), (1, BLOCK), nvfp4=True)}
"""The same for checkpoints made after training, where weights have blocks of one row."""
SCALINGS: dict[str, Scaling] = {
    "tensorwise": Scaling(),
    "blockwise": Scaling((1, 128), (128, 128), power_of_two=True),
    "mxfp8": Scaling((1, 32), (1, 32), power_of_two=True),
}
"""Mapping from names in `precision_plan.recipe` to scalings.

Delayed scaling, which uses the scales of earlier steps, needs Transformer Engine.
"""


@dataclass(frozen=True, slots=True)
class Float8Matrix:
    """Float8 or NVFP4 matrix with its scales.

    Attributes:
        values: `[rows, columns]` in float8; in NVFP4, the numbers of E2M1 in float32.
        scale: factor by which values are multiplied, in float32: `[]`, or `[block rows, block columns]` for one per
            block.
        block: size (rows, columns) of a block; None for the whole tensor.
    """

    values: Tensor
    scale: Tensor
    block: Block | None

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that the matrix represents, `[rows, columns]`, in the given dtype."""
        if self.block is None:
            return (self.values.float() * self.scale).to(dtype)
        rows, columns = self.values.shape
        scale = self.scale.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return (self.values.float() * scale).to(dtype)


def quantise(
    matrix: Tensor,
    block: Block | None = None,
    *,
    dtype: torch.dtype = E4M3,
    power_of_two: bool = False,
    amax: Tensor | None = None,
) -> Float8Matrix:
    """Round a matrix to float8, scaling each block's largest magnitude to the largest float8 number.

    Args:
        matrix: `[rows, columns]`, not empty.
        block: size (rows, columns) of the blocks that share a scale; the last may be smaller. None for the whole
            tensor.
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: True to round scales up to powers of two.
        amax: magnitude `[]` that the largest float8 number represents (only without blocks); None for the matrix's own
            maximum.
    """
    rows, columns = matrix.shape
    high, wide = block or (rows, columns)
    down, across = ceil(rows / high), ceil(columns / wide)
    whole = pad(matrix.float(), (0, across * wide - columns, 0, down * high - rows)).view(down, high, across, wide)
    largest = whole.abs().amax(dim=(1, 3)) if amax is None or block is not None else amax.float().view(1, 1)
    scale = largest / torch.finfo(dtype).max
    scale = torch.where(scale == 0, 1.0, scale)
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    # A scale in float32 may be rounded down, and values beyond the largest float8 number would become NaN.
    limit = torch.finfo(dtype).max
    values = (whole / scale[:, None, :, None]).clamp(-limit, limit).to(dtype)
    values = values.view(down * high, across * wide)[:rows, :columns].contiguous()
    return Float8Matrix(values, scale.squeeze() if block is None else scale, block)


def has_float8_products(device: torch.device) -> bool:
    """Return whether a device multiplies float8 matrices: GPUs from compute capability 8.9 on, CPUs if torch can."""
    if device.type == "cpu":
        return _cpu_has_float8_products()
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def _cpu_has_float8_products() -> bool:
    """Return whether this torch multiplies float8 matrices on the CPU; 2.11 declares the function without a kernel."""
    matrix, one = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(())
    try:
        scaled_mm(matrix, matrix.t(), one, ScalingType.TensorWise, one, ScalingType.TensorWise)
    except NotImplementedError:
        return False
    return True


def product(left: Float8Matrix, right: Float8Matrix, dtype: torch.dtype) -> Tensor:
    """Compute `left @ right.T`, from `[m, k]` and `[n, k]` to `[m, n]`, in the given dtype."""
    if left.block is not None or right.block is not None or not has_float8_products(left.values.device):
        return linear(left.dequantised(dtype), right.dequantised(dtype))
    rows, columns = len(left.values), len(right.values)
    padded: Tensor = scaled_mm(
        _padded(left.values),
        _padded(right.values).t(),
        left.scale,
        ScalingType.TensorWise,
        right.scale,
        ScalingType.TensorWise,
        output_dtype=dtype,
    )
    return padded[:rows, :columns]


def _padded(values: Tensor) -> Tensor:
    missing = [-size % _MULTIPLE for size in values.shape]
    return pad(values, (0, missing[1], 0, missing[0])) if any(missing) else values


def float8_linear(inputs: Tensor, weight: Tensor, scaling: Scaling, *, gradients: torch.dtype = E4M3) -> Tensor:
    """Compute `inputs @ weight.T` and both its gradients in FP8 or NVFP4.

    Matrices are rounded along the summed dimension of each product, as in Transformer Engine (rowwise and columnwise).

    Args:
        inputs: `[..., in]`, in float32, bfloat16 or float16.
        weight: `[out, in]`.
        scaling: one of SCALINGS or NVFP4.
        gradients: float8 dtype to which the output's gradients are rounded.

    Returns:
        `[..., out]`, in the inputs' dtype.
    """
    if not inputs.numel():  # an expert without tokens
        return linear(inputs, weight)
    output: Tensor = _Float8Linear.apply(inputs.reshape(-1, inputs.shape[-1]), weight, scaling, gradients)
    return output.view(*inputs.shape[:-1], len(weight))


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, scaling: Scaling, gradients: torch.dtype) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.scaling, ctx.gradients = scaling, gradients
        if not scaling.inputs:
            return linear(inputs, _weight(weight, scaling).dequantised(inputs.dtype))
        return product(_activation(inputs, scaling), _weight(weight, scaling), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        d_inputs = d_weight = None
        if not scaling.inputs:
            if ctx.needs_input_grad[0]:
                d_inputs = gradient @ _weight(weight, scaling).dequantised(gradient.dtype)
            return d_inputs, gradient.t() @ inputs if ctx.needs_input_grad[1] else None, None, None
        if ctx.needs_input_grad[0]:
            low = _activation(gradient, scaling, ctx.gradients, stochastic=scaling.nvfp4)
            d_inputs = product(low, _weight(weight.t(), scaling), inputs.dtype)
        if ctx.needs_input_grad[1]:
            left, right = gradient.t(), inputs.t()
            if scaling.nvfp4:
                left, right = rotated(left), rotated(right)
            low = _activation(left, scaling, ctx.gradients, stochastic=scaling.nvfp4)
            d_weight = product(low, _activation(right, scaling), weight.dtype)
        return d_inputs, d_weight, None, None


def rounded_linear(
    inputs: Tensor, weight: Tensor, scaling: Scaling, *, group: torch.distributed.ProcessGroup | None = None
) -> Tensor:
    """Compute `inputs @ weight.T` of rounded matrices; gradients pass through the rounding, and are not rounded.

    Args:
        inputs: `[..., in]`, in float32, bfloat16 or float16.
        weight: `[out, in]`.
        scaling: scaling of both matrices.
        group: ranks that hold shards of the matrices, which have the scale of the whole matrix; None if unsharded.

    Returns:
        `[..., out]`, in the inputs' dtype.
    """
    if not inputs.numel():  # an expert without tokens
        return linear(inputs, weight)
    weight = _Rounded.apply(weight, _weight(weight.detach(), scaling, _largest(weight, group)))
    if scaling.inputs:
        rows = inputs.detach().reshape(-1, inputs.shape[-1])
        inputs = _Rounded.apply(inputs, _activation(rows, scaling, amax=_largest(inputs, group)))
    return linear(inputs, weight)


def _largest(matrix: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Return the largest magnitude `[]` of a matrix whose shards are on the ranks of a group."""
    largest = matrix.detach().abs().amax().float()
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return largest


class _Rounded(torch.autograd.Function):
    """Rounded tensor, whose gradient is passed to the original tensor unchanged (straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rounded: Float8Matrix) -> Tensor:
        return rounded.dequantised(tensor.dtype).view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _activation(
    matrix: Tensor,
    scaling: Scaling,
    dtype: torch.dtype = E4M3,
    *,
    stochastic: bool = False,
    amax: Tensor | None = None,
) -> Float8Matrix:
    if scaling.nvfp4:
        return _in_nvfp4(matrix, scaling.activation, stochastic=stochastic, amax=amax)
    return quantise(matrix, scaling.activation, dtype=dtype, power_of_two=scaling.power_of_two, amax=amax)


def _in_nvfp4(
    matrix: Tensor, block: Block | None, *, stochastic: bool = False, amax: Tensor | None = None
) -> Float8Matrix:
    assert block is not None
    low = quantise_nvfp4(matrix, block_rows=block[0], stochastic=stochastic, amax=amax)
    return Float8Matrix(low.values, low.scales, block)


def _weight(matrix: Tensor, scaling: Scaling, amax: Tensor | None = None) -> Float8Matrix:
    if scaling.nvfp4:
        return _in_nvfp4(matrix, scaling.weight, amax=amax)
    return quantise(matrix, scaling.weight, power_of_two=scaling.power_of_two, amax=amax)
