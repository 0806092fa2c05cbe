"""The torch kernels under mamba_ssm's names, alone and in Megatron's mixer."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_ext.megatron.cpu import mamba_modules
from nemo_ext.megatron.cpu.mamba_norm import rms_norm_gated
from nemo_ext.megatron.cpu.mamba_scan import ssd_chunk_scan


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which neither package, nor a stand-in for it, has been imported."""
    for name in [name for name in sys.modules if name.split(".")[0] in mamba_modules.STAND_INS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, mamba_modules.MIXER, raising=False)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in mamba_modules.STAND_INS]:
        del sys.modules[name]  # before monkeypatch puts back what was there


def test_install_serves_both_packages_once(without_kernels: None) -> None:
    assert mamba_modules.install() == ("mamba_ssm", "causal_conv1d")
    mamba_ssm = importlib.import_module("mamba_ssm")
    assert mamba_modules.install() == ("mamba_ssm", "causal_conv1d")
    assert importlib.import_module("mamba_ssm") is mamba_ssm

    assert importlib.util.find_spec("mamba_ssm") is mamba_ssm.__spec__
    found = importlib.util.find_spec("mamba_ssm.ops.triton.ssd_combined")
    assert found is not None and found.name.endswith("ssd_combined")
    assert importlib.util.find_spec("mamba_ssm.modules") is None
    assert importlib.import_module("causal_conv1d").causal_conv1d_fn is mamba_modules.causal_conv1d_fn
    assert importlib.import_module("causal_conv1d.causal_conv1d_varlen").causal_conv1d_varlen_states
    assert importlib.import_module("mamba_ssm.ops.triton.layernorm_gated").RMSNorm
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mamba_ssm\.modules'"):
        importlib.import_module("mamba_ssm.modules.mamba2")


BOTH = ("mamba_ssm", "causal_conv1d")


