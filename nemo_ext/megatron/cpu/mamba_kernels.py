"""The middle of a Mamba-2 mixer in plain torch: convolution, scan and gate in one pass over the sequence.

Separately: `mamba_convolution.causal_conv1d`, `mamba_scan.ssd_chunk_scan`, `mamba_norm.rms_norm_gated`.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_ext.megatron.cpu.mamba_convolution import check_convolution, convolve, convolve_gradients, taps_by_age
from nemo_ext.megatron.cpu.mamba_scan import (
    compute_dtype,
    entering_state,
    full_precision,
    leaving_state,
    run_numbers,
    split_into_segments,
    step_sizes,
)
from nemo_ext.megatron.cpu.mamba_segment import (
    Parameters,
    ScanSlice,
    Scratch,
    Segment,
    cut,
    scan_backward,
    scan_forward,
    silu_slope,
)


class _Sizes(NamedTuple):
    """Split of a projection [z | x | B | C | dt]; `gated` is False if z is left out."""

    gated: bool
    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def split(self, projection: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Views of z [batch, length, heads, head_dim] (or None), x|B|C and dt."""
        if not self.gated:
            xbc, dt = projection.split((self.channels, self.heads), dim=-1)
            return None, xbc, dt
        z, xbc, dt = projection.split((self.inner, self.channels, self.heads), dim=-1)
        return z.unflatten(-1, (self.heads, self.head_dim)), xbc, dt

    def split_convolved(self, xbc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of x [batch, length, heads, head_dim] and of B, C [batch, length, groups, state]."""
        grouped = self.groups * self.state
        x, B, C = xbc.split((self.inner, grouped, grouped), dim=-1)
        B, C = (each.unflatten(-1, (self.groups, self.state)) for each in (B, C))
        return x.unflatten(-1, (self.heads, self.head_dim)), B, C


class _SplitConvScan(torch.autograd.Function):
    """Convolution, silu, scan and gate, segment by segment.

    Saved for backward: the projection itself, the result before the gate, one state per segment. The output of the
    convolution never exists for the whole sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projection: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        state: Tensor,
        run: Tensor | None,
        sizes: _Sizes,
        activate: bool,
        dt_limit: tuple[float, float],
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        batch, length, _ = projection.shape
        shape = (batch, length, sizes.heads, sizes.head_dim)
        z, xbc, dt = sizes.split(projection)
        dt = step_sizes(dt, dt_bias, softplus=True, limit=dt_limit, dtype=A.dtype)
        taps = taps_by_age(weight, A.dtype)
        out = projection.new_empty(shape)
        ungated = None if z is None else torch.empty_like(out)
        scratch = Scratch(dtype=A.dtype, device=projection.device)
        entering = []
        for segment in split_into_segments(shape, projection.device, chunk_size=chunk_size):
            entering.append(state)
            convolved = _convolved(xbc, taps, bias, run, segment, scratch)
            if activate:
                F.silu(convolved, inplace=True)
            whole = cut(segment, dt=dt, z=z, out=out, ungated=ungated, run=run)
            tensors = ScanSlice(*sizes.split_convolved(convolved), **whole)
            state = scan_forward(tensors, Parameters(A, D), state, segment, scratch)
        ctx.save_for_backward(projection, weight, bias, dt_bias, A, D, run, ungated, *entering)
        ctx.sizes, ctx.activate, ctx.dt_limit, ctx.chunk_size = sizes, activate, dt_limit, chunk_size
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor | None, state_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        projection, weight, bias, dt_bias, A, D, run, ungated, *entering = ctx.saved_tensors
        sizes: _Sizes = ctx.sizes
        shape = (*projection.shape[:2], sizes.heads, sizes.head_dim)
        out_gradient = projection.new_zeros(shape) if out_gradient is None else out_gradient
        state_gradient = torch.zeros_like(entering[0]) if state_gradient is None else state_gradient
        gradient = torch.empty_like(projection)
        z, xbc, raw_dt = sizes.split(projection)
        dz, d_xbc, d_raw_dt = sizes.split(gradient)
        with torch.enable_grad():
            dt_inputs = (raw_dt.detach().requires_grad_(), dt_bias.detach().requires_grad_())
            dt = step_sizes(*dt_inputs, softplus=True, limit=ctx.dt_limit, dtype=A.dtype)
        d_dt = torch.empty_like(dt)
        taps = taps_by_age(weight, A.dtype)
        d_taps = torch.zeros_like(taps)
        d_bias = torch.zeros_like(taps[0])
        parameters = Parameters(A, D)
        added_to = parameters.gradients()
        scratch = Scratch(dtype=A.dtype, device=projection.device)
        reach = weight.shape[1] - 1
        later = taps.new_empty(projection.shape[0], 0, sizes.channels)

        segments = split_into_segments(shape, projection.device, chunk_size=ctx.chunk_size)
        with full_precision(projection):
            for segment, state in zip(reversed(segments), reversed(entering), strict=True):
                span = segment.span
                convolved = _convolved(xbc, taps, bias, run, segment, scratch)
                if ctx.activate:
                    sigmoid = torch.sigmoid(convolved, out=scratch.take("convolved_sigmoid", *convolved.shape))
                    convolved.mul_(sigmoid)
                # Gradients of this segment's convolution, then those of the tokens that read back into it.
                count = convolved.shape[1]
                d_window = scratch.take("d_window", len(later), count + later.shape[1], sizes.channels)
                d_convolved = d_window[:, :count]
                d_window[:, count:] = later
                whole = cut(segment, dt=dt.detach(), z=z, ungated=ungated, run=run)
                whole_gradients = cut(segment, dt=d_dt, z=dz, out=out_gradient)
                state_gradient = scan_backward(
                    ScanSlice(*sizes.split_convolved(convolved), **whole),
                    ScanSlice(*sizes.split_convolved(d_convolved), **whole_gradients),
                    parameters,
                    added_to,
                    state,
                    state_gradient,
                    segment,
                    scratch,
                )
                if ctx.activate:
                    d_convolved.mul_(silu_slope(sigmoid, convolved))
                d_bias += d_convolved.sum((0, 1))
                start = max(0, span.start - reach)
                convolve_gradients(
                    xbc[:, start : span.stop],
                    d_window,
                    taps,
                    run=None if run is None else run[:, start : span.stop + later.shape[1]],
                    d_input=d_xbc[:, span],
                    d_taps=d_taps,
                )
                later = d_window[:, :reach].clone()
        d_raw_dt_value, d_dt_bias = torch.autograd.grad(dt, dt_inputs, d_dt)
        d_raw_dt.copy_(d_raw_dt_value)
        return (
            gradient,
            d_taps.flip(0).t().to(weight.dtype),
            None if bias is None else d_bias.to(bias.dtype),
            d_dt_bias,
            added_to.A.to(A.dtype),
            added_to.D,
            state_gradient,
            *(None,) * 5,
        )


def _convolved(
    xbc: Tensor, taps: Tensor, bias: Tensor | None, run: Tensor | None, segment: Segment, scratch: Scratch
) -> Tensor:
    """Convolution of one segment, before the activation."""
    span = segment.span
    start = max(0, span.start - len(taps) + 1)
    out = scratch.take("convolved", xbc.shape[0], span.stop - span.start, xbc.shape[2])
    window_run = None if run is None else run[:, start : span.stop]
    convolve(xbc[:, start : span.stop], taps, bias, run=window_run, out=out)
    return out


def split_convolution_scan(
    projection: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    head_dim: int,
    groups: int,
    chunk_size: int,
    gated: bool = True,
    activation: str | None = "silu",
    dt_limit: tuple[float, float] = (0.0, math.inf),
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The middle of a Mamba-2 mixer: everything between its input projection and its norm.

    Args:
        projection: [batch, length, inner + channels + heads], the input projection's z | x | B | C | dt;
            inner = heads * head_dim and channels = inner + 2 * groups * state. Without z if not `gated`.
        weight: [channels, width] of the convolution over x | B | C.
        bias: [channels] or None.
        dt_bias: [heads], added to dt before softplus.
        A: [heads], negative.
        D: [heads] or [heads, head_dim].
        head_dim: Width of a head.
        groups: Groups of heads that share B and C.
        chunk_size: Longest chunk to use; no effect on the result.
        gated: True to multiply the result by silu(z).
        activation: Activation after the convolution: "silu" (or "swish") or None.
        dt_limit, seq_idx, initial_states: As in `mamba_scan.ssd_chunk_scan`; the convolution starts afresh too.

    Returns:
        [batch, length, inner] in the dtype of `projection`, and the last state, as `initial_states`.

    Raises:
        ValueError: If shapes do not fit together or the activation is unknown.
    """
    heads = D.shape[0]
    grouped, rest = divmod(weight.shape[0] - heads * head_dim, 2)
    if groups < 1 or heads % groups or rest or grouped < groups or grouped % groups:
        raise ValueError(
            f"conv weight has {weight.shape[0]} channels, expected heads * head_dim + 2 * groups * state "
            f"with {heads} heads of {head_dim} and {groups} groups that divide the heads"
        )
    sizes = _Sizes(gated, heads, head_dim, groups, state=grouped // groups)
    check_convolution(weight, bias, activation=activation, channels=sizes.channels)
    features = sizes.channels + heads + (sizes.inner if gated else 0)
    if projection.dim() != 3 or projection.shape[1] == 0 or projection.shape[2] != features:
        raise ValueError(f"projection has shape {tuple(projection.shape)}, expected [batch, length >= 1, {features}]")
    for name, tensor in (("A", A), ("dt_bias", dt_bias)):
        if tensor.shape != (heads,):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected [heads = {heads}] as D has")
    if D.shape not in ((heads,), (heads, head_dim)):
        raise ValueError(f"D has shape {tuple(D.shape)}, expected [heads] or [heads, head_dim = {head_dim}]")
    if seq_idx is not None and seq_idx.shape != projection.shape[:2]:
        raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, expected {tuple(projection.shape[:2])}")
    work = compute_dtype(projection)
    A = A.to(work)
    state = entering_state(initial_states, batch=projection.shape[0], groups=groups, A=A, size=(head_dim, sizes.state))
    with full_precision(projection):
        out, state = _SplitConvScan.apply(
            projection,
            weight,
            bias,
            dt_bias,
            A,
            D.to(work),
            state,
            None if seq_idx is None else run_numbers(seq_idx),
            sizes,
            activation is not None,
            dt_limit,
            chunk_size,
        )
    return out.flatten(2), leaving_state(state)
