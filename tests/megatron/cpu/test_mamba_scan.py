"""Mamba-2's scan by chunks against its definition, one token at a time in float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nemo_ext.megatron.cpu import mamba_scan
from nemo_ext.megatron.cpu.mamba_scan import ssd_chunk_scan

CHUNK = 16
OUTPUT_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba-2's definition, token by token (Dao & Gu 2024, equation 1 after discretisation)."""
    batch, length, heads, head_dim = x.shape
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)
    repeats = heads // B.shape[2]
    B, C = B.repeat_interleave(repeats, dim=2), C.repeat_interleave(repeats, dim=2)
    state = x.new_zeros(batch, heads, head_dim, B.shape[3]) if initial_states is None else initial_states
    outputs = []
    for t in range(length):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + x * (D[:, None] if D.dim() == 1 else D)
    return (y if z is None else y * F.silu(z)), state


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, name: str = "output") -> None:
    """Compares to `tolerance` of the largest expected value (or of 1, where that is smaller)."""
    assert torch.isfinite(actual).all(), f"{name} is not finite"
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), f"{name}: off by {error:.2e}"


@dataclass(frozen=True)
class Case:
    """Shapes and options of one comparison."""

    batch: int = 1
    length: int = 3 * CHUNK + 5
    heads: int = 4
    head_dim: int = 4
    groups: int = 2
    state: int = 5
    chunk_size: int = CHUNK
    skip: str | None = "per_head"
    gate: bool = True
    softplus: bool = True
    initial: bool = True
    starts: tuple[int, ...] = ()
    seed: int = 0

    def tensors(self) -> dict[str, Any]:
        """Float64 inputs for `recurrence` and `ssd_chunk_scan`."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x_shape = (self.batch, self.length, self.heads, self.head_dim)
        grouped = (self.batch, self.length, self.groups, self.state)
        tensors = {
            "x": normal(*x_shape),
            "dt": normal(*x_shape[:3]) if self.softplus else normal(*x_shape[:3]).abs() * 0.3,
            "A": -normal(self.heads).exp(),
            "B": normal(*grouped),
            "C": normal(*grouped),
        }
        if self.skip is not None:
            tensors["D"] = normal(self.heads) if self.skip == "per_head" else normal(self.heads, self.head_dim)
        if self.gate:
            tensors["z"] = normal(*x_shape)
        if self.softplus:
            tensors["dt_bias"] = normal(self.heads)
        if self.initial:
            tensors["initial_states"] = normal(self.batch, self.heads, self.head_dim, self.state)
        return tensors

    def seq_idx(self) -> Tensor | None:
        """Sequence numbers, the same for each batch row; `starts` taken modulo the length."""
        if not self.starts:
            return None
        change = torch.zeros(self.length, dtype=torch.int32)
        for start in self.starts:
            change[start % self.length] = 1
        return change.cumsum(0, dtype=torch.int32).expand(self.batch, -1)


def gradients_of(
    function: Callable[..., Any], tensors: dict[str, Any], **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, final state and the gradients of a fixed random projection of both."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    out, state = function(**leaves, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (out, state)]
    (out * weights[0].to(out.dtype)).sum().add((state * weights[1].to(state.dtype)).sum()).backward()
    return (out.detach(), state.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None})


def assert_scan_equals_recurrence(case: Case) -> None:
    tensors = case.tensors()
    options: dict[str, Any] = {"seq_idx": case.seq_idx(), "dt_softplus": case.softplus}
    expected, expected_state, expected_gradients = gradients_of(recurrence, tensors, **options)
    out, state, gradients = gradients_of(
        ssd_chunk_scan,
        {name: tensor.float() for name, tensor in tensors.items()},
        chunk_size=case.chunk_size,
        return_final_states=True,
        **options,
    )
    assert out.dtype == state.dtype == torch.float32
    assert_close(out, expected, OUTPUT_TOLERANCE)
    assert_close(state, expected_state, OUTPUT_TOLERANCE, "final state")
    assert set(gradients) == set(tensors)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], GRADIENT_TOLERANCE, f"gradient of {name}")


@pytest.fixture(params=[1, 1 << 18], ids=["one chunk a segment", "all chunks in a segment"])
def segment_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(mamba_scan, "SEGMENT_ELEMENTS_CPU", request.param)
    return request.param


@pytest.mark.usefixtures("segment_elements")
@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 3, 201])
def test_any_length(length: int) -> None:
    assert_scan_equals_recurrence(Case(length=length))


@pytest.mark.usefixtures("segment_elements")
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_any_grouping_of_heads(groups: int) -> None:
    assert_scan_equals_recurrence(Case(heads=6, groups=groups, batch=2))


@pytest.mark.usefixtures("segment_elements")
@pytest.mark.parametrize("starts", [(1,), (CHUNK,), (CHUNK - 1, CHUNK), (5, 6, 7, 40), (2 * CHUNK, 3 * CHUNK), (52,)])
def test_sequence_starts_anywhere(starts: tuple[int, ...]) -> None:
    assert_scan_equals_recurrence(Case(starts=starts, batch=2))


def test_chunks_longer_than_a_block() -> None:
    assert_scan_equals_recurrence(Case(length=2 * mamba_scan.BLOCK_LENGTH + 7, chunk_size=128))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    groups = draw(st.integers(1, 3))
    return Case(
        batch=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 70)),
        heads=groups * draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 6)),
        groups=groups,
        state=draw(st.integers(1, 7)),
        chunk_size=draw(st.sampled_from([1, 2, 7, 16, 64, 128])),
        skip=draw(st.sampled_from([None, "per_head", "per_channel"])),
        gate=draw(st.booleans()),
        softplus=draw(st.booleans()),
        initial=draw(st.booleans()),
        starts=tuple(draw(st.lists(st.integers(0, 69), max_size=5))),
        seed=draw(st.integers(0, 10_000)),
    )


@given(cases())
def test_any_shape_and_option(case: Case) -> None:
    assert_scan_equals_recurrence(case)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 10_000))
def test_packed_sequences_do_not_see_each_other(lengths: list[int], seed: int) -> None:
    case = Case(length=sum(lengths), initial=False, seed=seed)
    inputs = {name: tensor.float() for name, tensor in case.tensors().items()}
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    by_token = ("x", "dt", "B", "C", "z")
    options = {"chunk_size": CHUNK, "dt_softplus": True}
    packed = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    weights = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(2))
    out = ssd_chunk_scan(**packed, seq_idx=seq_idx, **options)
    gradients = torch.autograd.grad((out * weights).sum(), [packed[name] for name in by_token])

    start = 0
    for length in lengths:
        span = slice(start, start + length)
        alone = {
            name: tensor.detach()[:, span].requires_grad_() if name in by_token else tensor.detach()
            for name, tensor in inputs.items()
        }
        out_alone = ssd_chunk_scan(**alone, **options)
        expected = torch.autograd.grad((out_alone * weights[:, span]).sum(), [alone[name] for name in by_token])
        assert_close(out[:, span], out_alone, OUTPUT_TOLERANCE)
        for name, gradient, gradient_alone in zip(by_token, gradients, expected, strict=True):
            assert_close(gradient[:, span], gradient_alone, GRADIENT_TOLERANCE, f"gradient of {name}")
        start += length


def test_a_returning_sequence_index_is_a_new_sequence() -> None:
    tensors = Case(length=12, initial=False, softplus=False).tensors()
    returning = torch.tensor([[0] * 4 + [1] * 4 + [0] * 4])
    rising = torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])

    out = ssd_chunk_scan(**tensors, chunk_size=CHUNK, seq_idx=returning)

    assert torch.equal(out, ssd_chunk_scan(**tensors, chunk_size=CHUNK, seq_idx=rising))


def test_final_state_continues_the_sequence() -> None:
    tensors = Case(length=50, softplus=False).tensors()
    whole, last = ssd_chunk_scan(**tensors, chunk_size=CHUNK, return_final_states=True)
    halves = [
        {name: t[:, span] if name in ("x", "dt", "B", "C", "z") else t for name, t in tensors.items()}
        for span in (slice(0, 23), slice(23, 50))
    ]

    first, state = ssd_chunk_scan(**halves[0], chunk_size=CHUNK, return_final_states=True)
    second, state = ssd_chunk_scan(
        **(halves[1] | {"initial_states": state}), chunk_size=CHUNK, return_final_states=True
    )

    assert_close(torch.cat([first, second], dim=1), whole, 1e-12)
    assert_close(state, last, 1e-12)


@pytest.mark.parametrize("dt_scale", [0.0, 30.0, 1e4])
def test_decay_to_nothing_is_finite(dt_scale: float) -> None:
    tensors = Case(length=70, softplus=False, starts=()).tensors()
    tensors["dt"] = tensors["dt"] * dt_scale
    tensors["A"] = torch.full_like(tensors["A"], -16.0)
    expected, expected_state, expected_gradients = gradients_of(recurrence, tensors)

    out, state, gradients = gradients_of(
        ssd_chunk_scan,
        {name: tensor.float() for name, tensor in tensors.items()},
        chunk_size=64,
        return_final_states=True,
    )

    assert_close(out, expected, OUTPUT_TOLERANCE)
    assert_close(state, expected_state, OUTPUT_TOLERANCE)
    for name, gradient in gradients.items():
        assert_close(gradient, expected_gradients[name], GRADIENT_TOLERANCE, f"gradient of {name}")


def test_dt_limit_bounds_dt() -> None:
    tensors = Case(length=40).tensors()
    options: dict[str, Any] = {"dt_softplus": True, "dt_limit": (0.3, 0.9)}
    expected, _, expected_gradients = gradients_of(recurrence, tensors, **options)

    out, _, gradients = gradients_of(ssd_chunk_scan, tensors, chunk_size=CHUNK, return_final_states=True, **options)

    assert_close(out, expected, 1e-12)
    assert_close(gradients["dt"], expected_gradients["dt"], 1e-12)


def test_scan_gradcheck() -> None:
    case = Case(length=7, heads=2, head_dim=2, groups=1, state=2, starts=(3,))
    tensors = {name: tensor.requires_grad_() for name, tensor in case.tensors().items()}

    def scan(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(tensors, values, strict=True))
        result = ssd_chunk_scan(
            **named, chunk_size=3, seq_idx=case.seq_idx(), dt_softplus=True, return_final_states=True
        )
        return result[0], result[1]

    assert torch.autograd.gradcheck(scan, tuple(tensors.values()))


def test_bfloat16_is_as_good_as_its_inputs() -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in Case(length=100).tensors().items()}
    options: dict[str, Any] = {"chunk_size": CHUNK, "dt_softplus": True, "return_final_states": True}
    exact, _, exact_gradients = gradients_of(
        ssd_chunk_scan, {name: tensor.float() for name, tensor in tensors.items()}, **options
    )

    out, _, gradients = gradients_of(ssd_chunk_scan, tensors, **options)

    assert out.dtype == torch.bfloat16
    assert_close(out, exact, 2**-8)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.bfloat16
        assert_close(gradient, exact_gradients[name], 2**-6, f"gradient of {name}")


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


def test_memory_is_linear_in_length() -> None:
    def at(length: int) -> int:
        case = Case(length=length, heads=8, head_dim=16, state=16, initial=False)
        tensors = {name: tensor.float().requires_grad_() for name, tensor in case.tensors().items()}
        return saved_bytes(lambda: ssd_chunk_scan(**tensors, chunk_size=128, dt_softplus=True))

    short, long = at(1024), at(2048)

    assert long <= 2.1 * short
    # The matrices inside the chunks alone would be length * heads * chunk * 4 bytes.
    assert long < 2048 * 8 * mamba_scan.BLOCK_LENGTH * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(1, 0, 4, 4)}, "length >= 1"),
        ({"dt": torch.zeros(1, 5, 4)}, "dt has shape"),
        ({"C": torch.zeros(1, 53, 1, 5)}, "C has shape"),
        ({"B": torch.zeros(1, 53, 3, 5)}, "3 groups"),
        ({"D": torch.zeros(5)}, "D has shape"),
        ({"initial_states": torch.zeros(1, 4, 5, 4)}, "initial_states has shape"),
        ({"seq_idx": torch.zeros(53, dtype=torch.int32)}, "seq_idx has shape"),
        ({"chunk_size": 0}, "chunk_size must be at least 1, not 0"),
    ],
)
def test_scan_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {**Case().tensors(), "chunk_size": CHUNK} | change
    with pytest.raises(ValueError, match=message):
        ssd_chunk_scan(**arguments)
