"""State space scan of Mamba-2 in plain torch, for machines without mamba_ssm's Triton kernels.

    state[t] = exp(dt[t] A) state[t-1] + dt[t] B[t] x[t],    y[t] = C[t] state[t] + D x[t],    out = y silu(z)

Computed by chunks (Dao & Gu 2024, arXiv:2405.21060, section 6), a few at a time (`mamba_segment`), with a hand-written
backward: time and memory are linear in the length, and the [chunk, chunk] matrices of the heads never exist for the
whole sequence. Saved for backward: the inputs, the result before the gate, one state per segment.

Autograd would cost more: convolution, scan and gate as einsums of the same chunks take 1.4 times the processor time and
3 times the memory forward and backward in the tiny model ([8, 256], 16 heads of 16, state 32), 1.8 and 10 times at
[1, 8192], 1.4 and 8 times there with heads of 64 and a state of 64; with each segment under `torch.utils.checkpoint`
1.8, 2.5 and 1.8 times the time, 2, 4 and 4 times the memory. The scan alone as `split_convolution_scan` without a
convolution takes 1.1 to 1.25 times as long as here.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_ext.megatron.cpu.mamba_segment import (
    Parameters,
    ScanSlice,
    Scratch,
    Segment,
    cut,
    scan_backward,
    scan_forward,
)

BLOCK_LENGTH = 64
"""Longest chunk used, whatever the caller allows; it does not affect the result. The matrices inside the chunks grow
with it, the states between them shrink; of 32, 64 and 128, 64 was fastest on a CPU for head_dim 64 and a state of 64 or
128 (`benchmarks/ssd.py --blocks`). With head_dim 16 and a state of 32, chunks of 32 take 0.93 of its time at [8, 256]
and 1.16 at [1, 8192]."""

SEGMENT_ELEMENTS_CPU = 1 << 18
"""Elements of the [chunk, chunk] matrices that a segment holds at once: 1 MB in float32, to stay in cache."""

SEGMENT_ELEMENTS_ACCELERATOR = 1 << 25
"""The same on an accelerator, where launches rather than cache limit speed."""


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype the scan works in: float64 for float64 inputs, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def full_precision(tensor: Tensor) -> torch.autocast:
    """Disables autocast: the code inside chooses its own dtypes."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)


