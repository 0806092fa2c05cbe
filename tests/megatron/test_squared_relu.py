"""The fused squared ReLU: its kernels, on the CPU through Triton's interpreter, and its place in models."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_ext.job.config import compose
from nemo_ext.megatron.arguments import uses_fused_squared_relu
from nemo_ext.megatron.check import check_keys
from nemo_ext.megatron.session import take_tensors

Build = Callable[..., torch.nn.Module]
FUSED = "+model.fused_squared_relu=true"


@pytest.fixture(autouse=True, scope="module")
def imported(megatron: None) -> None:
    """What imports Megatron, for seconds: when tests begin, not when they are collected."""
    global DTYPES, megatron_squared_relu, squared_relu, squared_relu_to_fp8
    from nemo_ext.megatron.squared_relu import DTYPES, megatron_squared_relu, squared_relu, squared_relu_to_fp8


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("interpreter", marks=pytest.mark.slow),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_kernels(device: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "interpreter" else "0", "OMP_NUM_THREADS": "1"}
    file = Path(__file__).parent / "squared_relu_kernels.py"

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]


COMPILES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nemo_ext.megatron import squared_relu_kernels as kernels

for kernel, types in (
    (kernels._forward, ["*bf16", "*bf16", "i32"]),
    (kernels._backward, ["*bf16", "*bf16", "*bf16", "i32"]),
    (kernels._to_fp8, ["*bf16", "*fp8e4nv", "*fp32", "*fp32", "i32"]),
):
    names = kernel.arg_names
    signature = dict(zip(names, [*types, "constexpr"], strict=True))
    wide = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(types) if kind != "*fp32"}
    for capability in (80, 90, 100):
        if capability < 89 and "*fp8e4nv" in types:
            continue
        source = ASTSource(kernel, signature, constexprs={(len(types),): kernels._BLOCK}, attrs=wide)
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
        assert "ld.global.v4" in ptx, kernel  # 16 bytes at once
        assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == ("*fp8e4nv" in types)
        assert ("cvt.rn.bf16" in ptx) == ("*fp8e4nv" not in types)
        print(kernel.__name__, capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}

    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILES], env=environment, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 0, ended.stderr[-4000:]
    assert len(ended.stdout.splitlines()) == 8


@given(st.lists(st.floats(width=32), max_size=20), st.deferred(lambda: st.sampled_from([*DTYPES, torch.float64])))
def test_without_a_device_it_is_megatrons_function(numbers: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(numbers, dtype=dtype)

    assert torch.equal(squared_relu(x).nan_to_num(), megatron_squared_relu(x).nan_to_num())


def test_fp8_without_a_device() -> None:
    x = torch.tensor([-1.0, 0.5, 3.0, 30.0], dtype=torch.bfloat16)

    values, amax = squared_relu_to_fp8(x, 2.0)

    assert values.float().tolist() == [0.0, 0.5, 18.0, 448.0] and amax.item() == 900
    assert squared_relu_to_fp8(torch.empty(0), 1.0)[1].item() == 0
    assert squared_relu_to_fp8(torch.tensor([float("nan")]), 1.0)[1].isinf()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), torch.ones(2)])
def test_a_wrong_scale_is_refused(scale: Any) -> None:
    with pytest.raises(ValueError, match="scale"):
        squared_relu_to_fp8(torch.ones(3), scale)


def activations(model: Any) -> dict[str, Any]:
    """The activation of every MLP, by its name."""
    return {name: module.activation_func for name, module in model.named_modules() if hasattr(module, "linear_fc1")}


def test_ffn_blocks_and_shared_experts_have_it_and_nothing_else_changes(build: Build) -> None:
    words = ("model.pattern='-{ffn=96}E*M-'",)

    plain, fused = build(*words), build(*words, FUSED)

    chosen = activations(fused)
    assert set(activations(plain).values()) == {megatron_squared_relu}
    routed = {name for name in chosen if "local_experts" in name}
    assert len(routed) == 8
    assert {chosen[name] for name in routed} == {megatron_squared_relu}
    assert {chosen[name] for name in chosen.keys() - routed} == {squared_relu}
    assert {"decoder.layers.0.mlp", "decoder.layers.1.mlp.shared_experts"} <= chosen.keys() - routed
    assert fused.config.activation_func is megatron_squared_relu
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in fused.named_modules()]
    before, after = take_tensors(plain), take_tensors(fused)
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}


@pytest.mark.parametrize("model", ["llama_nemotron_tiny", "olmo1_tiny"])
def test_other_activations_are_left_alone(build: Build, model: str) -> None:
    network = build(f"model={model}", "+model.fused_squared_relu=auto")

    assert set(activations(network).values()) == {torch.nn.functional.silu}


@pytest.mark.parametrize(
    ("words", "fused"),
    [((), False), (("+model.fused_squared_relu=false",), False), (("+model.fused_squared_relu=auto",), True)],
)
def test_who_has_it(build: Build, words: tuple[str, ...], fused: bool) -> None:
    assert (squared_relu in activations(build("model=domyn_small_tiny", *words)).values()) == fused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=llama_nemotron_tiny", FUSED), "this model's activation is another"),
        (("model=domyn_small_tiny", "megatron.squared_relu=false", FUSED), "this model's activation is another"),
        (("model=domyn_small_tiny", "+model.fused_squared_relu=yes_please"), "choose auto, true or false"),
        (("model=domyn_small_tiny", "+model.fused_squared_relu=1"), "choose auto, true or false"),
    ],
)
def test_it_is_refused_before_anything_starts(words: tuple[str, ...], said: str) -> None:
    config = compose("train", ["run_dir=unused", "data=mock", *words])

    with pytest.raises(ValueError, match=said):
        check_keys(config)


def test_a_spec_refuses_a_model_with_another_activation(megatron: None) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_ext.megatron.specs import StackOptions, stack_submodules

    for other in ({"activation_func": torch.nn.functional.silu}, {"gated_linear_unit": True}):
        fields = {"activation_func": megatron_squared_relu, "transformer_impl": "local", **other}
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **fields)
        parts = stack_submodules(config, StackOptions(fused_squared_relu=True))
        with pytest.raises(ValueError, match="squared ReLU without a gate"):
            parts.mlp_layer.submodules.mlp(config=config, pg_collection=None, is_mtp_layer=False)


def test_auto_follows_the_activation() -> None:
    auto = {"fused_squared_relu": "auto"}

    assert uses_fused_squared_relu(auto, {"squared_relu": True})
    assert not uses_fused_squared_relu(auto, {"squared_relu": False})
    assert not uses_fused_squared_relu(auto, {"squared_relu": True, "swiglu": True})
    assert not uses_fused_squared_relu({}, {"squared_relu": True})


@pytest.mark.slow
def test_a_model_trains_to_the_same_losses(
    train_ranks: Callable[..., list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # The interpreter rounds bf16 otherwise than any device.
    words = ("model=domyn_small_tiny", "precision=fp32", "model.backend=local")

    plain = train_ranks(tmp_path / "plain", *words)
    fused = train_ranks(tmp_path / "fused", *words, FUSED)

    assert len(fused) == 10
    assert [line["loss"] for line in fused] == [line["loss"] for line in plain]
    assert [line["grad_norm"] for line in fused] == [line["grad_norm"] for line in plain]
