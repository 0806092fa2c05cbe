"""One segment of Mamba-2's scan, forward and backward: the arithmetic under `mamba_scan.ssd_chunk_scan`.

A segment is a few chunks. Chunked form of Dao & Gu 2024 (arXiv:2405.21060, section 6), laid out for a CPU:

- The buffers of a segment stay in cache and serve the next one too: fresh pages cost more than arithmetic.
- States are kept as [state, heads * head_dim] per group, so B and C are never repeated over the heads and
  every product with a state is one wide matrix product.
- Forward keeps the result before the gate and the state entering the segment; backward recomputes the rest.

Work is done in float32 (float64 for float64 inputs), cumulative log decays in float64. In shape comments:
k chunks, b batch, g groups, q positions in a chunk, r heads of a group, p head_dim, n state.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG2_E = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class ScanSlice:
    """The tensors of one segment, or (without `ungated` and `run`) the gradients with respect to them.

    Attributes:
        x: [batch, length, heads, head_dim].
        B: [batch, length, groups, state].
        C: [batch, length, groups, state].
        dt: [batch, length, heads] after bias, softplus and limits, in the dtype of the work.
        z: The gate, shaped as `x`, or None.
        out: The result, shaped as `x`; None in backward, which reads its gradient alone.
        ungated: The result before the gate, or None without a gate.
        run: [batch, length], a number for each packed sequence, or None for one sequence.
        run_before: [batch], the run of the token before the segment.
    """

    x: Tensor
    B: Tensor
    C: Tensor
    dt: Tensor
    z: Tensor | None = None
    out: Tensor | None = None
    ungated: Tensor | None = None
    run: Tensor | None = None
    run_before: Tensor | None = None


class Parameters(NamedTuple):
    """The decay rates A [heads] (negative) and the skip weights D, [heads], [heads, head_dim] or None."""

    A: Tensor
    D: Tensor | None

    def gradients(self) -> "Parameters":
        """Zeros to add gradients to, that of A in float64."""
        D = None if self.D is None else torch.zeros_like(self.D)
        return Parameters(torch.zeros_like(self.A, dtype=torch.float64), D)


class Segment(NamedTuple):
    """A stretch of the sequence: `chunks` chunks of `chunk_length` tokens from `start`."""

    start: int
    chunks: int
    chunk_length: int

    @property
    def span(self) -> slice:
        """The segment's tokens."""
        return slice(self.start, self.start + self.chunks * self.chunk_length)


class Scratch:
    """Named buffers that every segment of one call reuses."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns the buffer `name` with this shape and undefined values."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=self._dtype, device=self._device)
        return buffer[:size].view(shape)


def cut(segment: Segment, **whole: Tensor | None) -> dict[str, Any]:
    """Fields of `ScanSlice`: one segment's views of full-length tensors."""
    views = {name: None if tensor is None else tensor[:, segment.span] for name, tensor in whole.items()}
    if (run := whole.get("run")) is not None:
        # The first segment continues the initial state, so nothing changes before its first token.
        views["run_before"] = run[:, max(segment.start - 1, 0)]
    return views


class _Chunks(NamedTuple):
    """Intermediate results of a segment that forward and backward both need. Natural order is [k, b, g, q, r, p]."""

    x: Tensor  # natural
    dt: Tensor  # [k, b, g, q, r]
    B: Tensor  # [k*b*g, q, n]
    C: Tensor  # [k*b*g, q, n]
    visible: Tensor  # bool [q, q] or [k, b, 1, q, q]: row may read column
    from_start: Tensor  # [k, b, g, q, r] decay from the start of the chunk up to and with a token
    to_end: Tensor  # [k, b, g, q, r] decay after a token up to the end of the chunk
    whole: Tensor  # [k, b, g, r] decay over the chunk
    products: Tensor  # [k, b, g, 1, q, q] C B^T where visible, else 0
    decay: Tensor  # [k, b, g, r, q, q] between two tokens; above the diagonal undefined
    head_inputs: Tensor  # [k, b, g, r, q, p] dt x
    state_inputs: Tensor  # natural, dt x times to_end
    states: Tensor  # [k + 1, b, g, n, r, p] entering each chunk, and leaving the last


def _by_chunk(tensor: Tensor, segment: Segment, groups: int) -> Tensor:
    """Views [b, k*q, g*r, ...] as [k, b, g, q, r, ...]."""
    chunked = tensor.unflatten(1, (segment.chunks, segment.chunk_length)).unflatten(3, (groups, -1))
    return chunked.movedim((1, 0, 3), (0, 1, 2))


