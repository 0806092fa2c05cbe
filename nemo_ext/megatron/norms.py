"""Normalisation layers of the local back end.

Megatron's `WrappedTorchNorm` supports neither sequence parallelism nor zero-centred weights nor norms without weights.
The classes here support all three in plain torch, so that one spec serves both back ends.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.linalg import vector_norm
from torch.nn.functional import layer_norm, rms_norm

from nemo_ext.megatron.cpu.mamba_norm import rms_norm_gated
from nemo_ext.megatron.cpu.mamba_scan import compute_dtype


class LocalNorm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, chosen by `config.normalization`.

    Args:
        config: supplies `normalization`, `layernorm_zero_centered_gamma` (the stored weight is `weight - 1`) and
            `sequence_parallel` (marks the weights, so that Megatron sums their gradients over the tensor-parallel
            group).
        hidden_size: size of the last dimension.
        eps: constant added to the variance.
        affine: False for OLMo 1's non-parametric norm, which has no weight.

    Raises:
        ValueError: the normalization is neither LayerNorm nor RMSNorm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, affine: bool = True) -> None:
        super().__init__()
        if config.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization={config.normalization!r}: choose LayerNorm or RMSNorm")
        self.hidden_size = hidden_size
        self.eps = eps
        self.centred = config.normalization == "LayerNorm"
        self.zero_centred_weight = config.layernorm_zero_centered_gamma
        self.weight: torch.nn.Parameter | None = None
        self.bias: torch.nn.Parameter | None = None
        if affine:
            initial = torch.zeros if self.zero_centred_weight else torch.ones
            self.weight = torch.nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
            if self.centred:
                self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` `[..., hidden_size]`, keeping its shape and dtype."""
        weight: Tensor | None = self.weight
        if weight is not None and self.zero_centred_weight:
            weight = weight + 1
        if self.centred:
            return layer_norm(x, (self.hidden_size,), weight, self.bias, self.eps)
        if weight is None:
            return rms_norm(x, (self.hidden_size,), None, self.eps)
        return _rms_norm(x, weight, self.eps)


class HeadsRMSNorm(torch.nn.Module):
    """RMSNorm over all heads of a query or key together (OLMo 2 and 3), exact under tensor parallelism.

    Megatron's `qk_layernorm` normalises each head separately. Here the mean square is taken over the full width
    `heads x head_dim`, averaged over the tensor-parallel group. Every rank holds the whole weight and uses its own
    slice: Megatron sums the gradients of all `q_layernorm` and `k_layernorm` parameters over the group
    (core/distributed/finalize_model_grads.py), which combines the gradients of the slices.

    Args:
        config: supplies the number of heads, `tensor_model_parallel_size` and `params_dtype`.
        hidden_size: size of one head, as Megatron passes it to a `q_layernorm`.
        eps: constant added to the mean square.
        heads: field of `config` with the number of heads: `num_attention_heads` for queries, `num_query_groups` for
            keys.

    Raises:
        ValueError: the number of heads is not divisible by the tensor-parallel size.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: str) -> None:
        super().__init__()
        total = getattr(config, heads)
        tensor_parallel = config.tensor_model_parallel_size
        if total % tensor_parallel:
            raise ValueError(
                f"{heads}={total} is not divisible by tensor_model_parallel_size={tensor_parallel}: a QK norm over the "
                "full width needs whole heads on every rank; choose a smaller tensor_model_parallel_size"
            )
        self.tp_group: dist.ProcessGroup | None = None  # set by the attention that owns the norm
        self.tensor_parallel = tensor_parallel
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(total * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor, *, deferred: bool = False) -> Any:
        """Normalise `x` `[seq, batch, local heads, head_dim]`, keeping its shape and dtype.

        With `deferred`, return `x` and this rank's slice of the weight in the shape of its last two dimensions, for
        `reduced_norms`; these may also be groups of heads and their width.
        """
        rank = dist.get_rank(self.tp_group) if self.tensor_parallel > 1 else 0
        weight = self.weight.chunk(self.tensor_parallel)[rank].view(x.shape[-2:])
        if deferred:
            return x, weight
        if self.tensor_parallel == 1:
            return _rms_norm(x, weight, self.eps)
        return reduced_norms(self.tp_group, self.eps, (x, weight))[0]


def reduced_norms(group: dist.ProcessGroup | None, eps: float, *pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Compute RMS norms of tensors whose heads are split over a group, with one all-reduce for all of them.

    The backward pass needs one all-reduce as well; for it, the tensors are kept in their own dtype, together with one
    FP32 scale per token.

    Args:
        group: tensor-parallel group; None for the default group.
        eps: constant added to the mean square.
        pairs: tensors `[..., local heads, head_dim]`, each with its weight `[local heads, head_dim]`.
    """
    result: tuple[Tensor, ...] = _ReducedNorms.apply(group, eps, *chain.from_iterable(pairs))
    return result


class _ReducedNorms(torch.autograd.Function):
    """RMS norms over the last two dimensions, which are split evenly over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, eps: float, *tensors: Tensor) -> Any:
        ctx.group, work = group, compute_dtype(tensors[0])
        xs, weights = tensors[::2], tensors[1::2]
        squares = torch.stack([vector_norm(x, dim=(-2, -1), dtype=work).square() for x in xs])
        scales = [mean.add(eps).rsqrt() for mean in _means(squares, weights, group)]
        ctx.save_for_backward(*tensors, *scales)
        return tuple((x * scale * weight).to(x.dtype) for x, weight, scale in zip(xs, weights, scales, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, 2 * len(gradients)
        weights, scales = saved[1:count:2], saved[count:]
        normed = [x * scale for x, scale in zip(saved[:count:2], scales, strict=True)]
        weighted = [
            gradient * weight.to(scale.dtype)
            for gradient, weight, scale in zip(gradients, weights, scales, strict=True)
        ]
        products = torch.stack([(a * b).sum((-2, -1)) for a, b in zip(weighted, normed, strict=True)])
        result: list[Tensor | None] = [None, None]
        for gradient, y, along, scale, d_y in zip(
            gradients, normed, _means(products, weights, ctx.group), scales, weighted, strict=True
        ):
            d_x = d_y.addcmul_(y, along, value=-1).mul_(scale)
            result += [d_x.to(gradient.dtype), (gradient * y).flatten(0, -3).sum(0).to(gradient.dtype)]
        return tuple(result)


def _means(sums: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Divide the sums of all ranks, `[tensors, ...]`, by the whole width of each tensor; each mean is `[..., 1, 1]`."""
    dist.all_reduce(sums, group=group)
    ranks = dist.get_world_size(group)
    return [total[..., None, None] / (ranks * weight.numel()) for total, weight in zip(sums, weights, strict=True)]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the weight's dimensions: torch's, except on a CPU, where ours takes 0.6 of its time and memory."""
    if x.device.type == "cpu":
        return rms_norm_gated(x.flatten(-weight.dim()), weight.flatten(), eps=eps).view(x.shape)
    return rms_norm(x, weight.shape, weight, eps)
