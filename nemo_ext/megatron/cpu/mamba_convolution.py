"""Mamba's short causal convolution in plain torch, on [batch, length, channels].

Each tap is one multiply-add over whole rows. On a CPU this is far faster than a depthwise `F.conv1d`, which needs the
channels first, and taps that would reach into another packed sequence can be skipped.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_ext.megatron.cpu.mamba_scan import compute_dtype, run_numbers

ACTIVATIONS = (None, "silu", "swish")


class _Taps(torch.autograd.Function):
    """Convolution with `taps` [width, channels], in their dtype; row a multiplies the token a positions earlier."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor, bias: Tensor | None, run: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, taps, bias, run)
        length = x.shape[1]
        out = x * taps[0] if bias is None else torch.addcmul(bias, x, taps[0])
        for age in range(1, min(len(taps), length)):
            source = x[:, : length - age].to(taps.dtype)
            out[:, age:].addcmul_(_same_run(source, run, age), taps[age])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, bias, run = ctx.saved_tensors
        length = x.shape[1]
        dx, d_taps = gradient * taps[0], torch.zeros_like(taps)
        d_taps[0] = (gradient * x).sum((0, 1))
        for age in range(1, min(len(taps), length)):
            later = _same_run(gradient[:, age:], run, age)
            dx[:, : length - age].addcmul_(later, taps[age])
            d_taps[age] = (later * x[:, : length - age]).sum((0, 1))
        return dx.to(x.dtype), d_taps, None if bias is None else gradient.sum((0, 1)), None


def _same_run(values: Tensor, run: Tensor | None, age: int) -> Tensor:
    """Zero the values [batch, length - age, channels] where a tap `age` tokens back reaches into another sequence.

    `run` [batch, length] numbers the sequences; None for one sequence, whose values are returned unchanged.
    """
    if run is None:
        return values
    same = run[:, age:] == run[:, : run.shape[1] - age]
    return values.where(same[..., None], values.new_zeros(()))


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> Tensor:
    """Compute a depthwise causal convolution.

    Args:
        x: [batch, length, channels].
        weight: [channels, width]; the last column multiplies the token itself.
        bias: [channels] or None.
        activation: "silu" (or "swish") or None.
        seq_idx: [batch, length] sequence numbers; no tap reads across a change of number. None for one sequence.
        initial_states: [batch, width - 1, channels], the tokens before the first, or None for zeros.

    Returns:
        [batch, length, channels] in the dtype of `x`.

    Raises:
        ValueError: The shapes do not match, or the activation is unknown.
    """
    channels, before = x.shape[2], weight.shape[-1] - 1
    if weight.dim() != 2 or weight.shape[0] != channels:
        raise ValueError(f"conv weight has shape {tuple(weight.shape)}, expected [{channels}, width]")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"conv bias has shape {tuple(bias.shape)}, expected [{channels}]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, expected one of {ACTIVATIONS}")
    if seq_idx is not None and seq_idx.shape != x.shape[:2]:
        raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, expected {tuple(x.shape[:2])}")
    if initial_states is not None and initial_states.shape != (x.shape[0], before, channels):
        raise ValueError(
            f"initial_states has shape {tuple(initial_states.shape)}, "
            f"expected [batch, width - 1, channels] = {(x.shape[0], before, channels)}"
        )
    run, work = None if seq_idx is None else run_numbers(seq_idx), compute_dtype(x)
    length = x.shape[1]
    if initial_states is not None:
        x = torch.cat([initial_states.to(x.dtype), x], dim=1)
        run = None if run is None else torch.cat([run[:, :1].expand(-1, before), run], dim=1)
    taps = weight.t().flip(0).to(work)
    out = _Taps.apply(x, taps, None if bias is None else bias.to(work), run)[:, -length:]
    return (out if activation is None else F.silu(out)).to(x.dtype)