def _by_chunk_grouped(tensor: Tensor, segment: Segment) -> Tensor:
    """Views [b, k*q, g, n] as [k, b, g, q, n]."""
    return tensor.unflatten(1, (segment.chunks, segment.chunk_length)).movedim((1, 0, 3), (0, 1, 2))


def _per_head(parameter: Tensor, groups: int) -> Tensor:
    """Views a [heads] or [heads, head_dim] parameter as [g, 1, r, 1 or p], to multiply natural order."""
    return parameter.view(groups, 1, parameter.shape[0] // groups, -1)


def _prepare(tensors: ScanSlice, A: Tensor, state: Tensor, segment: Segment, scratch: Scratch) -> _Chunks:
    groups, state_size = tensors.B.shape[2:]
    work = tensors.dt.dtype
    x = _by_chunk(tensors.x, segment, groups).to(work)
    k, b, g, q, r, p = x.shape
    dt = _by_chunk(tensors.dt, segment, groups)

    # In powers of two: torch's float32 exp takes 4 times as long as exp2, and 30 times where it underflows.
    log_decay = (dt.double() * (A.double() * LOG2_E).view(g, 1, r)).cumsum(3)
    to_end = torch.exp2(log_decay[..., -1:, :] - log_decay).to(work)
    log_decay = log_decay.to(work)
    from_start = torch.exp2(log_decay)
    whole = from_start[..., -1, :]
    visible = torch.ones(q, q, dtype=torch.bool, device=x.device).tril_()
    if tensors.run is not None and tensors.run_before is not None:
        run = tensors.run.unflatten(1, (k, q)).movedim(1, 0)
        before = torch.cat([tensors.run_before[None], run[:-1, :, -1]])
        from_start = from_start * (run == before[..., None])[:, :, None, :, None]
        to_end = to_end * (run == run[..., -1:])[:, :, None, :, None]
        whole = whole * (run[..., -1] == before)[:, :, None, None]
        visible = ((run[..., :, None] == run[..., None, :]) & visible)[:, :, None]

    B = _by_chunk_grouped(tensors.B, segment).to(work).reshape(-1, q, state_size)
    C = _by_chunk_grouped(tensors.C, segment).to(work).reshape(-1, q, state_size)
    products = torch.bmm(C, B.mT).view(k, b, g, q, q).masked_fill_(~visible, 0).unsqueeze(3)
    head_decay = log_decay.transpose(-1, -2).contiguous()
    decay = scratch.take("decay", k, b, g, r, q, q)
    torch.sub(head_decay[..., :, None], head_decay[..., None, :], out=decay).exp2_()

    head_inputs = scratch.take("head_inputs", k, b, g, r, q, p)
    torch.mul(x.transpose(3, 4), dt.transpose(3, 4)[..., None], out=head_inputs)
    state_inputs = scratch.take("state_inputs", k, b, g, q, r, p)
    torch.mul(x, (dt * to_end)[..., None], out=state_inputs)
    states = scratch.take("states", k + 1, b, g, state_size, r, p)
    states[0] = state
    torch.bmm(B.mT, state_inputs.view(-1, q, r * p), out=states[1:].view(-1, state_size, r * p))
    for chunk in range(k):
        states[chunk + 1].addcmul_(states[chunk], whole[chunk][:, :, None, :, None])
    return _Chunks(x, dt, B, C, visible, from_start, to_end, whole, products, decay, head_inputs, state_inputs, states)


def scan_forward(
    tensors: ScanSlice, parameters: Parameters, state: Tensor, segment: Segment, scratch: Scratch
) -> Tensor:
    """Runs one segment: fills `tensors.out`, and with a gate `tensors.ungated`.

    Args:
        tensors: The segment's tensors.
        parameters: A and D.
        state: [batch, groups, state, heads of a group, head_dim] entering the segment.
        segment: Position of the segment in the sequence.
        scratch: Reused buffers.

    Returns:
        The state leaving the segment.
    """
    D, out, ungated = parameters.D, tensors.out, tensors.ungated
    assert out is not None
    chunks = _prepare(tensors, parameters.A, state, segment, scratch)
    k, b, g, q, r, p = chunks.x.shape
    state_size = chunks.states.shape[3]
    entering = chunks.states[:-1].view(-1, state_size, r * p)
    between = torch.bmm(chunks.C, entering, out=scratch.take("natural", k * b * g, q, r * p))
    mixing = chunks.decay.mul_(chunks.products).view(-1, q, q).tril_()
    inside = scratch.take("by_head", k, b, g, r, q, p)
    torch.bmm(mixing, chunks.head_inputs.view(-1, q, p), out=inside.view(-1, q, p))
    target = _by_chunk(out if ungated is None else ungated, segment, g)
    total = target if target.dtype == inside.dtype else scratch.take("state_inputs", k, b, g, q, r, p)
    torch.addcmul(inside.transpose(3, 4), between.view(k, b, g, q, r, p), chunks.from_start[..., None], out=total)
    if D is not None:
        total.addcmul_(chunks.x, _per_head(D, g))
    if tensors.z is not None:
        z = _by_chunk(tensors.z, segment, g).to(total.dtype)
        gate = torch.sigmoid(z, out=scratch.take("natural", k, b, g, q, r, p)).mul_(z)
        torch.mul(total, gate, out=_by_chunk(out, segment, g))
    if total is not target:
        target.copy_(total)
    return chunks.states[-1].clone()


def scan_backward(
    tensors: ScanSlice,
    gradients: ScanSlice,
    parameters: Parameters,
    added_to: Parameters,
    state: Tensor,
    state_gradient: Tensor,
    segment: Segment,
    scratch: Scratch,
) -> Tensor:
    """Runs one segment backward.

    Args:
        tensors: The segment's tensors, with what `scan_forward` put into `ungated`.
        gradients: Filled with the gradients of `tensors`, from that of the result in `out`.
        parameters: A and D.
        added_to: The gradients of `parameters`, which the segment's are added to.
        state: The state that entered the segment.
        state_gradient: Gradient of the state leaving the segment.
        segment: Position of the segment in the sequence.
        scratch: Reused buffers.

    Returns:
        The gradient of the entering state.
    """
    A, D = parameters
    assert gradients.out is not None
    chunks = _prepare(tensors, A, state, segment, scratch)
    k, b, g, q, r, _ = chunks.x.shape
    dy = _by_chunk(gradients.out, segment, g).to(chunks.x.dtype)
    if tensors.z is not None and gradients.z is not None and tensors.ungated is not None:
        z, dz, total = (_by_chunk(t, segment, g) for t in (tensors.z, gradients.z, tensors.ungated))
        dy = _ungate(z.to(dy.dtype), dz, total, dy, scratch)
    if D is not None and added_to.D is not None:
        over = (0, 1, 3) if D.dim() == 2 else (0, 1, 3, 5)
        added_to.D.add_(torch.mul(dy, chunks.x, out=scratch.take("natural", *dy.shape)).sum(over).view(D.shape))

    between = _backward_between(chunks, dy, state_gradient, scratch)
    inside = _backward_inside(chunks, dy, scratch)
    through_states = _dot(between.inputs, chunks.x, chunks.state_inputs).mul_(chunks.to_end)
    d_dt = _dot(inside.inputs, chunks.x, chunks.state_inputs) + through_states
    d_inputs = torch.addcmul(inside.inputs, between.inputs, chunks.to_end[..., None], out=chunks.state_inputs).mul_(
        chunks.dt[..., None]
    )
    dx = _by_chunk(gradients.x, segment, g)
    if D is None:
        dx.copy_(d_inputs)
    else:
        torch.addcmul(d_inputs, dy, _per_head(D, g), out=dx)

    # The decay of a step scales what crosses it. Later reads are summed from the end of the chunk and earlier writes
    # from its start, which keeps cancellation small.
    reads = (between.rows + inside.rows_minus_columns).double()
    written = (chunks.dt * through_states).double()
    d_step = reads.flip(3).cumsum(3).flip(3) + (written.cumsum(3) - written) + between.chain.unsqueeze(3)
    _by_chunk(gradients.dt, segment, g).copy_(d_dt + d_step * A.double().view(g, 1, r))
    _by_chunk_grouped(gradients.B, segment).copy_((between.B + inside.B).view(k, b, g, q, -1))
    _by_chunk_grouped(gradients.C, segment).copy_((between.C + inside.C).view(k, b, g, q, -1))
    added_to.A.add_((d_step * chunks.dt).sum((0, 1, 3)).view(-1))
    return between.state


class _Between(NamedTuple):
    """Gradients through the states between chunks."""

    B: Tensor  # [k*b*g, q, n]
    C: Tensor
    inputs: Tensor  # natural: gradient of dt x before its decay to the end of the chunk
    rows: Tensor  # [k, b, g, q, r]: of the log decay from the start of the chunk to each token
    chain: Tensor  # [k, b, g, r]: of the log decay over the chunk
    state: Tensor  # of the state entering the segment


def _backward_between(chunks: _Chunks, dy: Tensor, state_gradient: Tensor, scratch: Scratch) -> _Between:
    k, b, g, q, r, p = dy.shape
    state_size = chunks.states.shape[3]
    buffer = scratch.take("natural", *dy.shape)
    flat = buffer.view(-1, q, r * p)
    entering = chunks.states[:-1].view(-1, state_size, r * p)
    torch.bmm(chunks.C, entering, out=flat)
    rows = _dot(buffer, dy, buffer).mul_(chunks.from_start)
    torch.mul(dy, chunks.from_start[..., None], out=buffer)
    dC = torch.bmm(flat, entering.mT)
    dstates = scratch.take("state_gradients", k + 1, b, g, state_size, r, p)
    torch.bmm(chunks.C.mT, flat, out=dstates[:-1].view(-1, state_size, r * p))
    dstates[-1] = state_gradient
    for chunk in range(k - 1, -1, -1):
        dstates[chunk].addcmul_(dstates[chunk + 1], chunks.whole[chunk][:, :, None, :, None])
    leaving = dstates[1:].view(-1, state_size, r * p)
    chain = chunks.states[:-1].mul_(dstates[1:]).sum((3, 5)).mul_(chunks.whole)
    dB = torch.bmm(chunks.state_inputs.view(-1, q, r * p), leaving.mT)
    torch.bmm(chunks.B, leaving, out=flat)
    return _Between(dB, dC, buffer, rows, chain, dstates[0].clone())


class _Inside(NamedTuple):
    """Gradients through the [q, q] matrices of the chunks."""

    B: Tensor  # [k*b*g, q, n]
    C: Tensor
    inputs: Tensor  # natural: gradient of dt x
    rows_minus_columns: Tensor  # [k, b, g, q, r]: of the log decay at a token, as reader less as written


def _backward_inside(chunks: _Chunks, dy: Tensor, scratch: Scratch) -> _Inside:
    k, b, g, q, r, p = dy.shape
    head_dy = scratch.take("by_head", k, b, g, r, q, p)
    head_dy.copy_(dy.transpose(3, 4))
    d_mixing = scratch.take("mixing_gradient", k, b, g, r, q, q)
    torch.bmm(head_dy.view(-1, q, p), chunks.head_inputs.view(-1, q, p).mT, out=d_mixing.view(-1, q, q))
    d_mixing.mul_(chunks.decay).view(-1, q, q).tril_()
    d_products = d_mixing.sum(3).masked_fill_(~chunks.visible, 0).view(-1, q, q)
    # Without the diagonal, which has no decay: it would dominate the rest where decay is strong.
    d_mixing.mul_(chunks.products.tril(-1))
    rows_minus_columns = (d_mixing.sum(-1) - d_mixing.sum(-2)).transpose(3, 4)
    mixing = chunks.decay.mul_(chunks.products).view(-1, q, q).tril_()
    inputs = torch.bmm(mixing.mT, head_dy.view(-1, q, p), out=chunks.head_inputs.view(-1, q, p))
    return _Inside(
        B=torch.bmm(d_products.mT, chunks.C),
        C=torch.bmm(d_products, chunks.B),
        inputs=inputs.view(k, b, g, r, q, p).transpose(3, 4),
        rows_minus_columns=rows_minus_columns,
    )


def _ungate(z: Tensor, dz: Tensor, total: Tensor, d_out: Tensor, scratch: Scratch) -> Tensor:
    """Fills `dz` and returns the gradient before the gate; all in natural order."""
    sigmoid = torch.sigmoid(z, out=scratch.take("sigmoid", *z.shape))
    gate = torch.mul(sigmoid, z, out=scratch.take("gate", *z.shape))
    torch.mul(silu_slope(sigmoid, gate).mul_(d_out), total, out=dz)
    return gate.mul_(d_out)


def _dot(left: Tensor, right: Tensor, buffer: Tensor) -> Tensor:
    """Dot products along the last dimension; overwrites `buffer`."""
    return torch.mul(left, right, out=buffer).sum(-1)


def silu_slope(sigmoid: Tensor, silu: Tensor) -> Tensor:
    """Derivative of silu at u from sigmoid(u) and silu(u); overwrites `sigmoid`."""
    return sigmoid.addcmul_(sigmoid, silu, value=-1).add_(silu)
