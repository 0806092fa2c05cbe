"""Roofline estimate of a training step's time, to rank layouts before any of them runs.

The estimate is not calibrated on GPUs: it serves to compare layouts, not to predict absolute times. Its terms, per
pipeline rank and micro-batch of T tokens on a GPU (T = micro-batch x sequence length / CP), with hidden size h, are:

- compute: FLOPs (three times the forward pass's, plus recomputation, also within the backward passes of flash attention
  and the Mamba-2 scan) at `COMPUTE` of the peak; or the memory traffic of the weights (read twice, their FP32 gradient
  read and written) if that takes longer; separately for dense weights and experts
- memory: all other reads and writes of kernels: `MOVES` times the bytes kept for the backward pass
- TP: T x h in BF16 around every pair of linear layers, all-reduced twice, or gathered and scattered as often with
  sequence parallelism; nothing overlaps except the backward pass's gather of the input
- EP: the tokens of a sequence-parallel rank to their experts and back, forward and backward; no overlap
- CP: keys and values around the ring, once forward and twice backward, as far as they do not overlap with attention;
  Mamba-2's all-to-all between heads and tokens, without overlap
- PP: T x h to the next stage and its gradient back, without overlap
- bubble: (PP - 1) / virtual stages times the slowest rank's time per micro-batch
- DP, once per step: gradients reduced in FP32 and weights gathered; with `overlap_grad_reduce` and
  `overlap_param_gather` only the part that does not overlap with the last backward and the first forward pass
- optimizer, once per step: its states read and written

A run without training (`Layout.frozen`) has only the forward passes. With `mtp_only`, so has the main model on the
first pipeline rank; its blocks on later ranks also compute gradients of their inputs, but not of weights.

Every message also costs `LATENCY`.

A ring over several nodes uses as many network adapters per node as it has GPUs there, up to NVLink's bandwidth; an
all-to-all uses one adapter per GPU. TP, CP, EP and DP are placed in this order on the GPUs of a node, as in Megatron.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from nemo_ext.architecture import cost
from nemo_ext.architecture.activations import block_activation_bytes
from nemo_ext.architecture.gpus import Gpu
from nemo_ext.architecture.layout import Layout, stage_ranges
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.precision import bytes_per_parameter
from nemo_ext.architecture.widths import attention_widths, block_at, expert_width, layers, mamba_widths

COMPUTE, BANDWIDTH, LINKS = 0.6, 0.7, 0.7
"""Achieved fractions of peak rates for matrix products, memory-bound kernels and communication (choice)."""
MOVES = 4
"""Number of reads and writes, outside matrix products, of each byte kept for the backward pass (choice): it is written
and read, and so is its gradient."""
LATENCY = 20e-6
"""Latency of a message in seconds (choice)."""
NUMBER = 2
"""Bytes of each number sent, which is in BF16."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Estimated time of a step in seconds on the slowest pipeline rank, by the terms in the module's docstring.

    Attributes:
        compute: matrix products and other FLOPs, or memory traffic of the weights.
        memory: other reads and writes of kernels.
        tensor: tensor-parallel communication.
        expert: expert-parallel communication.
        context: context-parallel communication.
        pipeline: communication between pipeline stages.
        bubble: idle time of the pipeline.
        data: data-parallel communication.
        optimizer: update of the weights.
    """

    compute: float
    memory: float
    tensor: float
    expert: float
    context: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        """Total time of the step in seconds."""
        return sum(getattr(self, part.name) for part in fields(self))


class _Work(NamedTuple):
    """Work of a set of blocks per token, before a layout divides it.

    `flops` is the total of forward FLOPs; `core` is the part for attention scores, `mlp` and `moe` the parts for blocks
    of these kinds, and `experts` the part for routed experts. `again` is the FLOPs that kernels recompute in their
    backward pass. `pairs` is the number of pairs of linear layers, `routers` that of MoE blocks, and `rings` that of
    attention blocks. `routed` is the number of values sent to experts. Context parallelism sends `keys` values around
    the ring and `exchanged` values by all-to-all. The other fields are parameter counts.
    """

    flops: float = 0
    core: float = 0
    mlp: float = 0
    moe: float = 0
    experts: float = 0
    again: float = 0
    pairs: float = 0
    routed: float = 0
    routers: float = 0
    rings: float = 0
    keys: float = 0
    exchanged: float = 0
    sharded: float = 0
    replicated: float = 0
    expert_weights: float = 0
    expert_biases: float = 0


class Roofline:
    """Estimator of one model's step times on one kind of GPU.

    Args:
        architecture: the model; its cuts are ignored.
        gpu: peak rates of the GPU.
        gpus_per_node: number of GPUs per node.
        seq_length: sequence length; the model's own by default.
    """

    def __init__(
        self, architecture: Architecture, gpu: Gpu, *, gpus_per_node: int, seq_length: int | None = None
    ) -> None:
        self.architecture, self.gpu, self.per_node = architecture, gpu, gpus_per_node
        self.length = architecture.sequence_length(seq_length)
        works = [self._block(layer) for layer in layers(architecture)]
        counted = cost.mtp_parameters(architecture)
        self._mtp = _Work(
            flops=cost.mtp_forward_flops_per_token(architecture, seq_length=self.length),
            sharded=counted.sharded,
            replicated=counted.replicated,
            expert_weights=counted.experts,
            expert_biases=counted.experts_replicated,
        )
        self._sums = list(accumulate(works, _plus, initial=_Work()))
        # Cached, since a search evaluates thousands of layouts.
        self._kept = lru_cache(maxsize=None)(self._kept_bytes)
        self._of_rank = lru_cache(maxsize=None)(self._rank)

    def step(
        self,
        layout: Layout,
        pattern: Pattern,
        *,
        batch: int,
        overlap_reduce: bool = False,
        overlap_gather: bool = False,
        gathers_experts: bool = False,
    ) -> StepTime:
        """Estimate the time of a step.

        Args:
            layout: parallel layout; its `micro_batches` is ignored.
            pattern: the model's blocks with pipeline cuts.
            batch: number of sequences in the global batch.
            overlap_reduce: whether gradients are reduced during the backward pass.
            overlap_gather: whether weights are gathered during the forward pass.
            gathers_experts: whether every rank of an expert-parallel group gets all tokens (dispatcher `allgather`).

        Raises:
            ValueError: the number of stages does not match the layout.
        """
        count = batch / (layout.micro_batch_size * layout.data_parallel)
        stages = stage_ranges(pattern, layout)
        slowest: tuple[float, ...] | None = None
        after = (0.0, 0.0)
        for rank in range(layout.pipeline_parallel):
            mine = tuple(stages[rank :: layout.pipeline_parallel])
            main = self._of_rank(mine, rank == 0, rank == layout.pipeline_parallel - 1)
            mtp = self._mtp if rank == layout.pipeline_parallel - 1 else _Work()
            if layout.mtp_only:
                trained = mtp
                of_main = self._micro_batch(layout, main, mine, gathers_experts, passes=2 if rank else 1)
                of_mtp = self._micro_batch(layout, mtp, (), gathers_experts)
                parts = tuple(map(add, of_main, of_mtp))
            else:
                work = _plus(main, mtp)
                trained = _Work() if layout.frozen else work
                parts = self._micro_batch(layout, work, mine, gathers_experts, passes=1 if layout.frozen else 3)
            if slowest is None or sum(parts) > sum(slowest):
                slowest = parts
            hidden = sum(parts) / 3
            once = self._once(layout, trained, 2 * hidden * overlap_reduce, hidden * overlap_gather)
            after = max(after, once, key=sum)
        assert slowest is not None
        names = ("compute", "memory", "tensor", "expert", "context", "pipeline")
        bubble = (layout.pipeline_parallel - 1) / layout.virtual_stages * sum(slowest)
        times = {name: count * part for name, part in zip(names, slowest, strict=True)}
        return StepTime(**times, bubble=bubble, data=after[0], optimizer=after[1])

    def _block(self, layer: int) -> _Work:
        model, block = self.architecture, block_at(self.architecture, layer)
        flops = cost.block_forward_flops_per_token(model, layer, seq_length=self.length)
        counted = cost.block_parameters(model, layer)
        weights = {
            "sharded": counted.sharded,
            "replicated": counted.replicated,
            "expert_weights": counted.experts,
            "expert_biases": counted.experts_replicated,
        }
        if block.is_linear:
            return _Work(flops=flops, **weights)
        if block.kind == "*":
            query, key, projected = attention_widths(model, block)
            core = flops - 2 * model.hidden_size * (projected + query)
            return _Work(flops=flops, core=core, again=core / 2, pairs=1, rings=1, keys=2 * key, **weights)
        if block.kind == "-":
            return _Work(flops=flops, mlp=flops, pairs=1, **weights)
        if block.kind == "M":
            inner, _, projected = mamba_widths(block)
            core = flops - 2 * model.hidden_size * (projected + inner)
            return _Work(flops=flops, again=core, pairs=1, exchanged=projected + inner, **weights)
        routed = 2 * (counted.experts + counted.experts_replicated) / block.size("experts") * block.size("topk")
        return _Work(
            flops=flops,
            moe=flops,
            experts=routed,
            pairs=1 if block.size("shared") else 0,
            routed=block.size("topk") * expert_width(model, block),
            routers=1,
            **weights,
        )

    def _rank(self, stages: tuple[range, ...], first: bool, last: bool) -> _Work:
        model, work = self.architecture, _Work()
        for numbers in stages:
            work = _plus(work, map(sub, self._sums[numbers[-1]], self._sums[numbers[0] - 1]))
        if first:
            counted = cost.embedding_parameters(model)
            work = _plus(work, _Work(sharded=counted.sharded, replicated=counted.replicated))
        if last:
            counted = cost.head_parameters(model)
            flops = cost.head_forward_flops_per_token(model)
            head = _Work(flops=flops, pairs=0.5, sharded=counted.sharded, replicated=counted.replicated)
            work = _plus(work, head)
        return work

    def _micro_batch(
        self, layout: Layout, work: _Work, stages: tuple[range, ...], gathers_experts: bool, *, passes: int = 3
    ) -> tuple[float, ...]:
        """Estimate the time of a micro-batch on a pipeline rank.

        Args:
            layout: parallel layout.
            work: work of the pipeline rank.
            stages: 1-based block numbers of each of its stages.
            gathers_experts: as in `step`.
            passes: 1 for the forward pass, 2 with gradients of the inputs, 3 with those of the weights too.

        Returns:
            Seconds of compute, memory traffic, and TP, EP, CP and PP communication.
        """
        model, gpu = self.architecture, self.gpu
        tensor, context, expert = layout.tensor_parallel, layout.context_parallel, layout.expert_parallel
        tokens = self.length * layout.micro_batch_size / context
        backward = passes > 1
        full = backward and layout.recompute == "full"
        modules = layout.recompute_modules if backward and layout.recompute == "selective" else ()
        again = work.flops if full else 0.0
        for module, part in (("core_attn", work.core), ("mlp", work.mlp), ("moe", work.moe)):
            again += part if module in modules else 0.0
        # Matrix products, or the memory traffic of their weights: of experts, and of everything else.
        reached, bandwidth = COMPUTE * gpu.flops, BANDWIDTH * gpu.bandwidth
        factor = tokens / tensor / reached
        products = passes + (again / work.flops if work.flops else 0)
        weight, gradient, _ = bytes_per_parameter(layout.precision)
        trains = passes == 3
        moved = (products - trains) * weight + 2 * gradient * trains
        experts = max(
            products * work.experts * factor, moved * work.expert_weights / (expert * layout.expert_tensor) / bandwidth
        )
        dense = max(
            (products * (work.flops - work.experts) + work.again * backward) * factor,
            moved * (work.sharded / tensor + work.replicated) / bandwidth,
        )
        kept = self._kept(stages, layout.sequence_parallel, tensor, layout.expert_tensor, layout.precision)
        memory = (MOVES * (1 + backward) / 2 + full) * kept * tokens / bandwidth
        # Communication.
        wide = tokens * model.hidden_size * NUMBER
        gathered = 2 + 2 * backward + 2 * full
        in_tensor = gathered * work.pairs * (wide * (tensor - 1) / tensor / self._ring(tensor, 1) + LATENCY)
        in_tensor = in_tensor if tensor > 1 else 0.0
        in_expert = self._experts(layout, work, tokens, gathered, gathers_experts)
        part = work.keys * tokens / tensor * NUMBER
        ring = (1 + 2 * backward) * (context - 1) * (part / self._ring(context, tensor) + work.rings * LATENCY)
        hides = (3.5 if backward else 1) * work.core * factor
        exchange = (1 + backward + full) * work.exchanged * tokens / tensor * NUMBER
        in_context = max(0.0, ring - hides) + self._all_to_all(exchange, context, tensor)
        passed = 0.0
        if layout.pipeline_parallel > 1 and stages:
            rows = wide / (tensor if layout.sequence_parallel else 1)
            far = tensor * context * layout.data_parallel >= self.per_node
            passed = (
                (1 + backward)
                * layout.virtual_stages
                * (LATENCY + rows / (LINKS * (gpu.network if far else gpu.nvlink)))
            )
        return dense + experts, memory, in_tensor, in_expert, in_context, passed

    def _experts(self, layout: Layout, work: _Work, tokens: float, times: int, gathers: bool) -> float:
        local = tokens / (layout.tensor_parallel if layout.sequence_parallel else 1)
        group = layout.expert_parallel * layout.expert_tensor
        if gathers:
            numbers = work.routers * local * self.architecture.hidden_size * (group - 1)
            return times * numbers * NUMBER / self._ring(group, 1)
        sent = times * local * work.routed * NUMBER
        among = sent * (layout.expert_tensor - 1) / self._ring(layout.expert_tensor, 1)
        start = times * work.routers * LATENCY if group > 1 else 0.0
        return start + among + self._all_to_all(sent, layout.expert_parallel, layout.expert_tensor)

    def _once(self, layout: Layout, work: _Work, hides_reduce: float, hides_gather: float) -> tuple[float, float]:
        """Estimate the seconds of what happens once per step.

        Args:
            layout: parallel layout.
            work: work of a pipeline rank.
            hides_reduce: seconds of computation that overlap with the reduction of gradients.
            hides_gather: seconds of computation that overlap with the gathering of weights.

        Returns:
            Seconds of data-parallel communication that does not overlap, and seconds of the optimizer.
        """
        weight, gradient, state = bytes_per_parameter(layout.precision)
        tensor, dense = layout.tensor_parallel, layout.data_parallel * layout.context_parallel
        split = layout.expert_parallel * layout.expert_tensor
        expert = dense * tensor // split
        reduced = gathered = updated = 0.0
        for count, ranks, stride in (
            (work.sharded / tensor + work.replicated, dense, tensor),
            (work.expert_weights / split + work.expert_biases / layout.expert_parallel, expert, split),
        ):
            around = count * (ranks - 1) / ranks / self._ring(ranks, stride)
            # An all-reduce is a reduce-scatter and an all-gather.
            reduced += gradient * around * (1 if layout.distributed_optimizer else 2)
            gathered += weight * around if layout.distributed_optimizer else 0.0
            updated += (2 * state + gradient + weight) * count / (ranks if layout.distributed_optimizer else 1)
        exposed = max(0.0, reduced - hides_reduce) + max(0.0, gathered - hides_gather)
        return exposed, updated / (BANDWIDTH * self.gpu.bandwidth)

    def _near(self, ranks: int, stride: int) -> int:
        """Return how many GPUs of a group share a node; the group has `ranks` GPUs whose numbers are `stride` apart."""
        return max(1, min(ranks, self.per_node // stride))

    def _ring(self, ranks: int, stride: int) -> float:
        """Return the bandwidth in bytes/s of a ring of `ranks` GPUs whose numbers are `stride` apart."""
        near = self._near(ranks, stride)
        return LINKS * (self.gpu.nvlink if near >= ranks else min(self.gpu.nvlink, near * self.gpu.network))

    def _all_to_all(self, sent: float, ranks: int, stride: int) -> float:
        """Estimate the seconds of an all-to-all among `ranks` GPUs that are `stride` apart; each sends `sent` bytes."""
        near = self._near(ranks, stride)
        far = sent * (ranks - near) / ranks / (LINKS * self.gpu.network)
        return max(far, sent * (near - 1) / ranks / (LINKS * self.gpu.nvlink))

    def _kept_bytes(
        self, stages: Sequence[range], sequence_parallel: bool, tensor: int, expert_tensor: int, precision: str
    ) -> float:
        """Compute the bytes per token that one GPU keeps for the backward pass, without recomputation.

        Args:
            stages: 1-based block numbers of each stage on the GPU's pipeline rank.
            sequence_parallel: whether norms and residuals are also split over TP.
            tensor: tensor parallel size.
            expert_tensor: expert tensor parallel size.
            precision: training precision.
        """
        layout = Layout(
            tensor_parallel=tensor,
            expert_tensor_parallel=expert_tensor,
            sequence_parallel=sequence_parallel,
            precision=precision,
        )
        return (
            sum(
                block_activation_bytes(self.architecture, layer, layout, seq_length=self.length)
                for numbers in stages
                for layer in numbers
            )
            / self.length
        )


def _plus(work: _Work, other: Iterable[float]) -> _Work:
    return _Work(*map(add, work, other))