def split_into_segments(shape: tuple[int, ...], device: torch.device, *, chunk_size: int) -> list[Segment]:
    """Cuts a sequence of `shape` [batch, length, heads, head_dim]; only the last chunk may be shorter."""
    batch, length, heads, _ = shape
    chunk_length = min(chunk_size, BLOCK_LENGTH)
    elements = SEGMENT_ELEMENTS_CPU if device.type == "cpu" else SEGMENT_ELEMENTS_ACCELERATOR
    chunks_at_once = max(1, elements // (batch * heads * chunk_length * chunk_length))
    whole_chunks, rest = divmod(length, chunk_length)
    segments = [
        Segment(first * chunk_length, min(chunks_at_once, whole_chunks - first), chunk_length)
        for first in range(0, whole_chunks, chunks_at_once)
    ]
    if rest:
        segments.append(Segment(length - rest, 1, rest))
    return segments


def run_numbers(seq_idx: Tensor) -> Tensor:
    """Numbers the stretches of equal `seq_idx` [batch, length]; an index that recurs starts a new stretch."""
    changes = torch.zeros_like(seq_idx, dtype=torch.int32)
    changes[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return changes.cumsum(1, dtype=torch.int32)


class _ChunkScan(torch.autograd.Function):
    """`scan_forward` and `scan_backward` over all segments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        z: Tensor | None,
        state: Tensor,
        run: Tensor | None,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ungated = None if z is None else torch.empty_like(out)
        whole = {"x": x, "dt": dt, "B": B, "C": C, "z": z, "out": out, "ungated": ungated, "run": run}
        scratch = Scratch(dtype=dt.dtype, device=x.device)
        entering = []
        for segment in split_into_segments(x.shape, x.device, chunk_size=chunk_size):
            entering.append(state)
            state = scan_forward(ScanSlice(**cut(segment, **whole)), Parameters(A, D), state, segment, scratch)
        ctx.save_for_backward(x, dt, A, B, C, D, z, run, ungated, *entering)
        ctx.chunk_size = chunk_size
        ctx.set_materialize_grads(False)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor | None, state_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, z, run, ungated, *entering = ctx.saved_tensors
        inputs = {"x": x, "dt": dt, "B": B, "C": C, "z": z}
        gradients = {name: None if each is None else torch.empty_like(each) for name, each in inputs.items()}
        out_gradient = torch.zeros_like(x) if out_gradient is None else out_gradient
        state_gradient = torch.zeros_like(entering[0]) if state_gradient is None else state_gradient
        parameters = Parameters(A, D)
        added_to = parameters.gradients()
        scratch = Scratch(dtype=dt.dtype, device=x.device)
        segments = split_into_segments(x.shape, x.device, chunk_size=ctx.chunk_size)
        with full_precision(x):
            for segment, state in zip(reversed(segments), reversed(entering), strict=True):
                state_gradient = scan_backward(
                    ScanSlice(**cut(segment, **inputs, ungated=ungated, run=run)),
                    ScanSlice(**cut(segment, **gradients, out=out_gradient)),
                    parameters,
                    added_to,
                    state,
                    state_gradient,
                    segment,
                    scratch,
                )
        dx, d_dt, dB, dC, dz = gradients.values()
        return dx, d_dt, added_to.A.to(A.dtype), dB, dC, added_to.D, dz, state_gradient, None, None


def step_sizes(
    dt: Tensor, dt_bias: Tensor | None, *, softplus: bool, limit: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    """Returns dt [batch, length, heads] after bias, softplus and limits; differentiable."""
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt.clamp(*limit)


def entering_state(
    initial_states: Tensor | None, *, batch: int, groups: int, A: Tensor, size: tuple[int, int]
) -> Tensor:
    """Lays out initial states [batch, heads, head_dim, state] as the scan keeps them; zeros for None.

    `A` is [heads], in the dtype of the work; `size` is (head_dim, state).

    Raises:
        ValueError: If the shape does not fit.
    """
    heads = A.shape[0]
    if initial_states is None:
        return A.new_zeros(batch, groups, size[1], heads // groups, size[0])
    if initial_states.shape != (batch, heads, *size):
        raise ValueError(
            f"initial_states has shape {tuple(initial_states.shape)}, "
            f"expected [batch, heads, head_dim, state] = {(batch, heads, *size)}"
        )
    grouped = initial_states.to(A.dtype).unflatten(1, (groups, heads // groups))
    return grouped.permute(0, 1, 4, 2, 3).contiguous()


def leaving_state(state: Tensor) -> Tensor:
    """Converts a state of the scan to [batch, heads, head_dim, state]."""
    return state.permute(0, 1, 3, 4, 2).flatten(1, 2)


def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-2's scan by chunks; time and memory are linear in the length, which may be anything from 1.

    Args:
        x: [batch, length, heads, head_dim].
        dt: [batch, length, heads], step sizes.
        A: [heads], negative.
        B: [batch, length, groups, state]; groups divides heads, consecutive heads share a group.
        C: Same shape as `B`.
        chunk_size: Longest chunk to use; no effect on the result (see BLOCK_LENGTH).
        D: [heads] or [heads, head_dim], weight of the skip from x, or None.
        z: Gate with the shape of `x` (the output is multiplied by silu(z)), or None.
        dt_bias: [heads], added to dt, or None.
        dt_softplus: True to apply softplus to dt after the bias.
        dt_limit: Lowest and highest dt, applied last.
        seq_idx: [batch, length] integers; the state starts from zero wherever the number changes. None for
            one sequence.
        initial_states: [batch, heads, head_dim, state] before the first token, or None for zeros.
        return_final_states: True to also return the state after the last token.

    Returns:
        [batch, length, heads, head_dim] in the dtype of `x`; with `return_final_states` also
        [batch, heads, head_dim, state] in float32 (float64 for float64 inputs).

    Raises:
        ValueError: If shapes do not fit together.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, expected at least 1")
    _check_shapes(x, B, dt=dt, A=A, C=C, D=D, z=z, dt_bias=dt_bias, seq_idx=seq_idx)
    work = compute_dtype(x)
    A = A.to(work)
    groups, state_size = B.shape[2:]
    state = entering_state(initial_states, batch=x.shape[0], groups=groups, A=A, size=(x.shape[3], state_size))
    with full_precision(x):
        out, state = _ChunkScan.apply(
            x,
            step_sizes(dt, dt_bias, softplus=dt_softplus, limit=dt_limit, dtype=work),
            A,
            B,
            C,
            None if D is None else D.to(work),
            z,
            state,
            None if seq_idx is None else run_numbers(seq_idx),
            chunk_size,
        )
    return (out, leaving_state(state).contiguous()) if return_final_states else out  # callers take views of it


def _check_shapes(x: Tensor, B: Tensor, **others: Tensor | None) -> None:
    if x.dim() != 4 or x.shape[1] == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected [batch, length >= 1, heads, head_dim]")
    batch, length, heads, head_dim = x.shape
    groups = B.shape[2] if B.dim() == 4 else 0
    if groups == 0 or heads % groups:
        raise ValueError(f"B has {groups} groups, which must divide the {heads} heads of x")
    grouped = (batch, length, groups, B.shape[3])
    D = others["D"]
    expected = {
        "dt": (batch, length, heads),
        "A": (heads,),
        "B": grouped,
        "C": grouped,
        "D": (heads,) if D is None or D.dim() == 1 else (heads, head_dim),
        "z": (batch, length, heads, head_dim),
        "dt_bias": (heads,),
        "seq_idx": (batch, length),
    }
    for name, tensor in {"B": B, **others}.items():
        if tensor is not None and tensor.shape != expected[name]:
            shape, wanted = tuple(tensor.shape), expected[name]
            raise ValueError(f"{name} has shape {shape}, expected {wanted} where x is {tuple(x.shape)}")
