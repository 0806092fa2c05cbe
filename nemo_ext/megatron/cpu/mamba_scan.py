"""Mamba-2's state-space scan in plain torch, for machines without mamba_ssm's Triton kernels.

    state[t] = exp(dt[t] A) state[t-1] + dt[t] B[t] x[t],    y[t] = C[t] state[t] + D x[t],    out = y silu(z)

The scan is computed in chunks (Dao & Gu 2024, arXiv:2405.21060, section 6), a few (a segment) at a time, so that time
and memory are linear in the length and the heads' [chunk, chunk] matrices never exist for the whole sequence. The
scan's backward pass is written by hand, and recomputes these matrices from the inputs and one state per segment; step
sizes and decays are left to autograd. benchmarks/README.md gives the cost of alternatives.

The computation is in float32 (float64 for float64 inputs), with cumulative log decays in float64. In shapes, k is the
number of chunks, b batch, g groups, q positions in a chunk, r heads per group, p head_dim and n state.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG2_E = 1.0 / math.log(2.0)

BLOCK_LENGTH = 64
"""Maximum length of a chunk, even if the caller allows more; it does not affect the result. With longer chunks, the
matrices within chunks grow and there are fewer states between them. Of 32, 64 and 128, 64 was fastest on a CPU for
head_dim 64 and a state of 64 or 128 (`benchmarks/ssd.py --blocks`)."""

SEGMENT_ELEMENTS_CPU = 1 << 18
"""Maximum number of elements in a segment's [chunk, chunk] matrices: 1 MB in float32, to stay in cache."""