@pytest.mark.parametrize(
    ("package", "device", "served"),
    [("mamba_ssm", True, ()), ("causal_conv1d", True, ("mamba_ssm",)), *((name, False, BOTH) for name in BOTH)],
)
def test_install_leaves_a_real_package_alone_where_it_has_a_device(
    without_kernels: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    device: bool,
    served: tuple[str, ...],
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("origin = 'real'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)

    assert mamba_modules.install() == served
    assert mamba_modules.is_stand_in("causal_conv1d") == (not device)
    assert (getattr(importlib.import_module(package), "origin", None) == "real") == device


def test_install_after_the_mixer_is_refused(
    megatron: None, without_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssm = importlib.import_module("megatron.core.ssm")
    monkeypatch.setattr(ssm, "mamba_mixer", ssm.mamba_mixer)  # which importing it once more replaces
    importlib.import_module(mamba_modules.MIXER)

    with pytest.raises(RuntimeError, match=r"call mamba_modules\.install\(\) before"):
        mamba_modules.install()


def test_megatron_trains_on_packed_sequences_but_refuses_dynamic_inference(megatron: None) -> None:
    from megatron.core.ssm import mamba_mixer

    assert mamba_mixer.HAVE_MAMBA_SSM and getattr(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", True)
    assert mamba_mixer.causal_conv1d_fn is mamba_modules.causal_conv1d_fn
    supported = [
        mamba_mixer._check_mamba_sequence_packing_support(for_inference_not_training=inference)[0]
        for inference in (False, True)
    ]
    assert supported == [True, False]


LENGTHS = [37, 1, 150, 12]


class Linear(torch.nn.Linear):
    """A linear layer with the arguments of Megatron's."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **others: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


@pytest.fixture
def mixer(megatron: None) -> torch.nn.Module:
    """Megatron's mixer on one rank."""
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        mamba_state_dim=8,
        mamba_head_dim=8,
        mamba_num_groups=2,
        mamba_num_heads=6,
        use_cpu_initialization=True,
    )
    one = SimpleNamespace(size=lambda: 1)
    parts = mamba_mixer.MambaMixerSubmodules(in_proj=Linear, out_proj=Linear)
    return mamba_mixer.MambaMixer(config, parts, 32, layer_number=1, pg_collection=SimpleNamespace(tp=one, cp=one))


def test_megatron_mixer_gives_the_same_by_its_two_paths(mixer: Any) -> None:
    x = torch.randn(sum(LENGTHS), 1, 32)
    results = []
    for fused in (True, False):
        mixer.use_mem_eff_path = fused
        mixer.zero_grad()
        out, _ = mixer(x)
        out.square().mean().backward()
        results.append([out, *(parameter.grad for parameter in mixer.parameters())])

    assert len(results[0]) == 1 + 8
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_megatron_mixer_keeps_packed_sequences_apart(mixer: Any) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    x = torch.randn(sum(LENGTHS), 1, 32)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    longest = {"max_seqlen_q": max(LENGTHS), "max_seqlen_kv": max(LENGTHS)}
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, total_tokens=int(ends[-1]), **longest
    )
    assert packed.seq_idx is not None

    together, _ = mixer(x, packed_seq_params=packed)
    alone = torch.cat([mixer(part)[0] for part in x.split(LENGTHS)])

    torch.testing.assert_close(together, alone)
    assert (together - mixer(x)[0]).abs().max() > 1e-3


def split_inputs(*, groups: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    heads, head_dim, state = 4, 6, 3
    channels = heads * head_dim + 2 * groups * state
    return {
        "zxbcdt": torch.randn(2, 40, heads * head_dim + channels + heads).double(),
        "conv1d_weight": torch.randn(channels, 4).double(),
        "conv1d_bias": torch.randn(channels).double(),
        "dt_bias": torch.randn(heads).double(),
        "A": -torch.rand(heads).double(),
        "D": torch.randn(heads).double(),
        "chunk_size": 16,
        "headdim": head_dim,
        "ngroups": groups,
    }


def split_parts(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """z, x|B|C after convolution and silu, and the scan without gate; from torch's own convolution."""
    inner, channels = 24, inputs["conv1d_weight"].shape[0]
    z, xbc, dt = inputs["zxbcdt"].split((inner, channels, 4), dim=-1)
    padded = F.pad(xbc.transpose(1, 2), (3, 0))
    convolved = F.conv1d(padded, inputs["conv1d_weight"][:, None], inputs["conv1d_bias"], groups=channels)
    convolved = F.silu(convolved).transpose(1, 2)
    x, B, C = convolved.split((inner, 6, 6), dim=-1)
    scanned = ssd_chunk_scan(
        x.unflatten(-1, (4, 6)),
        dt,
        inputs["A"],
        B.unflatten(-1, (2, 3)),
        C.unflatten(-1, (2, 3)),
        chunk_size=16,
        D=inputs["D"],
        dt_bias=inputs["dt_bias"],
        dt_softplus=True,
    )
    assert isinstance(scanned, Tensor)
    return z, convolved, scanned.flatten(2)


def test_split_without_norm_is_gated() -> None:
    inputs = split_inputs()
    z, _, scanned = split_parts(inputs)

    out = mamba_modules.mamba_split_conv1d_scan_combined(**inputs, norm_before_gate=False)

    torch.testing.assert_close(out, scanned * F.silu(z))


def test_split_gradcheck() -> None:
    inputs = split_inputs()
    named = {name: value.requires_grad_() for name, value in inputs.items() if isinstance(value, Tensor)}
    named["zxbcdt"] = inputs["zxbcdt"].detach()[:, :6].requires_grad_()
    seq_idx = torch.tensor([0, 0, 1, 1, 1, 1]).expand(2, -1)

    def split(*values: Tensor) -> Any:
        tensors = dict(zip(named, values, strict=True))
        return mamba_modules.mamba_split_conv1d_scan_combined(
            **(inputs | tensors | {"chunk_size": 4}), seq_idx=seq_idx, return_final_states=True
        )

    assert torch.autograd.gradcheck(split, tuple(named.values()), fast_mode=True)


def test_split_chooses_its_own_dtypes_under_autocast() -> None:
    inputs = {name: value.float() if isinstance(value, Tensor) else value for name, value in split_inputs().items()}
    leaf = inputs["zxbcdt"].requires_grad_()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = mamba_modules.mamba_split_conv1d_scan_combined(**inputs)
            assert isinstance(out, Tensor)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_split_of_bfloat16_gives_bfloat16_and_its_gradients() -> None:
    inputs = split_inputs()
    low = {name: t.bfloat16().requires_grad_() if isinstance(t, Tensor) else t for name, t in inputs.items()}

    out = mamba_modules.mamba_split_conv1d_scan_combined(**low)
    assert isinstance(out, Tensor)
    out.sum().backward()

    assert {out.dtype, *(t.grad.dtype for t in low.values() if isinstance(t, Tensor))} == {torch.bfloat16}


def test_split_keeps_the_inputs_of_its_parts_for_backward() -> None:
    heads, head_dim, grouped, length = 8, 16, 2 * 16, 2048
    channels = heads * head_dim + 2 * grouped
    projection = torch.randn(1, length, heads * head_dim + channels + heads, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = mamba_modules.mamba_split_conv1d_scan_combined(
            *(projection, torch.randn(channels, 4), torch.randn(channels), torch.zeros(heads), -torch.rand(heads)),
            *(torch.ones(heads), 128),
            headdim=head_dim,
            ngroups=2,
        )

    assert isinstance(out, Tensor) and out.requires_grad
    # Projection, convolution before and after silu, result before the gate, and a sixth for steps and states.
    assert sum(kept.values()) < 7 / 6 * (projection.nbytes + 2 * 4 * length * channels + out.nbytes)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_split_with_norm_and_projection(norm_before_gate: bool) -> None:
    inputs = split_inputs()
    z, _, scanned = split_parts(inputs)
    weight, projection = torch.randn(24).double(), torch.randn(5, 24).double()
    normed = rms_norm_gated(scanned, weight, z=z, group_size=12, norm_before_gate=norm_before_gate)

    out = mamba_modules.mamba_split_conv1d_scan_combined(
        **inputs, rmsnorm_weight=weight, outproj_weight=projection, norm_before_gate=norm_before_gate
    )

    torch.testing.assert_close(out, normed @ projection.t())


def test_split_takes_the_head_size_from_a_wide_skip() -> None:
    inputs = split_inputs()
    wide = inputs | {"D": inputs["D"][:, None].expand(4, 6).contiguous(), "headdim": None}

    out, state = mamba_modules.mamba_split_conv1d_scan_combined(**wide, return_final_states=True)

    torch.testing.assert_close(out, mamba_modules.mamba_split_conv1d_scan_combined(**inputs))
    assert state.shape == (2, 4, 6, 3)


def test_convolution_takes_channels_first() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 5, 9), torch.randn(5, 4), torch.randn(5)

    out = mamba_modules.causal_conv1d_fn(x, weight, bias, activation="silu")

    torch.testing.assert_close(out, F.silu(F.conv1d(F.pad(x, (3, 0)), weight[:, None], bias, groups=5)))


def test_varlen_states_are_the_last_inputs() -> None:
    x = torch.arange(7.0)[:, None].expand(7, 2)

    states = mamba_modules.causal_conv1d_varlen_states(x, torch.tensor([0, 5, 5, 7]), 3)

    assert states[:, 0].tolist() == [[2, 3, 4], [0, 0, 0], [0, 5, 6]]
    assert torch.equal(states[:, 0], states[:, 1])


def scan_inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "x": torch.zeros(1, 8, 2, 3, dtype=dtype),
        "dt": torch.zeros(1, 8, 2, dtype=dtype),
        "A": torch.zeros(2),
        "B": torch.zeros(1, 8, 1, 4, dtype=dtype),
        "C": torch.zeros(1, 8, 1, 4, dtype=dtype),
        "chunk_size": 4,
    }


@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16])
def test_states_are_float32_whatever_is_asked(state_dtype: torch.dtype | None) -> None:
    _, state = mamba_modules.mamba_chunk_scan_combined(
        **scan_inputs(torch.bfloat16), return_final_states=True, state_dtype=state_dtype
    )
    assert state.dtype == torch.float32


def test_what_is_not_supported_is_named() -> None:
    scan, split = scan_inputs(), split_inputs()
    with pytest.raises(ValueError, match="do not support return_varlen_states"):
        mamba_modules.mamba_chunk_scan_combined(**scan, return_varlen_states=True)
    with pytest.raises(ValueError, match="do not support cu_seqlens"):
        mamba_modules.mamba_chunk_scan_combined(**scan, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="state_dtype=float64 requires float64 inputs"):
        mamba_modules.mamba_chunk_scan_combined(**scan, state_dtype=torch.float64)
    with pytest.raises(ValueError, match="headdim is None"):
        mamba_modules.mamba_split_conv1d_scan_combined(**(split | {"headdim": None}))
    with pytest.raises(ValueError, match="outproj_bias is set without"):
        mamba_modules.mamba_split_conv1d_scan_combined(**split, outproj_bias=torch.zeros(3))
    with pytest.raises(ValueError, match=r"zxbcdt has shape \(2, 40, 64\) and conv1d_weight has 36 channels"):
        mamba_modules.mamba_split_conv1d_scan_combined(**(split | {"ngroups": 4}))
    with pytest.raises(ValueError, match="do not support return_final_states"):
        mamba_modules.causal_conv1d_fn(torch.zeros(1, 2, 3), torch.zeros(2, 4), return_final_states=True)
