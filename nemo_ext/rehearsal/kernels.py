"""Stand-ins for GPU kernels: their outputs, tensors saved for the backward pass, workspaces and FLOPs.

| kernel | saved tensors | source |
|---|---|---|
| flash attention | q, k, v, out, log-sum-exp in fp32 | flash_attn/flash_attn_interface.py |
| the same with CP | for the rank's part of the sequence | TE's dot_product_attention/context_parallel.py |
| norms | input, and 1 or 2 fp32 numbers per row | TE's pytorch/module/rmsnorm.py, layernorm.py |
| Mamba-2's norm | input, and an fp32 number per row and group | mamba_ssm/ops/triton/layernorm_gated.py |
| Mamba-2 | input, and the scan's output before gating | mamba_ssm/ops/triton/ssd_combined.py |
| permutation of tokens | row indices; experts receive equal numbers of tokens | TE's pytorch/permutation.py |
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.moe import experts, token_dispatcher
from torch import Tensor

from nemo_ext.architecture.cost import SCAN_CHUNK, attended_tokens
from nemo_ext.megatron import specs
from nemo_ext.megatron.attention import SDPACoreAttention
from nemo_ext.megatron.cpu import mamba_norm
from nemo_ext.megatron.norms import LocalNorm
from nemo_ext.rehearsal.tracker import Tracker


@contextmanager
def stand_ins(tracker: Tracker, *, kernels: bool = True, imbalance: float = 1.0) -> Iterator[None]:
    """Context manager that replaces kernels of Megatron and of the local back end with stand-ins.

    Args:
        tracker: tracker that records FLOPs and communication.
        kernels: whether to replace attention, norms and the scan; the routing of tokens is always replaced.
        imbalance: number of tokens routed to this rank's experts, divided by the mean over expert-parallel ranks.
    """
    compute = (
        (specs.LocalBackend, "core_attention", lambda self: _attention(tracker)),
        (LocalNorm, "forward", _norm),
        (mamba_norm.RMSNorm, "forward", _gated_norm),
        (mamba_mixer, "mamba_split_conv1d_scan_combined", _scan(tracker)),
    )
    with ExitStack() as stack:
        for target, name, replacement in (
            *(compute if kernels else ()),
            (token_dispatcher, "permute", _permute),
            (token_dispatcher, "sort_chunks_by_idxs", _sort_chunks),
            (token_dispatcher.MoEAlltoAllTokenDispatcher, "preprocess", _splits(imbalance)),
            (token_dispatcher.MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", lambda self, at, n=None: n),
            (token_dispatcher.MoEAllGatherTokenDispatcher, "dispatch_postprocess", _share(imbalance)),
            (experts.SequentialMLP, "forward", _with_lists(experts.SequentialMLP.forward)),
        ):
            stack.enter_context(patch.object(target, name, replacement))
        yield


class _Kernel(torch.autograd.Function):
    """Stand-in for a kernel as an autograd function.

    In the forward pass, `makes(*given)` returns the output and a list of tensors to save in addition to the inputs
    `given`. In the backward pass, `works(*given)` records the work, and the gradients are uninitialised tensors.
    """

    @staticmethod
    def forward(ctx: Any, makes: Callable[..., Any], works: Callable[..., Any], *given: Tensor) -> Tensor:
        out, saved = makes(*given)
        ctx.save_for_backward(*given, *saved)
        ctx.works, ctx.count = works, len(given)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        given = ctx.saved_tensors[: ctx.count]
        ctx.works(*given)
        return (None, None, *(torch.empty_like(each) for each in given))


def _attention(tracker: Tracker) -> type[MegatronModule]:
    class FlashAttention(SDPACoreAttention):
        """Stand-in for flash attention, which records its FLOPs and, with context parallelism, its communication."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            parts = config.context_parallel_size
            with patch.object(config, "context_parallel_size", 1):
                super().__init__(config, *args, **kwargs)
            self.parts, self.way = parts, kwargs.get("cp_comm_type") or "p2p"

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            length, batch, heads, width = query.shape
            seen = attended_tokens(length * self.parts, self.window or 0)
            flops = 2 * length * batch * heads * (width + value.shape[-1]) * seen
            forward_sends, backward_sends = _sent(self.way, self.parts, query, key, value)

            def makes(*_: Tensor) -> tuple[Tensor, list[Tensor]]:
                tracker.add_flops(flops)
                for sent in forward_sends:
                    tracker.add_collective("CONTEXT_PARALLEL_GROUP", *sent)
                out = query.new_empty(length, batch, heads * value.shape[-1])
                return out, [query.new_empty(batch, heads, length, dtype=torch.float32), out]

            def works(*_: Tensor) -> None:
                tracker.add_flops(2.5 * flops)  # five products; the forward pass has two
                for sent in backward_sends:
                    tracker.add_collective("CONTEXT_PARALLEL_GROUP", *sent)

            # TE's get_qkv_layout copies the values, a view of the projection's output: the output is not saved.
            return _Kernel.apply(makes, works, *(each.contiguous() for each in (query, key, value)))

    return FlashAttention


