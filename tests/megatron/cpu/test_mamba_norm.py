"""The gated RMS norm against its definition."""

import pytest
import torch
import torch.nn.functional as F

from nemo_ext.megatron.cpu.mamba_norm import RMSNorm, rms_norm_gated


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [None, 3, 12])
def test_gated_norm_equals_its_definition(norm_before_gate: bool, group_size: int | None) -> None:
    torch.manual_seed(0)
    x, z = torch.randn(2, 5, 12).double(), torch.randn(2, 5, 12).double()
    norm = RMSNorm(12, 1e-3, group_size, norm_before_gate, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    gate = F.silu(z)
    inputs = x if norm_before_gate else x * gate
    grouped = inputs.unflatten(-1, (-1, group_size or 12))
    mean_square = grouped.square().mean(-1, keepdim=True)
    expected = (grouped / (mean_square + 1e-3).sqrt()).flatten(-2) * norm.weight
    if norm_before_gate:
        expected = expected * gate

    torch.testing.assert_close(norm(x, z), expected)
    torch.testing.assert_close(norm(inputs), norm(x, z) / gate if norm_before_gate else expected)
    assert set(norm.state_dict()) == {"weight"}


def test_norm_gradcheck() -> None:
    torch.manual_seed(0)
    x, z, weight = (torch.randn(shape).double().requires_grad_() for shape in ((3, 8), (3, 8), (8,)))
    for before in (True, False):
        assert torch.autograd.gradcheck(
            lambda x, z, w, before=before: rms_norm_gated(x, w, z=z, group_size=4, norm_before_gate=before),
            (x, z, weight),
        )


def test_norm_in_bfloat16_rounds_once() -> None:
    torch.manual_seed(0)
    x, z, weight = (torch.randn(shape).bfloat16() for shape in ((4, 64), (4, 64), (64,)))

    out = rms_norm_gated(x, weight, z=z, group_size=16, norm_before_gate=False)

    expected = rms_norm_gated(x.float(), weight.float(), z=z.float(), group_size=16, norm_before_gate=False)
    assert torch.equal(out, expected.bfloat16())


def test_norm_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="group_size=5 must be a positive divisor"):
        RMSNorm(12, group_size=5)
    with pytest.raises(ValueError, match="for both"):
        RMSNorm(12)(torch.zeros(2, 12), torch.zeros(2, 6))
