"""FP8 products in torch, and a plan on Megatron's linear layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.precision_plan import Plan, assigned
from nemo_ext.job.config import compose
from nemo_ext.megatron.float8 import (
    E4M3,
    E5M2,
    NVFP4,
    NVFP4_STORED,
    SCALINGS,
    Scaling,
    float8_linear,
    product,
    quantise,
    rounded_linear,
)
from nemo_ext.megatron.fp8 import Precision
from nemo_ext.megatron.nvfp4 import fake_nvfp4, quantise_nvfp4

BLOCKS = st.sampled_from([None, (1, 4), (4, 4), (2, 3), (1, 128)])
SIZES = st.integers(1, 40)


@pytest.fixture(autouse=True, scope="module")
def imported(megatron: None) -> None:
    """Modules that import Megatron, which takes seconds: imported when tests run, not during collection."""
    global Float8Product, in_float8, use_float8
    from nemo_ext.megatron.float8_modules import Float8Product, in_float8, use_float8


def matrix(seed: int, rows: int, columns: int) -> torch.Tensor:
    """A matrix with rows and columns of very different magnitudes, and zeros."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 12, (rows, 1), generator=random).float())
    return sizes * torch.randn(rows, columns, generator=random) * (torch.rand(rows, columns, generator=random) < 0.8)


@given(st.integers(0, 999), SIZES, SIZES, BLOCKS, st.sampled_from([E4M3, E5M2]), st.booleans())
def test_every_number_is_rounded_at_its_blocks_scale(
    seed: int, rows: int, columns: int, block: tuple[int, int] | None, dtype: torch.dtype, power_of_two: bool
) -> None:
    given = matrix(seed, rows, columns)
    made = quantise(given, block, dtype=dtype, power_of_two=power_of_two)
    found = made.dequantised(torch.float32)

    high, wide = block or given.shape
    info = torch.finfo(dtype)
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            here = (slice(top, top + high), slice(left, left + wide))
            largest = given[here].abs().max()
            # Half a step of the mantissa, or of the smallest normal float8 number.
            bound = torch.maximum(
                given[here].abs() * info.eps / 2, largest / info.max * info.smallest_normal * info.eps
            )
            assert (found[here] - given[here]).abs().le(bound * (2.01 if power_of_two else 1.01)).all()
            assert found[here].abs().max() <= largest * (1 + info.eps)
    if power_of_two:
        assert (torch.log2(made.scale) % 1 == 0).all()
    elif block is None:
        assert torch.equal(found.abs().max(), given.abs().max()) or found.abs().max() == pytest.approx(
            given.abs().max().item(), rel=1e-6
        )


@given(st.integers(0, 999), SIZES, SIZES, SIZES)
def test_the_product_of_float8_matrices_is_that_of_their_dequantized_values(
    seed: int, rows: int, inner: int, columns: int
) -> None:
    left, right = quantise(matrix(seed, rows, inner)), quantise(matrix(seed + 1, columns, inner))
    first, second = (each.dequantised(torch.float64) for each in (left, right))

    found = product(left, right, torch.float32)

    assert found.shape == (rows, columns)
    # Terms may cancel: what sums in FP32 lose is by the size of their terms.
    assert ((found.double() - first @ second.T).abs() <= 4e-6 * (first.abs() @ second.abs().T)).all()


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_map_and_its_gradients_are_near_those_without_fp8(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 50, 100, dtype=dtype, requires_grad=True)
    weight = torch.randn(36, 100, dtype=dtype, requires_grad=True)
    gradient = torch.randn(3, 50, 36, dtype=dtype)

    found = float8_linear(inputs, weight, SCALINGS[name], gradients=E5M2)
    exact = inputs @ weight.t()

    pairs = [(found, exact)]
    pairs += zip(
        torch.autograd.grad(found, (inputs, weight), gradient),
        torch.autograd.grad(exact, (inputs, weight), gradient),
        strict=True,
    )
    for got, wanted in pairs:
        assert got.dtype == dtype
        error = ((got - wanted).float().norm() / wanted.float().norm()).item()
        assert 0.01 < error < 0.08


