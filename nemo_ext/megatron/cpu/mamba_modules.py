"""Torch kernels under the names of mamba_ssm and causal_conv1d, for machines without these packages.

Megatron's Mamba mixer imports its kernels from these packages by name, and rejects packed sequences unless their
`__version__` is high enough; the stand-ins satisfy both. The functions take upstream's arguments (mamba_ssm's
`ops/triton/ssd_combined.py`, causal_conv1d's `causal_conv1d_interface.py`); unsupported ones raise ValueError.
"""

import importlib.util
import math
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_ext.megatron.cpu.mamba_convolution import causal_conv1d
from nemo_ext.megatron.cpu.mamba_norm import RMSNorm, rms_norm_gated
from nemo_ext.megatron.cpu.mamba_scan import compute_dtype, ssd_chunk_scan

MIXER = "megatron.core.ssm.mamba_mixer"

# Lowest versions with which Megatron trains on packed sequences (`_check_mamba_sequence_packing_support` in its mixer).
# Dynamic inference requires higher ones and is therefore refused: its kernels are Megatron's own Triton kernels, which
# are not replaced here.
MAMBA_SSM_VERSION = "2.0.0+nemo.ext"
CAUSAL_CONV1D_VERSION = "1.4.0+nemo.ext"


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute Mamba-2's scan with `ssd_chunk_scan`, which describes the arguments and the result.

    `state_dtype` is upstream's dtype for states between chunks; here it has no effect, as all states have the
    computation's dtype.

    Raises:
        ValueError: cu_seqlens or return_varlen_states is set, state_dtype is wider than the computation's dtype, or the
            shapes do not match.
    """
    _refuse("mamba_chunk_scan_combined", cu_seqlens=cu_seqlens, return_varlen_states=return_varlen_states)
    _check_state_dtype(state_dtype, x)
    return ssd_chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        seq_idx=seq_idx,
        initial_states=initial_states,
        return_final_states=return_final_states,
    )


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply convolution, scan and gate to a mixer's input projection, z | x | B | C | dt in the last dimension.

    With `rmsnorm_weight`, the result then goes through the gated norm, and with `outproj_weight` through the output
    projection, as in transformers' mixers. `state_dtype` is as in `mamba_chunk_scan_combined`.

    Returns:
        [batch, length, features]; with `return_final_states` also the last SSM state
        [batch, heads, head_dim, state].

    Raises:
        ValueError: headdim is missing, outproj_bias is set without outproj_weight, state_dtype is wider than the
            computation's dtype, or the shapes do not match.
    """
    _check_state_dtype(state_dtype, zxbcdt)
    if D.dim() == 2:
        headdim = D.shape[1]
    if headdim is None:
        raise ValueError("headdim is None: it must be given if D has the shape [heads]")
    if outproj_weight is None and outproj_bias is not None:
        raise ValueError("outproj_bias is set without outproj_weight: pass both, or neither")
    heads, channels = D.shape[0], conv1d_weight.shape[0]
    inner = heads * headdim
    grouped, rest = divmod(channels - inner, 2)
    if ngroups < 1 or rest or grouped < ngroups or grouped % ngroups or zxbcdt.shape[-1] != inner + channels + heads:
        raise ValueError(
            f"zxbcdt has shape {tuple(zxbcdt.shape)} and conv1d_weight has {channels} channels; for {heads} heads of "
            f"{headdim} (inner = {inner}) in {ngroups} groups, expected [batch, length, inner + channels + heads] and "
            "channels = inner + 2 * groups * state"
        )
    z, xbc, dt = zxbcdt.split((inner, channels, heads), dim=-1)
    xbc = causal_conv1d(xbc, conv1d_weight, conv1d_bias, activation=activation, seq_idx=seq_idx)
    x, B, C = xbc.split((inner, grouped, grouped), dim=-1)
    out, state = ssd_chunk_scan(
        x.unflatten(-1, (heads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size=chunk_size,
        D=D,
        z=z.unflatten(-1, (heads, headdim)) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=dt_limit,
        seq_idx=seq_idx,
        initial_states=initial_states,
        return_final_states=True,
    )
    out = out.flatten(2)
    if rmsnorm_weight is not None:
        group_size = inner // ngroups
        out = rms_norm_gated(
            out, rmsnorm_weight, z=z, eps=rmsnorm_eps, group_size=group_size, norm_before_gate=norm_before_gate
        )
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, state) if return_final_states else out


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Call `causal_conv1d` with channels first: x [batch, channels, length], states [batch, channels, width - 1].

    Raises:
        ValueError: return_final_states or final_states_out is set, or the shapes do not match.
    """
    _refuse("causal_conv1d_fn", return_final_states=return_final_states, final_states_out=final_states_out)
    out = causal_conv1d(
        x.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        seq_idx=seq_idx,
        initial_states=None if initial_states is None else initial_states.transpose(1, 2),
    )
    return out.transpose(1, 2)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve new tokens, and update the state with them in place.

    Args:
        x: [batch, channels] or [batch, channels, tokens].
        conv_state: [batch, channels, kept], the last `kept` >= width - 1 inputs, newest last.
        weight: [channels, width].
        bias: [channels] or None.
        activation: "silu", "swish" or None.
        cache_seqlens, conv_state_indices: Not supported.

    Returns:
        Tensor of the shape of `x`.
    """
    _refuse("causal_conv1d_update", cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices)
    work, (channels, width) = compute_dtype(x), weight.shape
    tokens = x.reshape(*x.shape[:2], -1).to(work)
    inputs = torch.cat([conv_state.to(work), tokens], dim=-1)
    reached = inputs[..., -(width - 1 + tokens.shape[-1]) :]
    out = F.conv1d(reached, weight[:, None].to(work), None if bias is None else bias.to(work), groups=channels)
    conv_state.copy_(inputs[..., -conv_state.shape[-1] :])
    return (out if activation is None else F.silu(out)).reshape(x.shape).to(x.dtype)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Return the last inputs of each packed sequence, with zeros before its start.

    Args:
        x: [tokens, channels].
        cu_seqlens: [sequences + 1] offsets of the sequences.
        state_len: Number of tokens to keep.

    Returns:
        [sequences, channels, state_len].
    """
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    token = ends + torch.arange(-state_len, 0, device=x.device)
    inside = (token >= starts)[..., None]
    return x[token.clamp(min=0)].where(inside, x.new_zeros(())).transpose(1, 2)


def _refuse(function: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{function}: the torch kernels do not support {name}; omit it, or install mamba_ssm")


def _check_state_dtype(state_dtype: torch.dtype | None, inputs: Tensor) -> None:
    if state_dtype == torch.float64 and inputs.dtype != torch.float64:
        raise ValueError(f"state_dtype=float64 requires float64 inputs, not {inputs.dtype}: set state_dtype=float32")


STAND_INS: dict[str, dict[str, dict[str, object]]] = {
    "mamba_ssm": {
        "mamba_ssm": {"__version__": MAMBA_SSM_VERSION},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
    },
    "causal_conv1d": {
        "causal_conv1d": {
            "__version__": CAUSAL_CONV1D_VERSION,
            "causal_conv1d_fn": causal_conv1d_fn,
            "causal_conv1d_update": causal_conv1d_update,
        },
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": causal_conv1d_varlen_states},
    },
}
"""Mapping from each replaced package to its modules and their attributes; parents precede children."""


def install() -> tuple[str, ...]:
    """Put the torch kernels in `sys.modules` if mamba_ssm is not installed or there is no GPU; idempotent.

    causal_conv1d is replaced only together with mamba_ssm, and on a GPU only if it is missing too.

    Returns:
        Names of the packages that are stand-ins in this process; empty with a real mamba_ssm and a GPU.

    Raises:
        RuntimeError: Megatron's mixer was already imported without these kernels.
    """
    served = tuple(name for name in STAND_INS if is_stand_in(name))
    device = torch.cuda.is_available()
    if served or (device and importlib.util.find_spec("mamba_ssm") is not None):
        return served
    mixer = sys.modules.get(MIXER)
    if mixer is not None and not mixer.HAVE_MAMBA_SSM:
        raise RuntimeError(
            f"{MIXER} was already imported without mamba_ssm, which it looks up only once: "
            "call mamba_modules.install() before importing it"
        )
    missing = tuple(name for name in STAND_INS if not device or importlib.util.find_spec(name) is None)
    for package in missing:
        for name, attributes in STAND_INS[package].items():
            sys.modules[name] = _module(name, attributes)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[name])
    return missing


def is_stand_in(package: str) -> bool:
    """Return whether `package` is a stand-in that `install` put in place."""
    return getattr(sys.modules.get(package), "__doc__", None) == __doc__


def _module(name: str, attributes: dict[str, object]) -> ModuleType:
    module = ModuleType(name, __doc__)
    # The spec makes importlib.util.find_spec see an ordinary module. Each module is a package with an empty path, so
    # importing a name that it does not provide is an ImportError.
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    module.__package__ = name
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    return module
