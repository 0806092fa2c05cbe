"""NVFP4 in torch: rounding to E2M1 with an E4M3 scale per block of 16 numbers and one FP32 scale per tensor.

`fake_nvfp4` rounds and returns the rounded numbers in the same dtype, with gradients passed straight through; its
values equal those of ModelOpt's checkpoints bit by bit. Training rounds gradients stochastically and weights in blocks
of 16x16, and rotates the inputs of weight gradients (Transformer Engine's recipe; arXiv 2509.25149).

Does not import Megatron.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nemo_ext.architecture.precision import NVFP4_BLOCK as BLOCK

E2M1_MAX, E4M3_MAX, E4M3_MIN = 6.0, 448.0, 2.0**-9
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Fixed random signs of the Hadamard transform."""


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """Matrix in NVFP4.

    Attributes:
        values: `[rows, columns]`, multiples of 0.5 from -6 to 6 that E2M1 has, in float32.
        scale: `[block rows, block columns]` in float8_e4m3fn, a factor for each block.
        double_scale: `[]` in float32, a factor for the whole matrix.
    """

    values: Tensor
    scale: Tensor
    double_scale: Tensor

    @property
    def scales(self) -> Tensor:
        """Factor of each block's values, `[block rows, block columns]` in float32."""
        return self.scale.float() * self.double_scale


def quantise_nvfp4(
    matrix: Tensor, *, amax: Tensor | None = None, block_rows: int = 1, stochastic: bool = False
) -> Nvfp4Matrix:
    """Round a matrix to NVFP4.

    Args:
        matrix: `[rows, columns]`, not empty, in any floating-point dtype; the last blocks may be smaller.
        amax: magnitude `[]` that is mapped to the largest NVFP4 number, such as a calibrated one; None for the matrix's
            own maximum.
        block_rows: rows of a block: 1, or 16 for weights in training.
        stochastic: True to round up or down at random, so that the expected value is exact, instead of to the nearest
            number (ties to even).
    """
    rows, columns = matrix.shape
    down, across = ceil(rows / block_rows), ceil(columns / BLOCK)
    whole = pad(matrix.float(), (0, across * BLOCK - columns, 0, down * block_rows - rows))
    blocks = whole.view(down, block_rows, across, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    double = (largest.amax() if amax is None else amax.float()) / (E2M1_MAX * E4M3_MAX)
    double = torch.where(double == 0, 1.0, double)
    scale = largest / (E2M1_MAX * double)
    scale = torch.where(scale == 0, 1.0, scale).clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    values = _to_e2m1(blocks / (scale.float() * double)[:, None, :, None], stochastic)
    return Nvfp4Matrix(values.view(down * block_rows, -1)[:rows, :columns], scale, double)


def _to_e2m1(numbers: Tensor, stochastic: bool) -> Tensor:
    """Round to the numbers of E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), saturating at 6."""
    magnitude = numbers.abs().clamp(max=E2M1_MAX)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    steps = magnitude / step
    steps = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    return torch.copysign(steps * step, numbers)


def fake_nvfp4(tensor: Tensor, amax: Tensor | None = None) -> Tensor:
    """Round a tensor to NVFP4 and back, in blocks of 16 along its last dimension; gradients pass unchanged.

    Args:
        tensor: `[..., columns]`: a weight `[out, in]`, or activations.
        amax: calibrated maximum magnitude `[]`; None for the tensor's own maximum.

    Returns:
        The rounded numbers, in the tensor's shape and dtype.

    Raises:
        ValueError: the number of columns is not a multiple of 16.
    """
    if tensor.shape[-1] % BLOCK:
        raise ValueError(f"NVFP4 needs rows of a multiple of {BLOCK} numbers, got {tensor.shape[-1]}: keep it in BF16")
    rounded: Tensor = _FakeNvfp4.apply(tensor, amax)
    return rounded


class _FakeNvfp4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, amax: Tensor | None) -> Tensor:
        if not tensor.numel():  # an expert without tokens
            return tensor.clone()
        low = quantise_nvfp4(tensor.reshape(-1, tensor.shape[-1]), amax=amax)
        numbers = low.values.view(*low.scale.shape, BLOCK) * low.scales[..., None]
        return numbers.view(tensor.shape).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def packed(values: Tensor) -> Tensor:
    """Pack the values of an `Nvfp4Matrix`, `[rows, columns]`, as uint8 `[rows, columns / 2]`; even columns are low."""
    magnitude = values.abs()
    codes = torch.where(magnitude < 2, magnitude * 2, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    codes = codes.to(torch.uint8) | (values < 0).to(torch.uint8) << 3
    return codes[:, 1::2] << 4 | codes[:, ::2]


def rotated(matrix: Tensor) -> Tensor:
    """Rotate each block of 16 numbers in a row by a Hadamard transform with random signs, which spreads outliers.

    The product of two matrices along their rows does not change if both are rotated.

    Args:
        matrix: `[rows, columns]`; columns are padded with zeros to a multiple of 16.
    """
    rows, columns = matrix.shape
    transform = torch.ones(1, 1, device=matrix.device)
    for _ in range(4):
        transform = torch.cat([torch.cat([transform, transform], 1), torch.cat([transform, -transform], 1)])
    transform = transform * torch.tensor(_SIGNS, device=matrix.device)[:, None] / 4
    whole = pad(matrix.float(), (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    return (whole @ transform).view(rows, -1).to(matrix.dtype)
