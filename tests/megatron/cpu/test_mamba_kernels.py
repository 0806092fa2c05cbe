"""Convolution, scan and gate in one pass against the same from its parts, in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_ext.megatron.cpu import mamba_scan
from nemo_ext.megatron.cpu.mamba_convolution import causal_conv1d
from nemo_ext.megatron.cpu.mamba_kernels import split_convolution_scan
from nemo_ext.megatron.cpu.mamba_scan import ssd_chunk_scan

CHUNK = 16


@dataclass(frozen=True)
class Case:
    """Shapes and options of one comparison."""

    batch: int = 1
    length: int = 3 * CHUNK + 5
    heads: int = 4
    head_dim: int = 4
    groups: int = 2
    state: int = 5
    width: int = 4
    per_channel: bool = False
    gated: bool = True
    initial: bool = True
    starts: tuple[int, ...] = ()
    seed: int = 0

    def tensors(self) -> dict[str, Any]:
        """Float64 inputs, named as the arguments."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        inner = self.heads * self.head_dim
        channels = inner + 2 * self.groups * self.state
        features = channels + self.heads + (inner if self.gated else 0)
        tensors = {
            "projection": normal(self.batch, self.length, features),
            "weight": normal(channels, self.width),
            "bias": normal(channels),
            "dt_bias": normal(self.heads),
            "A": -normal(self.heads).exp(),
            "D": normal(self.heads, self.head_dim) if self.per_channel else normal(self.heads),
        }
        if self.initial:
            tensors["initial_states"] = normal(self.batch, self.heads, self.head_dim, self.state)
        return tensors

    def options(self) -> dict[str, Any]:
        """The other arguments; sequences start at `starts` modulo the length, in each batch row alike."""
        change = torch.zeros(self.batch, self.length, dtype=torch.int32)
        for start in self.starts:
            change[:, start % self.length] = 1
        return {
            "head_dim": self.head_dim,
            "groups": self.groups,
            "gated": self.gated,
            "seq_idx": change.cumsum(1) if self.starts else None,
        }


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "output") -> None:
    """Compares to `tolerance` of the largest expected value (or of 1, where that is smaller)."""
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{name}: off by {error:.2e}"


def gradients_of(
    function: Callable[..., Any], tensors: dict[str, Any], **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, final state and the gradients of a fixed random projection of both."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    out, state = function(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, state)]
    (out * weights[0].to(out.dtype)).sum().add((state * weights[1].to(state.dtype)).sum()).backward()
    return (
        out.detach(),
        state.detach(),
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
    )


def from_parts(
    projection: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    head_dim: int,
    groups: int,
    gated: bool,
    seq_idx: Tensor | None,
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same from the convolution and the scan, each tested against its definition on its own."""
    heads = A.shape[0]
    inner, channels = heads * head_dim, weight.shape[0]
    grouped = (channels - inner) // 2
    xbc, dt = projection[..., -channels - heads : -heads], projection[..., -heads:]
    convolved = causal_conv1d(xbc, weight, bias, activation="silu", seq_idx=seq_idx)
    x, B, C = convolved.split((inner, grouped, grouped), dim=-1)
    out, state = ssd_chunk_scan(
        x.unflatten(-1, (heads, head_dim)),
        dt,
        A,
        B.unflatten(-1, (groups, -1)),
        C.unflatten(-1, (groups, -1)),
        chunk_size=7,
        D=D,
        z=projection[..., :inner].unflatten(-1, (heads, head_dim)) if gated else None,
        dt_bias=dt_bias,
        dt_softplus=True,
        seq_idx=seq_idx,
        initial_states=initial_states,
        return_final_states=True,
    )
    return out.flatten(2), state


def assert_equals_parts(case: Case, chunk_size: int = CHUNK) -> None:
    expected, expected_state, expected_gradients = gradients_of(from_parts, case.tensors(), **case.options())
    out, state, gradients = gradients_of(
        split_convolution_scan,
        {name: tensor.float() for name, tensor in case.tensors().items()},
        chunk_size=chunk_size,
        **case.options(),
    )
    assert_close(out, expected, 1e-5)
    assert_close(state, expected_state, 1e-5, "final state")
    assert set(gradients) == set(case.tensors())
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], 1e-4, f"gradient of {name}")


def saved_bytes(function: Callable[[], object]) -> int:
    """Bytes of the distinct storages that autograd keeps for backward."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = function()
    assert kept is not None
    return sum(storages.values())


@pytest.fixture(params=[1, 1 << 18], ids=["one chunk a segment", "all chunks in a segment"])
def segment_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(mamba_scan, "SEGMENT_ELEMENTS_CPU", request.param)
    return request.param


@pytest.mark.usefixtures("segment_elements")
@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 2, 3 * CHUNK + 9])
@pytest.mark.parametrize("gated", [True, False])
def test_split_of_any_length(length: int, gated: bool) -> None:
    assert_equals_parts(Case(length=length, batch=2, gated=gated))


