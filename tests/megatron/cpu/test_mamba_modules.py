"""The torch kernels under mamba_ssm's names. What depends on import order runs in a fresh interpreter."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_ext.megatron.cpu import mamba_modules
from nemo_ext.megatron.cpu.mamba_norm import rms_norm_gated
from nemo_ext.megatron.cpu.mamba_scan import ssd_chunk_scan

REPOSITORY = Path(__file__).parents[3]


def run_python(source: str, *, path: Path | None = None) -> str:
    """Runs `source` in a fresh interpreter and returns what it prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, filter(None, (path, REPOSITORY))))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_install_serves_both_packages_once() -> None:
    printed = run_python("""
        import importlib.util
        from nemo_ext.megatron.cpu import mamba_modules

        print(mamba_modules.install())
        import mamba_ssm
        print(mamba_modules.install())
        assert importlib.util.find_spec("mamba_ssm") is mamba_ssm.__spec__
        assert importlib.util.find_spec("mamba_ssm.ops.triton.ssd_combined").name.endswith("ssd_combined")
        assert importlib.util.find_spec("mamba_ssm.modules") is None
        from causal_conv1d import causal_conv1d_fn
        from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
        from mamba_ssm.ops.triton.layernorm_gated import RMSNorm
        try:
            import mamba_ssm.modules.mamba2
        except ModuleNotFoundError as error:
            print(error)
    """)
    assert printed.splitlines() == [
        "('mamba_ssm', 'causal_conv1d')",
        "('mamba_ssm', 'causal_conv1d')",
        "No module named 'mamba_ssm.modules'",
    ]


def test_install_leaves_a_real_mamba_ssm_alone(tmp_path: Path) -> None:
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("origin = 'real'\n")

    printed = run_python(
        """
        import sys
        from nemo_ext.megatron.cpu import mamba_modules

        print(mamba_modules.install())
        assert "causal_conv1d" not in sys.modules
        import mamba_ssm
        print(mamba_ssm.origin)
        """,
        path=tmp_path,
    )

    assert printed.splitlines() == ["()", "real"]


def test_install_leaves_a_real_causal_conv1d_alone(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d.py").write_text("origin = 'real'\n")

    printed = run_python(
        """
        from nemo_ext.megatron.cpu import mamba_modules

        print(mamba_modules.install())
        import causal_conv1d
        print(causal_conv1d.origin)
        """,
        path=tmp_path,
    )

    assert printed.splitlines() == ["('mamba_ssm',)", "real"]


def test_install_after_the_mixer_is_refused() -> None:
    printed = run_python("""
        import megatron.core.ssm.mamba_mixer
        from nemo_ext.megatron.cpu import mamba_modules

        try:
            mamba_modules.install()
        except RuntimeError as error:
            print(error)
    """)
    assert "call mamba_modules.install() before" in printed


def test_megatron_trains_on_packed_sequences_but_refuses_dynamic_inference() -> None:
    printed = run_python("""
        from nemo_ext.megatron.cpu import mamba_modules

        mamba_modules.install()
        from megatron.core.ssm import mamba_mixer

        assert mamba_mixer.HAVE_MAMBA_SSM and mamba_mixer.MAMBA_HAS_STATE_DTYPE
        assert mamba_mixer.causal_conv1d_fn is mamba_modules.causal_conv1d_fn
        for inference in (False, True):
            print(mamba_mixer._check_mamba_sequence_packing_support(for_inference_not_training=inference)[0])
    """)
    assert printed.splitlines() == ["True", "False"]


MIXER = """
    from contextlib import contextmanager
    from types import SimpleNamespace

    import torch
    from nemo_ext.megatron.cpu import mamba_modules

    mamba_modules.install()
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Seeds:
        @contextmanager
        def fork(self):
            yield

    mamba_mixer.get_cuda_rng_tracker = Seeds

    class Linear(torch.nn.Linear):
        def __init__(self, inputs, outputs, *, config, init_method, bias, skip_bias_add, **parallel):
            super().__init__(inputs, outputs, bias=bias)

        def forward(self, x):
            return super().forward(x), None

    class OneRank:
        def size(self):
            return 1

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, mamba_state_dim=8, mamba_head_dim=8,
        mamba_num_groups=2, mamba_num_heads=6, use_cpu_initialization=True,
    )
    mixer = mamba_mixer.MambaMixer(
        config,
        mamba_mixer.MambaMixerSubmodules(in_proj=Linear, out_proj=Linear),
        32,
        layer_number=1,
        pg_collection=SimpleNamespace(tp=OneRank(), cp=OneRank()),
    )
    lengths = [37, 1, 150, 12]
    x = torch.randn(sum(lengths), 1, 32)
"""


def test_megatron_mixer_gives_the_same_by_its_two_paths() -> None:
    run_python(
        textwrap.dedent(MIXER)
        + textwrap.dedent("""
        results = []
        for fused in (True, False):
            mixer.use_mem_eff_path = fused
            mixer.zero_grad()
            out, _ = mixer(x)
            out.square().mean().backward()
            results.append([out, *(parameter.grad for parameter in mixer.parameters())])
        assert len(results[0]) == 1 + 8
        for one, other in zip(*results):
            torch.testing.assert_close(one, other)
        """)
    )


def test_megatron_mixer_keeps_packed_sequences_apart() -> None:
    run_python(
        textwrap.dedent(MIXER)
        + textwrap.dedent("""
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, total_tokens=int(ends[-1]),
            max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
        )
        assert packed.seq_idx is not None
        together, _ = mixer(x, packed_seq_params=packed)
        alone = torch.cat([mixer(part)[0] for part in x.split(lengths)])
        torch.testing.assert_close(together, alone)
        assert (together - mixer(x)[0]).abs().max() > 1e-3
        """)
    )


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
    with pytest.raises(ValueError, match="lack return_varlen_states"):
        mamba_modules.mamba_chunk_scan_combined(**scan, return_varlen_states=True)
    with pytest.raises(ValueError, match="lack cu_seqlens"):
        mamba_modules.mamba_chunk_scan_combined(**scan, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="state_dtype is float64"):
        mamba_modules.mamba_chunk_scan_combined(**scan, state_dtype=torch.float64)
    with pytest.raises(ValueError, match="headdim is None"):
        mamba_modules.mamba_split_conv1d_scan_combined(**(split | {"headdim": None}))
    with pytest.raises(ValueError, match="outproj_bias is set without"):
        mamba_modules.mamba_split_conv1d_scan_combined(**split, outproj_bias=torch.zeros(3))
    with pytest.raises(ValueError, match="lack return_final_states"):
        mamba_modules.causal_conv1d_fn(torch.zeros(1, 2, 3), torch.zeros(2, 4), return_final_states=True)