def nvfp4_errors(scaling: Scaling) -> list[float]:
    """Relative errors of a product and its gradients by the inputs and the weight."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(50, 96, requires_grad=True), torch.randn(32, 96, requires_grad=True)
    gradient = torch.randn(50, 32)
    found, exact = float8_linear(inputs, weight, scaling), inputs @ weight.t()
    pairs = [(found, exact)]
    pairs += zip(*(torch.autograd.grad(each, (inputs, weight), gradient) for each in (found, exact)), strict=True)
    return [((got - wanted).norm() / wanted.norm()).item() for got, wanted in pairs]


def test_nvfp4_rounds_both_matrices_or_only_the_weight() -> None:
    assert all(0.08 < error < 0.25 for error in nvfp4_errors(NVFP4["w4a4"]))

    output, by_inputs, by_weight = nvfp4_errors(NVFP4["w4a16"])
    assert 0.05 < output < 0.12
    assert 0.05 < by_inputs < 0.12
    assert by_weight < 1e-6


def test_nvfp4_gradients_are_right_on_average() -> None:
    """Stochastic rounding has no bias: the mean over many steps approaches the products of the rounded matrices."""
    torch.manual_seed(0)
    inputs, weight = torch.randn(32, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    gradient, sums = torch.randn(32, 16), torch.zeros(32, 32)
    for _ in range(400):
        sums += torch.autograd.grad(float8_linear(inputs, weight, NVFP4["w4a4"]), inputs, gradient)[0]
    low = quantise_nvfp4(weight.detach(), block_rows=16)
    rounded = low.values * low.scales.repeat_interleave(16, 0).repeat_interleave(16, 1)

    assert (sums / 400 - gradient @ rounded).norm() / (gradient @ rounded).norm() < 0.02


def test_smaller_blocks_are_more_exact_for_uneven_numbers() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 256)
    inputs[0, 0] = 1e5  # beside which all others vanish in a scale for the whole tensor
    weight = torch.randn(32, 256)

    def error(name: str) -> float:
        found, exact = float8_linear(inputs, weight, SCALINGS[name]), inputs @ weight.t()
        return float((found - exact)[1:].norm() / exact[1:].norm())

    assert error("mxfp8") <= error("blockwise") < 0.1 < error("tensorwise")


@pytest.mark.parametrize("scaling", [SCALINGS["tensorwise"], SCALINGS["mxfp8"], *NVFP4_STORED.values()])
def test_gradients_pass_through_rounding(scaling: Scaling) -> None:
    """Those of the product of rounded matrices, with respect to the matrices before rounding."""
    inputs, weight = (torch.randn(rows, 64).requires_grad_() for rows in (6, 32))
    slope = torch.randn(6, 32)

    found = rounded_linear(inputs.view(2, 3, 64), weight, scaling)
    gradients = torch.autograd.grad((found.view(6, 32) * slope).sum(), (inputs, weight))

    def rounded(matrix: torch.Tensor, block: Any) -> torch.Tensor:
        if scaling.nvfp4:
            return fake_nvfp4(matrix.detach())
        return quantise(matrix.detach(), block, power_of_two=scaling.power_of_two).dequantised(torch.float32)

    low = rounded(inputs, scaling.activation) if scaling.inputs else inputs.detach(), rounded(weight, scaling.weight)
    assert not torch.equal(low[1], weight)
    torch.testing.assert_close(found.view(6, 32), low[0] @ low[1].T)
    torch.testing.assert_close(gradients[0], slope @ low[1])
    torch.testing.assert_close(gradients[1], slope.T @ low[0])


@pytest.mark.slow
def test_shards_have_the_scale_of_the_whole_matrix(
    train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    words = ["precision=fp32", "train.tokens=1024", "model=olmo1_tiny"]
    train_ranks(tmp_path / "start", *words)
    words.append(f"megatron.pretrained_checkpoint={tmp_path / 'start' / 'checkpoints'}")
    words.append("train.quantization_aware=true")
    words.append('precision_plan={default: nvfp4, recipe: tensorwise, rules: ["*.proj fp8", "-.fc2 fp8"]}')

    one = train_ranks(tmp_path / "one", *words)
    two = train_ranks(tmp_path / "two", *words, "megatron.tensor_model_parallel_size=2", ranks=2)

    # With a scale of each shard, the losses differ by 1.4e-4.
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=2e-5)


def test_an_expert_without_tokens_gets_no_gradient() -> None:
    weight = torch.randn(4, 8, requires_grad=True)
    float8_linear(torch.empty(0, 8), weight, SCALINGS["tensorwise"]).sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_single_token_has_no_other_dimensions() -> None:
    inputs, weight = torch.randn(8), torch.randn(4, 8)
    found = float8_linear(inputs, weight, SCALINGS["tensorwise"])
    assert torch.equal(found, float8_linear(inputs[None], weight, SCALINGS["tensorwise"])[0])


RULES = st.lists(
    st.sampled_from(
        [
            *("* bf16", "M>* bf16", "first 2 bf16", "1,3 bf16", "1,3 fp8", "head bf16", "M.in_proj bf16", ".fc1 fp8"),
            *(".latent_fc1 fp8", "E.latent_fc2 fp8"),
        ]
    ),
    max_size=4,
)


@pytest.mark.parametrize(
    "words",
    [
        *(("model=nemotron3_nano_tiny",), ("model=domyn_small_tiny",), ("model=llama_nemotron_tiny",)),
        ("model=olmo3_tiny",),
        ("model=nemotron3_nano_tiny", "model.pattern='ME{latent=64}*E{latent=32}E-'"),
    ],
)
def test_layers_selected_by_the_plan_are_in_fp8(words: tuple[str, ...], build: Callable[..., Any]) -> None:
    sizes = Architecture.from_config(compose("describe", list(words)))
    made = build(*words, "precision=fp32")

    @given(RULES, st.sampled_from(["fp8", "bf16"]))
    def matches(rules: list[str], default: str) -> None:
        plan = Plan.from_config({"default": default, "rules": rules})
        wanted = sum(each.weight.parameters for each in assigned(plan, sizes) if each.precision == "fp8")
        with in_float8(made, Precision(plan, sizes)):
            low = [m for m in made.modules() if isinstance(m.__dict__.get("_forward_impl"), Float8Product)]
            # The tiny models' vocabularies need no padding.
            assert sum(module.weight.numel() for module in low) == wanted
        assert not any("_forward_impl" in module.__dict__ for module in made.modules())

    matches()


def test_prediction_depths_stay_in_bf16_and_parts_have_their_precision(build: Callable[..., Any]) -> None:
    words = ("model=nemotron3_super_tiny", "model.pattern=ME*/*E/*E")
    sizes = Architecture.from_config(compose("describe", list(words)))
    made = build(*words, "precision=fp32")
    plan = Plan.from_config({"default": "nvfp4", "recipe": "mxfp8", "rules": ["head bf16", "* bf16", "M.out_proj fp8"]})

    with in_float8(made, Precision(plan, sizes)):
        low = {name: m.__dict__["_forward_impl"] for name, m in made.named_modules() if "_forward_impl" in m.__dict__}

    experts = [f"1.mlp.experts.local_experts.{n}.linear_fc{way}" for n in range(8) for way in (1, 2)]
    others = ["0.mixer.in_proj", "1.mlp.shared_experts.linear_fc1", "1.mlp.shared_experts.linear_fc2"]
    nvfp4 = {name for name, product in low.items() if product.scaling.nvfp4}
    assert nvfp4 == {f"decoder.layers.{name}" for name in (*experts, *others)}
    assert low.keys() - nvfp4 == {"decoder.layers.0.mixer.out_proj"}


def test_a_weight_that_is_in_no_linear_layer_is_refused(build: Callable[..., Any]) -> None:
    sizes = Architecture.from_config(compose("describe", ["model=nemotron3_nano_tiny"]))
    made = build("model=nemotron3_nano_tiny", "precision=fp32")
    del made.decoder.layers[1].mlp.experts.local_experts

    with pytest.raises(
        ValueError, match=r"block 1 fc1 to fp8, but it is not in one of .*megatron\.moe_grouped_gemm=false"
    ):
        use_float8(made, Precision(Plan.from_config({"default": "fp8"}), sizes), range(len(sizes.sizes)))


@pytest.mark.parametrize(
    ("rule", "name"), [("0 fp8", "0.mixer.in_proj"), ("1.latent_fc1 fp8", "1.mlp.fc1_latent_proj")]
)
def test_the_model_computes_with_rounded_matrices(rule: str, name: str, build: Callable[..., Any]) -> None:
    words = ("model=nemotron3_nano_tiny", "model.pattern='ME{latent=64}'")
    sizes = Architecture.from_config(compose("describe", list(words)))
    made = build(*words, "precision=fp32").eval()
    layer = made.decoder.layers.get_submodule(name)
    hidden = torch.randn(5, 1, 192)
    with torch.no_grad(), in_float8(made, Precision(Plan.from_config({"rules": [rule]}), sizes)):
        found = layer(hidden)[0]
    rounded = [quantise(each).dequantised(torch.float32) for each in (hidden.flatten(0, 1), layer.weight.detach())]
    torch.testing.assert_close(found.flatten(0, 1), rounded[0] @ rounded[1].T)
    assert not torch.allclose(found, layer(hidden)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_training_in_fp8_is_almost_as_good(train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    words = [
        "precision=bf16",
        "train.tokens=2560",
        "model=olmo1_tiny",
    ]  # whose sizes suit every scaling; its output layer is tied
    reference = train_ranks(tmp_path / "bf16", *words)
    for scaling in ("tensorwise", "blockwise"):
        plan = f"precision_plan={{default: fp8, format: hybrid, recipe: {scaling}}}"
        lines = train_ranks(tmp_path / scaling, *words, plan)

        assert lines[-1]["loss"] != reference[-1]["loss"]
        # Five steps at a high rate, in which roundings alone move the loss by some thousandths.
        assert lines[-1]["loss"] == pytest.approx(reference[-1]["loss"], rel=0.02)