SEGMENT_ELEMENTS_ACCELERATOR = 1 << 25
"""The same for an accelerator, where speed is limited by kernel launches rather than by cache."""


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def full_precision(tensor: Tensor) -> torch.autocast:
    """Return a context without autocast on the tensor's device, for code that chooses its own dtypes."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)


def run_numbers(seq_idx: Tensor) -> Tensor:
    """Number the runs of equal `seq_idx` [batch, length]; an index that recurs later starts a new run."""
    changes = torch.zeros_like(seq_idx, dtype=torch.int32)
    changes[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return changes.cumsum(1, dtype=torch.int32)


class _Segment:
    """Intermediate tensors for a few chunks, shared by the forward and backward passes of `_ChunkScan`.

    States are stored as [state, heads * head_dim] per group, so that B and C are never repeated for each head, and
    every product with a state is one wide matrix product.
    """

    def __init__(self, state: Tensor, same: Tensor | None, *tensors: Tensor) -> None:
        x, self.dt, B, C, log_decay, self.from_start, self.to_end, self.whole = tensors
        k, b, g, q, r, p = self.shape = x.shape
        self.x = x.to(self.dt.dtype)
        self.B, self.C = (each.to(self.x.dtype).reshape(-1, q, each.shape[-1]) for each in (B, C))
        head_inputs = self.x.new_empty(k, b, g, r, q, p)
        torch.mul(self.x.transpose(3, 4), self.dt.transpose(3, 4)[..., None], out=head_inputs)
        self.head_inputs = head_inputs.view(-1, q, p)

        log_decay = log_decay.transpose(3, 4).contiguous()
        self.decay = (log_decay[..., :, None] - log_decay[..., None, :]).exp2_()  # [k, b, g, r, q, q], may overflow
        self.decay.view(-1, q, q).tril_()  # removes overflowed values before any product
        if same is not None:
            self.decay.mul_(same[:, :, None, None])
        self.products = torch.bmm(self.C, self.B.mT).view(k, b, g, 1, q, q)

        states = self.x.new_empty(k + 1, b, g, B.shape[-1], r, p)  # entering each chunk, and leaving the last
        states[0] = state
        state_inputs = torch.mul(self.x, (self.dt * self.to_end)[..., None], out=self.x.new_empty(self.shape))
        self.state_inputs = state_inputs.view(-1, q, r * p)
        torch.bmm(self.B.mT, self.state_inputs, out=states[1:].view(k * b * g, -1, r * p))
        for chunk, whole in enumerate(self.whole[..., None, :, None]):
            states[chunk + 1].addcmul_(states[chunk], whole)
        self.states = states
        self.entering = states[:-1].view(k * b * g, -1, r * p)

    def from_heads(self, by_head: Tensor) -> Tensor:
        """View [k*b*g*r, q, p] as [k, b, g, q, r, p]."""
        k, b, g, q, r, p = self.shape
        return by_head.view(k, b, g, r, q, p).transpose(3, 4)


class _ChunkScan(torch.autograd.Function):
    """Scan in chunks, segment by segment.

    The inputs are, in this order: the state before the first token [b, g, n, r, p]; a mask [k, b, q, q] of the pairs of
    tokens in a chunk that belong to the same sequence, or None; D [g, 1, r, 1 or p] or None; the gate z, shaped like x,
    or None; x [k, b, g, q, r, p]; dt [k, b, g, q, r]; and B and C [k, b, g, q, n]. Then follow, shaped like dt, the
    base-2 logarithm of the decay from the chunk's start through a token, that decay itself, and the decay from after a
    token to the chunk's end; and last, the decay over the chunk [k, b, g, r]. The outputs are the result, shaped like
    x, and the last state.
    """

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, same: Tensor | None, D: Tensor | None, z: Tensor | None, x: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, entering = torch.empty_like(x), []
        ungated = None if z is None else torch.empty_like(x)
        for span in _segments(x):
            entering.append(state)
            segment = _Segment(state, None if same is None else same[span], *(each[span] for each in (x, *others)))
            mixing = segment.decay.mul_(segment.products).view(-1, *segment.decay.shape[-2:])
            inside = segment.from_heads(torch.bmm(mixing, segment.head_inputs))
            total = torch.bmm(segment.C, segment.entering).view(segment.shape)
            total.mul_(segment.from_start[..., None]).add_(inside)
            if D is not None:
                total.addcmul_(segment.x, D)
            if z is not None and ungated is not None:
                ungated[span] = total
                total.mul_(F.silu(z[span].to(total.dtype)))
            out[span] = total
            state = segment.states[-1].clone()
        ctx.save_for_backward(same, D, z, ungated, x, *others, *entering)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor, state_gradient: Tensor) -> tuple[Tensor | None, ...]:
        same, D, z, ungated, *rest = ctx.saved_tensors
        tensors, entering = rest[:8], rest[8:]
        gradients = [torch.empty_like(each) for each in tensors]
        dD = None if D is None else torch.zeros_like(D)
        dz = None if z is None else torch.empty_like(z)
        with full_precision(out_gradient):
            for span, state in zip(reversed(_segments(tensors[0])), reversed(entering), strict=True):
                segment = _Segment(state, None if same is None else same[span], *(each[span] for each in tensors))
                dy = out_gradient[span].to(state.dtype)
                if dz is not None:
                    gate = z[span].to(dy.dtype)
                    dz[span] = torch.ops.aten.silu_backward(dy * ungated[span], gate)
                    dy = F.silu(gate).mul_(dy)
                dx, *others, state_gradient = _segment_gradients(segment, dy, state_gradient)
                if dD is not None:
                    dx.addcmul_(dy, D)
                    dD += (dy * segment.x).sum((0, 1, 3)).unsqueeze(1).sum_to_size(D.shape)
                for gradient, value in zip(gradients, (dx, *others), strict=True):
                    gradient[span] = value
        return state_gradient, None, dD, dz, *gradients


def _segment_gradients(segment: _Segment, dy: Tensor, state_gradient: Tensor) -> tuple[Tensor, ...]:
    """Compute a segment's gradients: of x, dt, B, C, log decay, three decays (as in `_ChunkScan`) and entering state.

    `dy` is the output's gradient [k, b, g, q, r, p], and `state_gradient` the gradient of the state after the segment.
    """
    k, b, g, q, r, p = dy.shape
    head_dy = dy.transpose(3, 4).reshape(-1, q, p)

    # Inside the chunks.
    d_mixing = torch.bmm(head_dy, segment.head_inputs.mT).view_as(segment.decay).mul_(segment.decay)
    d_products = d_mixing.sum(3).view(-1, q, q)
    # Without the diagonal, which has no decay: it would dominate the rest where decay is strong.
    d_mixing.mul_(segment.products.tril(-1))
    d_log = (d_mixing.sum(-1) - d_mixing.sum(-2)).transpose(3, 4) / LOG2_E
    mixing = segment.decay.mul_(segment.products).view(-1, q, q)
    d_inputs = segment.from_heads(torch.bmm(mixing.mT, head_dy))

    # Through the states between them.
    read = torch.bmm(segment.C, segment.entering).view(dy.shape).mul_(dy)
    d_from_start = read.sum(-1)
    d_read = torch.mul(dy, segment.from_start[..., None], out=read).view(-1, q, r * p)
    d_states = dy.new_empty(segment.states.shape)
    d_states[-1] = state_gradient
    torch.bmm(segment.C.mT, d_read, out=d_states[:-1].view(segment.entering.shape))
    for chunk in range(k - 1, -1, -1):
        d_states[chunk].addcmul_(d_states[chunk + 1], segment.whole[chunk][..., None, :, None])
    leaving = d_states[1:].view(segment.entering.shape)
    dB = torch.bmm(d_products.mT, segment.C).baddbmm_(segment.state_inputs, leaving.mT).view(k, b, g, q, -1)
    dC = torch.bmm(d_products, segment.B).baddbmm_(d_read, segment.entering.mT).view(k, b, g, q, -1)
    d_whole = segment.states[:-1].mul_(d_states[1:]).sum((3, 5))

    d_state_inputs = torch.bmm(segment.B, leaving).view(dy.shape)
    d_to_end = torch.mul(d_state_inputs, segment.x, out=read).sum(-1).mul_(segment.dt)
    d_inputs = d_state_inputs.mul_(segment.to_end[..., None]).add_(d_inputs)
    d_dt = torch.mul(d_inputs, segment.x, out=read).sum(-1)
    dx = d_inputs.mul_(segment.dt[..., None])
    return dx, d_dt, dB, dC, d_log, d_from_start, d_to_end, d_whole, d_states[0].clone()


def _segments(x: Tensor) -> list[slice]:
    """Return slices of the first axis of x [k, b, g, q, r, p], each with the chunks that are processed together."""
    chunks, batch, groups, length, heads, _ = x.shape
    elements = SEGMENT_ELEMENTS_CPU if x.device.type == "cpu" else SEGMENT_ELEMENTS_ACCELERATOR
    at_once = max(1, elements // (batch * groups * heads * length * length))
    return [slice(first, first + at_once) for first in range(0, chunks, at_once)]


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
    """Compute Mamba-2's scan in chunks; time and memory are linear in the length, which must be at least 1.

    Args:
        x: [batch, length, heads, head_dim].
        dt: [batch, length, heads], step sizes.
        A: [heads], negative.
        B: [batch, length, groups, state]; the number of heads is a multiple of groups, and consecutive heads share a
            group.
        C: Same shape as `B`.
        chunk_size: Maximum length of a chunk; does not affect the result (see BLOCK_LENGTH).
        D: [heads] or [heads, head_dim], weight of the skip connection from x, or None.
        z: Gate with the shape of `x` (the output is multiplied by silu(z)), or None.
        dt_bias: [heads], added to dt, or None.
        dt_softplus: True to apply softplus to dt after the bias.
        dt_limit: Lowest and highest dt, applied last.
        seq_idx: [batch, length] sequence numbers; the state restarts from zero wherever the number changes. None
            for one sequence.
        initial_states: [batch, heads, head_dim, state], the state before the first token, or None for zeros.
        return_final_states: True to also return the state after the last token.

    Returns:
        [batch, length, heads, head_dim] in the dtype of `x`; with `return_final_states` also
        [batch, heads, head_dim, state] in float32 (float64 for float64 inputs).

    Raises:
        ValueError: If shapes do not fit together.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
    _check_shapes(x, B, dt=dt, A=A, C=C, D=D, z=z, dt_bias=dt_bias, seq_idx=seq_idx, initial_states=initial_states)
    batch, length, heads, head_dim = x.shape
    groups = B.shape[2]
    with full_precision(x):
        work = compute_dtype(x)
        dt = dt.to(work) if dt_bias is None else dt.to(work) + dt_bias.to(work)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        # Chunks of equal length, with as little padding after the last token as possible.
        chunks = -(-length // min(chunk_size, BLOCK_LENGTH))
        q = -(-length // chunks)

        def by_chunk(tensor: Tensor) -> Tensor:
            """View [b, length, heads or groups, ...] as [k, b, g, q, heads per group or 1, ...].

            Zeros are appended if the chunks are longer than the sequence.
            """
            if chunks * q > length:
                tensor = torch.cat([tensor, tensor.new_zeros(batch, chunks * q - length, *tensor.shape[2:])], dim=1)
            return tensor.unflatten(2, (groups, -1)).unflatten(1, (chunks, q)).movedim((1, 0, 3), (0, 1, 2))

        steps, in_group = by_chunk(dt), (groups, 1, heads // groups)
        # In powers of two: torch's float32 exp takes 4 times as long as exp2, and 30 times where it underflows.
        log_decay = (steps * (A.double() * LOG2_E).view(in_group)).cumsum(3)
        to_end = torch.exp2((log_decay[..., -1:, :] - log_decay).to(work))
        log_decay = log_decay.to(work)
        from_start, same = torch.exp2(log_decay), None
        whole = from_start[..., -1, :]
        if seq_idx is not None:
            run = run_numbers(seq_idx)
            run = torch.cat([run, run[:, -1:].expand(-1, chunks * q - length)], dim=1).unflatten(1, (chunks, q))
            run = run.movedim(1, 0)
            before = torch.cat([run[:1, :, 0], run[:-1, :, -1]])  # the first chunk continues the initial state
            from_start = from_start * (run == before[..., None])[:, :, None, :, None]
            to_end = to_end * (run == run[..., -1:])[:, :, None, :, None]
            whole = whole * (run[..., -1] == before)[:, :, None, None]
            same = run[..., :, None] == run[..., None, :]
        if initial_states is None:
            state = dt.new_zeros(batch, groups, B.shape[3], heads // groups, head_dim)
        else:
            state = initial_states.to(work).unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3).contiguous()
        out, state = _ChunkScan.apply(
            state,
            same,
            None if D is None else D.to(work).view(*in_group, -1),
            None if z is None else by_chunk(z),
            by_chunk(x),
            steps,
            *(by_chunk(each).squeeze(4) for each in (B, C)),
            log_decay,
            from_start,
            to_end,
            whole,
        )
        out = out.movedim((0, 1, 2), (1, 0, 3)).flatten(3, 4).flatten(1, 2)[:, :length].contiguous()
    return (out, state.permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()) if return_final_states else out


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
        "initial_states": (batch, heads, head_dim, B.shape[3]),
    }
    for name, tensor in {"B": B, **others}.items():
        if tensor is not None and tensor.shape != expected[name]:
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} has shape {shape}, expected {expected[name]} where x is {tuple(x.shape)}")
