"""The causal convolution against its definition, tap by tap in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_ext.megatron.cpu.mamba_convolution import causal_conv1d


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None = None, before: Tensor | None = None
) -> Tensor:
    """A causal depthwise convolution, tap by tap."""
    width = weight.shape[1]
    if before is None:
        before = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    extended = torch.cat([before, x], dim=1)
    out = x.new_zeros(x.shape) if bias is None else bias.expand(x.shape)
    for age in range(width):
        reached = extended[:, width - 1 - age : extended.shape[1] - age]
        if seq_idx is not None:
            earlier = torch.cat([seq_idx[:, :1].expand(-1, width - 1), seq_idx], dim=1)
            reached = reached * (earlier[:, width - 1 - age : earlier.shape[1] - age] == seq_idx)[..., None]
        out = out + reached * weight[:, width - 1 - age]
    return out


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "output") -> None:
    """Compares to `tolerance` of the largest expected value (or of 1, where that is smaller)."""
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{name}: off by {error:.2e}"


@given(
    length=st.integers(1, 12),
    width=st.integers(1, 5),
    starts=st.lists(st.integers(0, 11), max_size=4),
    with_bias=st.booleans(),
    continued=st.booleans(),
    activation=st.sampled_from([None, "silu", "swish"]),
)
def test_convolution_equals_its_definition(
    length: int, width: int, starts: list[int], with_bias: bool, continued: bool, activation: str | None
) -> None:
    torch.manual_seed(length + 13 * width)
    x, weight = torch.randn(2, length, 3).double(), torch.randn(3, width).double()
    bias = torch.randn(3).double() if with_bias else None
    before = torch.randn(2, width - 1, 3).double() if continued else None
    change = torch.zeros(2, length, dtype=torch.int32)
    change[:, [start for start in starts if start < length]] = 1
    seq_idx = change.cumsum(1) if starts else None
    leaves = [t.requires_grad_() for t in (x, weight, bias, before) if t is not None]
    expected = convolution(x, weight, bias, seq_idx, before)
    if activation is not None:
        expected = F.silu(expected)

    out = causal_conv1d(x, weight, bias, activation=activation, seq_idx=seq_idx, initial_states=before)

    assert_close(out, expected, 1e-12)
    weights = torch.randn(out.shape).double()
    actual_gradients = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    for actual, wanted in zip(actual_gradients, expected_gradients, strict=True):
        if wanted is not None and wanted.numel():
            assert actual is not None
            assert_close(actual, wanted, 1e-12, "gradient")


def test_convolution_gradcheck() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape).double().requires_grad_() for shape in ((2, 5, 3), (3, 4), (3,))]
    assert torch.autograd.gradcheck(lambda x, w, b: causal_conv1d(x, w, b, activation="silu"), inputs)


def test_convolution_refuses_what_does_not_fit() -> None:
    x, weight = torch.zeros(1, 6, 3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match="conv weight has shape"):
        causal_conv1d(x, torch.zeros(4, 4))
    with pytest.raises(ValueError, match="seq_idx has shape"):
        causal_conv1d(x, weight, seq_idx=torch.zeros(1, 5))
    with pytest.raises(ValueError, match="initial_states has shape"):
        causal_conv1d(x, weight, initial_states=torch.zeros(1, 4, 3))