@pytest.mark.usefixtures("segment_elements")
@pytest.mark.parametrize("starts", [(1, 2), (CHUNK,), (CHUNK - 1, CHUNK + 1), (CHUNK + 2, 2 * CHUNK)])
def test_split_with_sequences_starting_anywhere(starts: tuple[int, ...]) -> None:
    assert_equals_parts(Case(starts=starts, initial=False))


@pytest.mark.usefixtures("segment_elements")
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_split_by_segments_shorter_than_the_convolution(chunk_size: int) -> None:
    assert_equals_parts(Case(length=11, starts=(6,)), chunk_size)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.integers(1, 3))
    return Case(
        batch=draw(st.integers(1, 2)),
        length=draw(st.integers(1, 70)),
        heads=groups * draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 5)),
        groups=groups,
        state=draw(st.integers(1, 5)),
        width=draw(st.integers(1, 6)),
        per_channel=draw(st.booleans()),
        gated=draw(st.booleans()),
        initial=draw(st.booleans()),
        starts=tuple(draw(st.lists(st.integers(0, 69), max_size=5))),
        seed=draw(st.integers(0, 10_000)),
    )


@given(cases(), st.sampled_from([1, 2, 7, 16, 128]))
def test_split_of_any_shape(case: Case, chunk_size: int) -> None:
    assert_equals_parts(case, chunk_size)


def test_split_gradcheck() -> None:
    case = Case(length=6, heads=2, head_dim=2, groups=1, state=2, starts=(2,))
    tensors = {name: tensor.requires_grad_() for name, tensor in case.tensors().items()}

    def split(*values: Tensor) -> tuple[Tensor, Tensor]:
        return split_convolution_scan(**dict(zip(tensors, values, strict=True)), chunk_size=3, **case.options())

    assert torch.autograd.gradcheck(split, tuple(tensors.values()))


def test_split_in_bfloat16() -> None:
    case = Case(length=100, initial=False)
    tensors = {name: tensor.bfloat16() for name, tensor in case.tensors().items()}
    exact, _, exact_gradients = gradients_of(
        split_convolution_scan,
        {name: tensor.float() for name, tensor in tensors.items()},
        chunk_size=CHUNK,
        **case.options(),
    )

    out, _, gradients = gradients_of(split_convolution_scan, tensors, chunk_size=CHUNK, **case.options())

    assert out.dtype == torch.bfloat16
    assert_close(out, exact, 2**-8)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.bfloat16
        assert_close(gradient, exact_gradients[name], 2**-6, f"gradient of {name}")


def test_split_chooses_its_own_dtypes_under_autocast() -> None:
    case = Case(initial=False)
    tensors = {name: tensor.float() for name, tensor in case.tensors().items()}
    expected, _, expected_gradients = gradients_of(split_convolution_scan, tensors, chunk_size=CHUNK, **case.options())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _, gradients = gradients_of(split_convolution_scan, tensors, chunk_size=CHUNK, **case.options())

    assert torch.equal(out, expected)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected_gradients[name]), name


def test_split_keeps_little_for_backward() -> None:
    case = Case(length=2048, heads=8, head_dim=16, state=16, initial=False)
    tensors = {name: tensor.float().requires_grad_() for name, tensor in case.tensors().items()}
    projection = tensors["projection"].numel() * 4
    inner = 2048 * 8 * 16 * 4

    kept = saved_bytes(lambda: split_convolution_scan(**tensors, chunk_size=128, **case.options()))

    # The projection, the result before the gate, and a tenth for states and parameters.
    assert kept < 1.1 * (projection + inner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 3}, "groups that divide the heads"),
        ({"projection": torch.zeros(1, 53, 9)}, "projection has shape"),
        ({"A": torch.zeros(5)}, "A has shape"),
        ({"D": torch.zeros(4, 3)}, "D has shape"),
        ({"bias": torch.zeros(1)}, "conv bias has shape"),
        ({"seq_idx": torch.zeros(1, 3)}, "seq_idx has shape"),
        ({"activation": "gelu"}, "activation is 'gelu'"),
    ],
)
def test_split_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**Case().tensors(), **Case().options(), "chunk_size": CHUNK}
    with pytest.raises(ValueError, match=message):
        split_convolution_scan(**(arguments | change))