def _sent(way: str, parts: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the communication of context-parallel attention in the forward and in the backward pass.

    Args:
        way: Megatron's `cp_comm_type`.
        parts: context-parallel size.
        query, key, value: one rank's tensors.

    Returns:
        For each pass, a list of (operation, calls, bytes); both are empty if `parts` is 1.
    """
    pair = key.nbytes + value.nbytes
    if parts == 1:
        return [], []
    if way == "all_gather":
        gathered = ("allgather_base", 2, parts * pair)
        return [gathered], [gathered, ("reduce_scatter_base", 2, parts * pair)]
    if way == "a2a":
        out = query.nbytes // query.shape[-1] * value.shape[-1]
        return [("alltoall_base", 4, query.nbytes + pair + out)], [("alltoall_base", 5, query.nbytes + pair + 2 * out)]
    passed = (parts - 1) * pair
    return [("send_recv", parts - 1, passed)], [("send_recv", parts - 1, 2 * passed)]


def _norm(self: LocalNorm, x: Tensor) -> Tensor:
    def makes(given: Tensor, *_: Tensor) -> tuple[Tensor, list[Tensor]]:
        rows = given.shape[:-1]
        return torch.empty_like(given), [given.new_empty(1 + self.centred, *rows, dtype=torch.float32)]

    return _Kernel.apply(makes, lambda *_: None, x, *self.parameters())


def _gated_norm(self: mamba_norm.RMSNorm, x: Tensor) -> Tensor:
    groups = x.shape[-1] // (self.group_size or x.shape[-1])

    def makes(given: Tensor, *_: Tensor) -> tuple[Tensor, list[Tensor]]:
        return torch.empty_like(given), [given.new_empty(groups, *given.shape[:-1], dtype=torch.float32)]

    return _Kernel.apply(makes, lambda *_: None, x, self.weight)


def _scan(tracker: Tracker) -> Callable[..., Tensor]:
    def scan(
        zxbcdt: Tensor, weight: Tensor, bias: Tensor | None, dt_bias: Tensor, A: Tensor, *, D: Tensor, chunk_size: int,
        headdim: int | None, ngroups: int, **_: Any,
    ) -> Tensor:  # fmt: skip
        batch, length, _width = zxbcdt.shape
        heads = A.shape[0]
        size = headdim or D.shape[1]
        inner = heads * size
        state = (weight.shape[0] - inner) // (2 * ngroups)
        chunks = -(-length // chunk_size)
        tokens = batch * length
        within = 2 * attended_tokens(min(chunk_size, length)) * (ngroups * state + inner)
        flops = tokens * (
            within + 4 * inner * state + 2 * inner * state / SCAN_CHUNK + 2 * weight.shape[1] * weight.shape[0]
        )

        def workspace(new: Callable[..., Tensor]) -> list[Tensor]:
            number = torch.float32
            return [
                new(batch, channels, length),  # after the convolution
                new(batch, heads, chunks, chunk_size, dtype=number),  # dt
                new(batch, heads, chunks, chunk_size, dtype=number),  # cumulative sum of dt
                new(batch, chunks, heads, size, state, dtype=number),  # states
                new(batch, chunks, ngroups, chunk_size, chunk_size, dtype=number),  # C B
            ]

        def makes(*_: Tensor) -> tuple[Tensor, list[Tensor]]:
            tracker.add_flops(flops)
            work = workspace(zxbcdt.new_empty)
            out = zxbcdt.new_empty(batch, length, inner)
            ungated = torch.empty_like(out)
            del work
            return out, [ungated]

        channels = weight.shape[0]

        # The closure must not hold forward tensors: it lives as long as the graph, saved tensors only until backward.
        def works(projected: Tensor, *_: Tensor) -> None:
            tracker.add_flops(3 * flops)  # the forward pass again, then twice as much
            new = projected.new_empty
            work = [*workspace(new), new(batch, chunks, heads, size, state, dtype=torch.float32)]
            work.append(new(batch, length, channels))
            del work

        given = [zxbcdt, weight, *([] if bias is None else [bias]), dt_bias, A, D]
        return _Kernel.apply(makes, works, *given)

    return scan


def _permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int | None = None, **_: Any
) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
    places = torch.empty(num_out_tokens or tokens.shape[0], dtype=torch.long)
    chosen = None if probs is None else probs.reshape(-1).index_select(0, places)
    return tokens.index_select(0, places), chosen, places, None, None


def _sort_chunks(tokens: Tensor, *_: Any, probs: Tensor | None = None, **__: Any) -> tuple[Tensor, Tensor | None]:
    """Stand in for `sort_chunks_by_idxs`: copy tokens and probabilities unsorted, which allocates the same memory."""
    return tokens * 1, None if probs is None else probs * 1


def _splits(imbalance: float) -> Callable[..., Any]:
    def preprocess(self: Any, routing_map: Tensor) -> Any:
        """Stand in for `MoEAlltoAllTokenDispatcher.preprocess`, as if all ranks sent this rank equally many tokens."""
        if self.ep_size > 1 or self.tp_size > 1:
            token_dispatcher.gather_from_sequence_parallel_region(routing_map.sum(dim=0).long(), group=self.tp_ep_group)
        self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        here = _tokens(self, self.num_out_tokens / self.ep_size, imbalance, routing_map.size(0))
        self.input_splits = _evenly(self.num_out_tokens - here, self.ep_size - 1).tolist()
        self.input_splits.insert(self.ep_rank, here)
        self.output_splits = [here] * self.ep_size
        self.output_splits_tp = np.full(self.tp_size, here * self.ep_size)
        per_rank = np.tile(_evenly(here, self.num_local_experts), (self.tp_size * self.ep_size, 1))
        self.num_global_tokens_per_local_expert = per_rank
        return per_rank.sum(axis=0)

    return preprocess


def _share(imbalance: float) -> Callable[..., Any]:
    def postprocess(self: Any, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Stand in for `MoEAllGatherTokenDispatcher.dispatch_postprocess`, as if experts got equally many tokens."""
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.hidden_shape_before_permute = hidden.shape
        self.local_map, local_probs = self.routing_map[:, local].contiguous(), probs[:, local].contiguous()
        tokens, experts = self.routing_map.shape
        mean = tokens * self.config.moe_router_topk * self.num_local_experts / experts
        count = _tokens(self, mean, imbalance if self.ep_size > 1 else 1.0, tokens)
        permuted, chosen, self.reversed_local_input_permutation_mapping, *_ = token_dispatcher.permute(
            hidden, self.local_map, local_probs, count
        )
        self.local_probs, self.routing_map = chosen, None
        return permuted, _evenly(count, self.num_local_experts), self.local_probs

    return postprocess


def _tokens(dispatcher: Any, mean: float, imbalance: float, tokens: int) -> int:
    """Return how many token copies this rank's experts receive: `mean` x `imbalance`, up to the possible maximum.

    Args:
        dispatcher: Megatron's token dispatcher.
        mean: mean over expert-parallel ranks.
        imbalance: ratio of this rank's number to the mean.
        tokens: number of tokens, each routed to at most top-k of the rank's experts.
    """
    return min(round(mean * imbalance), tokens * min(dispatcher.config.moe_router_topk, dispatcher.num_local_experts))


def _evenly(tokens: int, experts: int) -> Any:
    """Divide tokens evenly among experts, `[experts]`; the first experts receive the remainder."""
    return np.full(experts, tokens // max(1, experts)) + (np.arange(experts) < tokens % max(1, experts))


def _with_lists(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `SequentialMLP.forward` to convert the token counts to an array, because it calls their `tolist()`."""

    def wrapped(self: Any, hidden: Tensor, tokens_per_expert: Any, probs: Tensor) -> Any:
        return forward(self, hidden, np.asarray(tokens_per_expert), probs)

    return wrapped
