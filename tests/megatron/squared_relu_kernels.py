"""The squared ReLU kernels against torch, run by test_squared_relu.py in a process of its own: Triton decides at its
import whether its interpreter runs them (on the CPU) or they are compiled (on CUDA)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_ext.megatron import squared_relu_kernels as kernels
from nemo_ext.megatron.squared_relu import FP8_CAPABILITY, squared_relu, squared_relu_to_fp8

DEVICE = "cpu" if kernels.INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 6e-8, 1.5, -1.5, 250.0, 3e38, -3e38]


def unfused(x: Tensor) -> Tensor:
    """Megatron's function, not compiled."""
    return torch.pow(torch.relu(x), 2)


def stored(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in fp32 as a kernel stores them."""
    if kernels.INTERPRETED and dtype == torch.bfloat16:
        # Triton 3.9's interpreter cuts bf16 off, where a GPU rounds it (cvt.rn, which test_squared_relu.py looks for).
        return torch.where(exact.isnan(), exact, (exact.view(torch.int32) & ~0xFFFF).view(torch.float32)).to(dtype)
    return exact.to(dtype)


def in_fp32(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient, computed in fp32 and stored once."""
    return tuple(stored(exact, x.dtype) for exact in both_ways(unfused, x.float(), grad.float()))  # type: ignore[return-value]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def both_ways(function, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of x."""
    leaf = x.detach().clone().requires_grad_()
    y = function(leaf)
    y.backward(grad)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal, signs of zeros too, and the same ones are NaN."""
    whole = torch.int32 if one.dtype == torch.float32 else torch.int16
    numbers = ~one.isnan()
    bits = [torch.where(numbers, each.view(whole), torch.zeros_like(each, dtype=whole)) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(one.isnan(), other.isnan()) and torch.equal(*bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7, 1, 5), (3, 70_001), (2, 0)])
def test_output_and_gradient_are_those_of_fp32_stored_once(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, grad = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)

    ours = both_ways(squared_relu, x, grad)

    assert ours[0].shape == x.shape
    assert all(same_bits(*pair) for pair in zip(ours, in_fp32(x, grad), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_are_those_of_torch(dtype: torch.dtype) -> None:
    x, grad = random(70_001, dtype=dtype), random(70_001, dtype=dtype, seed=1)

    theirs = both_ways(unfused, x, grad)

    exact = both_ways(unfused, x.float(), grad.float())
    assert all(same_bits(one, other.to(dtype)) for one, other in zip(theirs, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_numbers_are_treated_as_torch_does(dtype: torch.dtype) -> None:
    # Every special number of x with every one of the gradient.
    x, grad = (t.flatten().to(DEVICE, dtype) for t in torch.meshgrid(*[torch.tensor(SPECIAL)] * 2, indexing="ij"))

    ours = both_ways(squared_relu, x, grad)

    assert all(same_bits(*pair) for pair in zip(ours, in_fp32(x, grad), strict=True))
    theirs = both_ways(unfused, x, grad)
    assert all(
        same_bits(one, other.to(dtype))
        for one, other in zip(theirs, both_ways(unfused, x.float(), grad.float()), strict=True)
    )


def test_a_gradient_in_fp16_does_not_overflow_on_the_way() -> None:
    x, grad = torch.tensor([4e4], dtype=torch.float16), torch.tensor([1e-3], dtype=torch.float16)

    _, ours = both_ways(squared_relu, x.to(DEVICE), grad.to(DEVICE))
    _, theirs = both_ways(unfused, x.to(DEVICE), grad.to(DEVICE))

    assert ours.item() == pytest.approx(80.0, rel=1e-2)
    assert theirs.isinf()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0, 99), st.booleans())
def test_any_shape_and_layout(shape: list[int], dtype: torch.dtype, seed: int, transposed: bool) -> None:
    x, grad = random(*shape, dtype=dtype, seed=seed), random(*shape, dtype=dtype, seed=seed + 1)
    if transposed:
        x, grad = x.transpose(0, -1), grad.transpose(0, -1)

    ours = both_ways(squared_relu, x, grad)

    assert all(same_bits(*pair) for pair in zip(ours, in_fp32(x, grad), strict=True))


def test_an_expanded_gradient() -> None:
    x = random(5, 3).requires_grad_()

    squared_relu(x).sum().backward()

    assert torch.equal(x.grad, 2 * torch.relu(x.detach()))


def fp8_runs_here() -> bool:
    return kernels.INTERPRETED or torch.cuda.get_device_capability() >= FP8_CAPABILITY


def test_fp8_runs_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    whole = kernels.to_fp8
    monkeypatch.setattr(kernels, "to_fp8", lambda *arguments: calls.append(1) or whole(*arguments))

    squared_relu_to_fp8(random(3), 1.0)

    assert len(calls) == fp8_runs_here()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.05, 1.0, 7.3])
def test_fp8_is_rounded_once_saturates_and_brings_the_largest_output(dtype: torch.dtype, scale: float) -> None:
    x = random(70_001, 2, dtype=dtype)

    values, amax = squared_relu_to_fp8(x, torch.tensor([scale], device=DEVICE))

    exact = torch.relu(x.float()) ** 2
    wanted = (exact * scale).clamp(max=448.0).to(torch.float8_e4m3fn).float()
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape
    assert amax.item() == exact.max().item() and amax.dtype == torch.float32
    compared = torch.ones_like(wanted, dtype=torch.bool)
    if kernels.INTERPRETED:
        # Triton 3.9's interpreter loses the carry where rounding reaches the next power of two, cuts subnormals and
        # rounds halves up.
        carries = (torch.frexp(wanted)[0] == 0.5) & (wanted != exact * scale)
        halves = (exact * scale).view(torch.int32) & 0xFFFFF == 0x80000
        compared = ~carries & ~halves & (wanted >= 2.0**-6) | (exact == 0)
        assert compared.float().mean() > 0.85
    assert torch.equal(values.float()[compared], wanted[compared])
    if scale == 7.3:
        assert (wanted == 448).any()


def test_fp8_has_broken_numbers_in_its_measure() -> None:
    x = torch.tensor([1.0, float("nan"), -2.0], device=DEVICE)

    values, amax = squared_relu_to_fp8(x, 1.0)

    assert amax.isinf() and values[0].float() == 1 and values[2].float() == 0
    if not kernels.INTERPRETED:  # the interpreter makes 384 of a NaN
        assert values[1].float().isnan()


def test_fp8_takes_infinity_to_its_largest_number() -> None:
    values, amax = squared_relu_to_fp8(torch.tensor([float("inf"), 3e38], device=DEVICE), 0.5)

    assert values.float().tolist() == [448.0, 448.0] and amax.isinf()


@pytest.mark.skipif(DEVICE == "cpu", reason="torch.compile cannot trace Triton's interpreter: needs a CUDA device")
def test_it_compiles_without_a_break() -> None:
    x, grad = random(64, 256, dtype=torch.bfloat16), random(64, 256, dtype=torch.bfloat16, seed=1)
    compiled = torch.compile(lambda t: squared_relu(t + 1.0), fullgraph=True)

    ours, theirs = both_ways(compiled, x, grad), both_ways(lambda t: unfused(t + 1.0), x, grad)

    assert all(same_bits(*pair) for pair in zip(ours, theirs, strict=True))
