"""Decoding step of Mamba: token by token it gives the same as over the whole sequence."""

import pytest
import torch

from nemo_ext.megatron.cpu import mamba_modules
from nemo_ext.megatron.cpu.mamba_convolution import causal_conv1d
from nemo_ext.megatron.cpu.mamba_scan import ssd_chunk_scan
from nemo_ext.megatron.cpu.mamba_step import causal_conv1d_update, selective_state_update


@pytest.mark.parametrize("kept", [4, 6])
@pytest.mark.parametrize("bias", [True, False])
def test_the_convolution_token_by_token(kept: int, bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, offset = torch.randn(3, 9, 10), torch.randn(10, 4), torch.randn(10) if bias else None
    state = torch.zeros(3, 10, kept)

    steps = [causal_conv1d_update(x[:, a:b], state, weight, offset, "silu") for a, b in ((0, 1), (1, 3), (3, 9))]

    assert torch.allclose(torch.cat(steps, 1), causal_conv1d(x, weight, offset, activation="silu"), atol=1e-6)
    assert torch.equal(state, x[:, -kept:].transpose(1, 2))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
def test_the_scan_token_by_token(groups: int, gated: bool) -> None:
    torch.manual_seed(0)
    batch, length, heads, head_dim, size = 3, 7, 4, 5, 6
    x, z = torch.randn(2, batch, length, heads, head_dim)
    dt, B, C = torch.randn(batch, length, heads), *torch.randn(2, batch, length, groups, size)
    A, D, dt_bias = -torch.rand(heads), torch.randn(heads), torch.randn(heads)
    whole, last = ssd_chunk_scan(
        *(x, dt, A, B, C),
        chunk_size=4,
        D=D,
        z=z if gated else None,
        dt_bias=dt_bias,
        dt_softplus=True,
        return_final_states=True,
    )
    state = torch.zeros(batch, heads, head_dim, size)
    wide = {"D": D[:, None].expand(-1, head_dim), "dt_bias": dt_bias[:, None].expand(-1, head_dim)}

    def step(token: slice) -> torch.Tensor:
        return selective_state_update(
            *(state, x[:, token], dt[:, token, :, None].expand(-1, -1, -1, head_dim)),
            *(A[:, None, None].expand(-1, head_dim, size), B[:, token], C[:, token]),
            z=z[:, token] if gated else None,
            dt_softplus=True,
            **wide,
        )

    out = torch.cat([step(token) for token in (slice(0, 1), slice(1, 3), slice(3, 7))], 1)

    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(state, last, atol=1e-5)


@pytest.mark.parametrize("kept", [3, 4, 6])
def test_the_convolution_under_the_packages_own_name(kept: int) -> None:
    torch.manual_seed(0)
    x, weight, offset = torch.randn(3, 10, 9), torch.randn(10, 4), torch.randn(10)
    state = torch.zeros(3, 10, kept)

    first = mamba_modules.causal_conv1d_update(x[..., 0], state, weight, offset, "silu")
    rest = mamba_modules.causal_conv1d_update(x[..., 1:], state, weight, offset, "silu")

    whole = causal_conv1d(x.transpose(1, 2), weight, offset, activation="silu").transpose(1, 2)
    assert torch.allclose(torch.cat([first[..., None], rest], -1), whole, atol=1e-6)
    assert torch.equal(state, x[..., -kept:])
    with pytest.raises(ValueError, match="torch kernels do not support cache_seqlens"):
        mamba_modules.causal_conv1d_update(x, state, weight, cache_seqlens=torch.ones(3))


def test_dynamic_batching_is_refused() -> None:
    x = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="conv_state_indices needs dynamic batching"):
        causal_conv1d_update(x, torch.zeros(1, 4, 4), torch.zeros(4, 4), None, True, torch.zeros(1))
