"""NVFP4 rounding, against a search over all E2M1 numbers (tests/quantization: against ModelOpt's and vLLM's)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.megatron.nvfp4 import fake_nvfp4, quantise_nvfp4, rotated

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def uneven(seed: int, rows: int, blocks: int) -> torch.Tensor:
    """Numbers of very different sizes, some zero, in whole blocks."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-9, 9, (rows, blocks, 1), generator=random).float())
    numbers = sizes * torch.randn(rows, blocks, 16, generator=random)
    return (numbers * (torch.rand(rows, blocks, 16, generator=random) < 0.8)).view(rows, -1)


@given(st.integers(0, 999), st.integers(1, 20), st.integers(1, 4), st.sampled_from([1, 16]))
def test_every_number_is_the_nearest_of_its_block(seed: int, rows: int, blocks: int, high: int) -> None:
    matrix = uneven(seed, rows, blocks)
    made = quantise_nvfp4(matrix, block_rows=high)

    scales = made.scales.repeat_interleave(high, 0)[:rows].repeat_interleave(16, 1)
    every = torch.cat([E2M1, -E2M1])
    nearest = ((matrix / scales).clamp(-6, 6)[..., None] - every).abs().amin(-1)
    assert torch.equal(((matrix / scales).clamp(-6, 6) - made.values).abs(), nearest)
    assert torch.isin(made.values.abs(), E2M1).all()
    assert made.scale.dtype == torch.float8_e4m3fn
    if matrix.any():  # the largest block's scale is E4M3's largest number
        assert made.scale.float().max() == 448


@pytest.mark.parametrize(
    ("number", "rounded"), [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]
)
def test_ties_go_to_the_even_number(number: float, rounded: float) -> None:
    row = torch.zeros(1, 16)
    row[0, :3] = torch.tensor([6.0, number, -number])

    assert quantise_nvfp4(row).values[0, 1:3].tolist() == [rounded, -rounded]


def test_stochastic_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    row = torch.linspace(-6, 6, 16).repeat(4000, 1)

    made = quantise_nvfp4(row, stochastic=True)

    assert torch.isin(made.values.abs(), E2M1).all()
    torch.testing.assert_close((made.values * made.scales).mean(0), row[0], atol=0.04, rtol=0)


def test_a_rotation_keeps_products_and_spreads_outliers() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(3, 40), torch.randn(5, 40)
    left[0, 7] = 100

    torch.testing.assert_close(rotated(left) @ rotated(right).t(), left @ right.t(), atol=1e-4, rtol=1e-5)
    assert rotated(left).abs().max() < 30


def test_fake_quantisation_passes_gradients_and_keeps_shape_and_dtype() -> None:
    weight = torch.randn(2, 3, 32, dtype=torch.bfloat16, requires_grad=True)
    rounded = fake_nvfp4(weight)
    rounded.sum().backward()

    assert (rounded.shape, rounded.dtype) == (weight.shape, weight.dtype)
    assert not torch.equal(rounded, weight)
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert torch.equal(fake_nvfp4(torch.zeros(1, 16)), torch.zeros(1, 16))
    assert not fake_nvfp4(torch.empty(0, 16)).numel()
    with pytest.raises(ValueError, match="multiple of 16 numbers, got 24"):
        fake_nvfp4(torch.ones(2, 24))
