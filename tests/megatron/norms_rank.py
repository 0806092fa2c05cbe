"""A rank of test_attention.py: QK norms of half the heads, with one all-reduce a pass, are norms of all heads.

    torchrun --nproc-per-node 2 norms_rank.py FOLDER

FOLDER is not used.
"""

import torch
from torch.distributed import all_reduce, get_rank
from torch.nn.functional import rms_norm

from nemo_ext.megatron.cpu import runtime

runtime.enable()

QUERIES, KEYS, HEAD, EPS = 8, 4, 16, 1e-6


def main() -> None:
    from megatron.core.parallel_state import initialize_model_parallel
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType

    from nemo_ext.megatron.attention import BlockSelfAttention, SDPACoreAttention
    from nemo_ext.megatron.norms import HeadsRMSNorm

    torch.distributed.init_process_group("gloo")
    initialize_model_parallel(2)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=QUERIES,
        num_query_groups=KEYS,
        kv_channels=HEAD,
        tensor_model_parallel_size=2,
        add_bias_linear=False,
        qk_layernorm=True,
        layernorm_epsilon=EPS,
    )
    attention = BlockSelfAttention(
        config,
        SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=SDPACoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=lambda **named: HeadsRMSNorm(heads="num_attention_heads", **named),
            k_layernorm=lambda **named: HeadsRMSNorm(heads="num_query_groups", **named),
        ),
        1,
        attn_mask_type=AttnMaskType.causal,
    )
    norms = attention.q_layernorm, attention.k_layernorm
    for norm in norms:
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(3))
    reduced = []
    torch.distributed.all_reduce = lambda *arguments, **named: (reduced.append(1), all_reduce(*arguments, **named))[1]

    mixed, sizes = attention.get_query_key_value_tensors(hidden, split_qkv=False)
    query, key, value = (part.detach() for part in mixed.split(sizes, -1))
    query = query.reshape(6, 2, -1, HEAD)
    assert not reduced
    got = attention.get_query_key_value_tensors(hidden)
    assert len(reduced) == 1
    torch.testing.assert_close(got[2], value)
    changes = [torch.randn(x.shape, generator=torch.Generator().manual_seed(get_rank())) for x in got]
    weights = [attention.linear_qkv.weight, *(norm.weight for norm in norms)]
    gradients = torch.autograd.grad(sum((x * y).sum() for x, y in zip(got, changes, strict=True)), weights)
    assert len(reduced) == 1 + 1 + 1  # and the gradient of the projection's input

    # The same from all ranks' heads.
    rounding = {"rtol": 1e-4, "atol": 1e-4}
    whole = [gathered(x, -2).requires_grad_() for x in (query, key)]
    references = [norm.weight.detach().clone().requires_grad_() for norm in norms]
    expected = [
        rms_norm(x.flatten(-2), weight.shape, weight, EPS).unflatten(-1, x.shape[-2:])
        for x, weight in zip(whole, references, strict=True)
    ]
    for out, right in zip(got, expected, strict=False):
        torch.testing.assert_close(out, right.chunk(2, -2)[get_rank()])
    sum((x * gathered(y, -2)).sum() for x, y in zip(expected, changes, strict=False)).backward()
    for gradient, reference in zip(gradients[1:], references, strict=True):  # Megatron sums the slices over the group
        all_reduce(gradient)
        torch.testing.assert_close(gradient, reference.grad, **rounding)
    d_query, d_key = (x.grad.chunk(2, -2)[get_rank()] for x in whole)
    d_mixed = torch.cat([d_query.reshape(6, 2, KEYS // 2, -1), d_key, changes[2]], -1).flatten(-2)
    torch.testing.assert_close(gradients[0], torch.einsum("sbo,sbi->oi", d_mixed, hidden), **rounding)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Concatenate both ranks' tensors."""
    parts = [torch.empty_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


if __name__ == "__main__":
    main()
