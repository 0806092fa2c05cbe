"""Decoding step of a Mamba-2 mixer in plain torch, with the names and arguments of Megatron's Triton kernels.

The kernels are in `causal_conv1d_triton.py` and `mamba_ssm.py` in `megatron/core/ssm/ops/`. States are updated in
place. Options that static inference does not use (states of speculative tokens, requests scattered over a larger state)
raise ValueError.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_ext.megatron.cpu import mamba_modules
from nemo_ext.megatron.cpu.mamba_scan import compute_dtype


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool | str,
    conv_state_indices: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
) -> Tensor:
    """Convolve new tokens, and update the state with them in place.

    Args:
        x: [batch, tokens, channels].
        conv_state: [batch, channels, kept], the last `kept` >= width inputs, newest last.
        weight: [channels, width].
        bias: [channels] or None.
        silu_activation: True (or a name) to apply silu.
        conv_state_indices, intermediate_conv_states: not supported.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        ValueError: an unsupported argument is given.
    """
    _refuse(conv_state_indices=conv_state_indices, intermediate_conv_states=intermediate_conv_states)
    activation = "silu" if silu_activation else None
    return mamba_modules.causal_conv1d_update(x.transpose(1, 2), conv_state, weight, bias, activation).transpose(1, 2)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    intermediate_ssm_states: Tensor | None = None,
) -> Tensor:
    """Scan over new tokens: state = exp(dt A) state + dt x B, output = (C state + D x) silu(z).

    Args:
        state: [batch, heads, head_dim, state].
        x: [batch, tokens, heads, head_dim].
        dt: step sizes with the shape of `x`.
        A: [heads, head_dim, state], negative.
        B: [batch, tokens, groups, state].
        C: same shape as `B`.
        D: [heads, head_dim] or None.
        z: gate with the shape of `x`, or None.
        dt_bias: [heads, head_dim] or None.
        dt_softplus: True to apply softplus to dt after its bias.
        state_batch_indices, intermediate_ssm_states: not supported.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        ValueError: an unsupported argument is given.
    """
    _refuse(state_batch_indices=state_batch_indices, intermediate_ssm_states=intermediate_ssm_states)
    work, heads = compute_dtype(x), x.shape[2]
    per_group = heads // B.shape[2]
    outputs = []
    for number in range(x.shape[1]):
        token, step = x[:, number].to(work), dt[:, number].to(work)
        if dt_bias is not None:
            step = step + dt_bias.to(work)
        if dt_softplus:
            step = F.softplus(step)
        into, out_of = (t[:, number].to(work).repeat_interleave(per_group, dim=1)[:, :, None] for t in (B, C))
        decayed = state.to(work) * torch.exp(step[..., None] * A.to(work))
        new = decayed + (step * token)[..., None] * into
        state.copy_(new)
        out = (new * out_of).sum(-1)
        outputs.append(out if D is None else out + D.to(work) * token)
    out = torch.stack(outputs, dim=1)
    return (out if z is None else out * F.silu(z.to(work))).to(x.dtype)


def _refuse(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} needs dynamic batching, unsupported on CPUs: use static batching, or CUDA")
