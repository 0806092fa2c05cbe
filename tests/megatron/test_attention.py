"""The core attention of the local back end compared with the definition of attention."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of `[seq, batch, heads, dim]` by the definition, in fp64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / math.sqrt(q.shape[-1])
    row, column = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])[None, :]
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", probabilities, v).flatten(2).float()


def core(window: int | None = None, heads: int = 4, groups: int = 2, dim: int = 8) -> torch.nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from nemo_ext.megatron.attention import SDPACoreAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
    )
    groups_ = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups_)


def inputs(seq: int, batch: int = 2, heads: int = 4, groups: int = 2, dim: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seq)
    return tuple(torch.randn(seq, batch, n, dim, generator=generator) for n in (heads, groups, groups))


@pytest.mark.parametrize("window", [None, 1, 2, 5, 16, 40])
@pytest.mark.parametrize("seq", [1, 7, 16, 33])
def test_it_computes_attention(megatron: None, seq: int, window: int | None) -> None:
    q, k, v = inputs(seq)

    output = core(window)(q, k, v, None)

    assert torch.allclose(output, written_out(q, k, v, window), atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), window=st.sampled_from([None, 3]), tail=st.booleans()
)
def test_a_packed_sequence_attends_only_to_itself(
    megatron: None, lengths: list[int], window: int | None, tail: bool
) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    padding = 3 if tail else 0
    q, k, v = (t[:, 0] for t in inputs(sum(lengths) + padding))
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    output = core(window)(q, k, v, None, packed_seq_params=packed)

    for a, b in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        alone = written_out(q[a:b, None], k[a:b, None], v[a:b, None], window).squeeze(1)
        assert torch.allclose(output[a:b], alone, atol=1e-5)
    assert not output[sum(lengths) :].any()


def test_a_short_query_is_the_end_of_its_context(megatron: None) -> None:
    q, k, v = inputs(12)

    whole, last = (core()(query, k, v, None) for query in (q, q[-5:]))

    assert torch.allclose(whole[-5:], last, atol=1e-6)


def test_features_of_only_transformer_engine_are_refused(megatron: None) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    attention, (q, k, v) = core(), inputs(4)

    with pytest.raises(ValueError, match="attention_bias"):
        attention(q, k, v, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="attn_mask_type"):
        attention(q, k, v, None, attn_mask_type=AttnMaskType.arbitrary)


def test_a_head_norm_over_the_full_width(megatron: None) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_ext.megatron.norms import HeadsRMSNorm

    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    norm = HeadsRMSNorm(config, 8, 1e-6, heads="num_attention_heads")
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 2, 4, 8)

    expected = torch.nn.functional.rms_norm(x.flatten(-2), (32,), norm.weight, 1e-6).unflatten(-1, (4, 8))

    assert torch.allclose(norm(x), expected, atol=1e-6)


def saved(forward: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Output of a forward pass, and the bytes that it keeps for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return forward(), sum(kept.values())


def test_a_head_norm_keeps_its_input_in_its_own_dtype(megatron: None) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_ext.megatron.norms import HeadsRMSNorm, reduced_norms

    config = TransformerConfig(num_layers=1, hidden_size=256, num_attention_heads=8, params_dtype=torch.bfloat16)
    norm = HeadsRMSNorm(config, 32, 1e-6, heads="num_attention_heads")
    torch.manual_seed(0)
    x = torch.randn(16, 4, 8, 32, dtype=torch.bfloat16, requires_grad=True)
    from_above = torch.randn(16, 4, 8, 32, dtype=torch.bfloat16)
    exact = torch.nn.functional.rms_norm(x.double().flatten(-2), (256,), norm.weight.double(), 1e-6).view_as(x)
    expected = torch.autograd.grad(exact, [x, norm.weight], from_above.double())

    for forward in (lambda: norm(x), lambda: reduced_norms(None, norm.eps, norm(x, deferred=True))[0]):
        out, kept = saved(forward)

        assert kept < 2.2 * x.numel()  # 2 bytes of the input; one scale per token, and the weight
        torch.testing.assert_close(out, exact.to(x.dtype))
        for gradient, right in zip(torch.autograd.grad(out, [x, norm.weight], from_above), expected, strict=True):
            torch.testing.assert_close(gradient, right, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_head_norms_of_parallel_ranks_share_one_reduction(
    megatron: None, on_ranks: Callable[..., None], tmp_path: Path
) -> None:
    on_ranks(Path(__file__).with_name("norms_rank.py"), tmp_path)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_the_local_norm_is_torchs(megatron: None, normalization: str, zero_centred: bool) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_ext.megatron.norms import LocalNorm

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        normalization=normalization,
        layernorm_zero_centered_gamma=zero_centred,
    )
    norm, x = LocalNorm(config, 16), torch.randn(3, 16)
    reference = torch.nn.LayerNorm(16) if normalization == "LayerNorm" else torch.nn.RMSNorm(16, eps=1e-5)

    assert torch.allclose(norm(x), reference(x), atol=1e-6)  # the initial weight is one, however it is stored
    assert not list(LocalNorm(config, 16, affine=False).parameters())


def test_the_local_norm_stores_little_for_its_backward_pass(megatron: None) -> None:
    from megatron.core.transformer import TransformerConfig

    from nemo_ext.megatron.norms import LocalNorm

    norm = LocalNorm(
        TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, normalization="RMSNorm"), 64
    )
    x, reference = torch.randn(32, 64, requires_grad=True), torch.nn.RMSNorm(64, eps=1e-5)

    out, kept = saved(lambda: norm(x))

    # The input, its weight and one scale a token; torch's own formula keeps the normalised input too.
    assert kept < 1.2 * x.numel() * 4
    ours = torch.autograd.grad(out.square().sum(), [x, *norm.parameters()])
    theirs = torch.autograd.grad(reference(x).square().sum(), [x, *reference.parameters()])
    for gradient, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, expected)
