"""Predicted time of a training step: the sum of its kernels at the rates that they reach on a GPU (`gpus.py`).

The terms, per pipeline rank and micro-batch of T tokens on a GPU (T = micro-batch x sequence length / CP), with hidden
size h, are:

- compute: matrix products, each at the rate of its smallest size on this GPU, three times (forward, and the gradients
  of inputs and weights) and once more if recomputed, or the memory traffic of the weights (read twice, their FP32
  gradient read and written) if that takes longer, separately for dense weights and experts; attention and the Mamba-2
  scan, forward and backward
- memory: all other reads and writes of kernels: `MOVES` times the bytes kept for the backward pass, half of them in
  each pass, and another forward pass with full recomputation
- TP: T x h in BF16 around every pair of linear layers, all-reduced twice, and once more if recomputed, or gathered and
  scattered as often with sequence parallelism; nothing overlaps except the backward pass's gather of the input; with
  `tp_comm_overlap`, all but the first of TP chunks
- EP: the tokens of a sequence-parallel rank to their experts and back, forward and backward, without overlap; the flex
  dispatcher sends a token once to each node and each rank that has one of its experts, `alltoall` once to each expert
- CP: keys and values around the ring, once forward and twice backward, as far as they do not overlap with attention;
  Mamba-2's all-to-all between heads and tokens, without overlap
- PP: T x h to the next stage and its gradient back, without overlap
- bubble: idle time of the slowest rank in Megatron's schedule, simulated with the stages' FLOPs (`pipeline.idle_share`)
- DP, once per step: gradients reduced (`Layout.fp32_gradients`) and weights gathered; with
  `overlap_grad_reduce` and `overlap_param_gather` only the part that does not overlap with the last backward and the
  first forward pass
- optimizer, once per step: its states read and written

A run without training (`Layout.frozen`) has only the forward passes. With `mtp_only`, so has the main model on the
first pipeline rank; its blocks on later ranks also compute gradients of their inputs, but not of weights.

A ring over several nodes uses as many network adapters per node as it has GPUs there, up to the links within the
node; an all-to-all uses one adapter per GPU. TP, CP, EP and DP are placed in this order on the GPUs of a node, as in
Megatron.

Not counted: uneven routing, slow ranks and networks shared with others, checkpoints, and time in which a GPU waits for
its host.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from operator import add, sub
from typing import NamedTuple

from nemo_ext.architecture import cost
from nemo_ext.architecture.activations import block_activation_bytes
from nemo_ext.architecture.blocks import Block
from nemo_ext.architecture.gpus import Gpu
from nemo_ext.architecture.layout import Layout, stage_ranges
from nemo_ext.architecture.model import Architecture
from nemo_ext.architecture.pattern import Pattern
from nemo_ext.architecture.pipeline import idle_share
from nemo_ext.architecture.widths import attention_widths, block_at, expert_width, first_width, layers, mamba_widths

ERROR = 0.15
"""Error stated for dense models, chosen after comparison with published runs (docs/throughput.md)."""
EXPERTS_ERROR = 0.2
"""The same for models with experts; Nemotron 3 alone was compared, and other models deviate by more."""
BACKWARD_SCORES = 2.5
"""FLOPs of attention's backward pass relative to its forward pass: five products instead of two."""
MOVES = 4
"""Number of reads and writes, outside matrix products, of each byte kept for the backward pass (choice): it is written
and read, and so is its gradient."""
SIMULATED = 4
"""Largest number of simulated micro-batches, relative to the number of pipeline ranks."""
NUMBER = 2
"""Bytes of a number in BF16, such as those sent."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted time of a step in seconds on the slowest pipeline rank, by the terms in the module's docstring.

    Attributes:
        compute: matrix products, attention and scans, or memory traffic of the weights.
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

    def __add__(self, other: "StepTime") -> "StepTime":
        return StepTime(**{part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)})


class _Shape(NamedTuple):
    """Sizes that the time of a block's kernels depends on: tokens per micro-batch on a GPU, TP, EP and ETP."""

    tokens: float
    tensor: int
    expert: int
    expert_tensor: int


class _Work(NamedTuple):
    """Work of a set of blocks for a micro-batch on one GPU.

    Attributes:
        dense: seconds of forward products outside routed experts.
        mlp: part of `dense` in MLP blocks.
        moe: part of `dense` in MoE blocks.
        experts: seconds of the routed experts' forward products.
        scores: seconds of attention's forward pass.
        backward: seconds of attention's backward pass.
        scan: seconds of Mamba-2's forward scan.
        pairs: number of pairs of linear layers.
        mlp_pairs: part of `pairs` in MLP blocks.
        moe_pairs: part of `pairs` in MoE blocks.
        routed: values per token sent to experts.
        near: values per token sent to experts on other GPUs of the node.
        far: values per token sent to experts on other nodes.
        routers: number of MoE blocks.
        rings: number of attention blocks.
        keys: values per token that context parallelism sends around the ring.
        exchanged: values per token that context parallelism sends by all-to-all.
        sharded, replicated, expert_weights, expert_biases: parameter counts of the blocks, before a layout divides
            them.
    """

    dense: float = 0
    mlp: float = 0
    moe: float = 0
    experts: float = 0
    scores: float = 0
    backward: float = 0
    scan: float = 0
    pairs: float = 0
    mlp_pairs: float = 0
    moe_pairs: float = 0
    routed: float = 0
    near: float = 0
    far: float = 0
    routers: float = 0
    rings: float = 0
    keys: float = 0
    exchanged: float = 0
    sharded: float = 0
    replicated: float = 0
    expert_weights: float = 0
    expert_biases: float = 0


class TimeModel:
    """Predicted step times of one model on one kind of GPU.

    Args:
        architecture: the model; its cuts are ignored.
        gpu: rates of the GPU.
        gpus_per_node: number of GPUs per node.
        seq_length: sequence length; the model's own by default.
        low: share of each block's parameters that are multiplied in FP8, by 0-based number; None: all in BF16.
        flex: whether the token dispatcher is `flex` rather than `alltoall`.
    """

    def __init__(
        self,
        architecture: Architecture,
        gpu: Gpu,
        *,
        gpus_per_node: int,
        seq_length: int | None = None,
        low: Mapping[int | None, float] | None = None,
        flex: bool = False,
    ) -> None:
        self.architecture, self.gpu, self.per_node = architecture, gpu, gpus_per_node
        self.length = architecture.sequence_length(seq_length)
        self.low, self.flex = dict(low or {}), flex
        # Cached, since a search evaluates thousands of layouts.
        self._blocks = lru_cache(maxsize=None)(self._block)
        self._sums = lru_cache(maxsize=None)(self._sum)
        self._kept = lru_cache(maxsize=None)(self._kept_bytes)
        self._of_rank = lru_cache(maxsize=None)(self._rank)
        self._idle = lru_cache(maxsize=None)(self._idle_micro_batches)

    def step(
        self,
        layout: Layout,
        pattern: Pattern,
        *,
        batch: int,
        overlap_reduce: bool = False,
        overlap_gather: bool = False,
        overlap_tensor: bool = False,
        gathers_experts: bool = False,
    ) -> StepTime:
        """Estimate the time of a step.

        Args:
            layout: parallel layout; its `micro_batches` is ignored.
            pattern: the model's blocks with pipeline cuts.
            batch: number of sequences in the global batch.
            overlap_reduce: whether gradients are reduced during the backward pass.
            overlap_gather: whether weights are gathered during the forward pass.
            overlap_tensor: whether tensor-parallel communication overlaps with products (`tp_comm_overlap`).
            gathers_experts: whether every rank of an expert-parallel group gets all tokens (dispatcher `allgather`).

        Raises:
            ValueError: the number of stages does not match the layout, the batch is not divisible by micro-batch x DP,
                or the precision is FP32, for which no rates are known.
        """
        if layout.precision == "fp32":
            raise ValueError(
                "the step time in FP32 cannot be predicted, as GPUs' files have no rates for it; set megatron.bf16=true"
            )
        count, rest = divmod(batch, layout.micro_batch_size * layout.data_parallel)
        if rest:
            raise ValueError(
                f"megatron.global_batch_size={batch} is not divisible by micro-batch x DP = "
                f"{layout.micro_batch_size} x {layout.data_parallel}; change one of them"
            )
        stages = stage_ranges(pattern, layout)
        shape = self._shape(layout)
        slowest: tuple[float, ...] | None = None
        after = (0.0, 0.0)
        for rank in range(layout.pipeline_parallel):
            mine = tuple(stages[rank :: layout.pipeline_parallel])
            last = rank == layout.pipeline_parallel - 1
            main = self._of_rank(mine, rank == 0, last, shape)
            mtp = self._prediction(shape) if last else _Work()
            if layout.mtp_only:
                trained = mtp
                of_main = self._micro_batch(layout, main, mine, gathers_experts, passes=2 if rank else 1)
                of_mtp = self._micro_batch(layout, mtp, (), gathers_experts)
                parts = tuple(map(add, of_main, of_mtp))
            else:
                work = _plus(main, mtp)
                trained = _Work() if layout.frozen else work
                parts = self._micro_batch(layout, work, mine, gathers_experts, passes=1 if layout.frozen else 3)
            if last and not layout.mtp_only:
                parts = (parts[0], parts[1] + self._loss(layout, shape), *parts[2:])
            if overlap_tensor:
                parts = (*parts[:2], parts[2] / layout.tensor_parallel, *parts[3:])
            if slowest is None or sum(parts) > sum(slowest):
                slowest = parts
            hidden = sum(parts) / 3
            once = self._once(layout, trained, 2 * hidden * overlap_reduce, hidden * overlap_gather)
            after = max(after, once, key=sum)
        assert slowest is not None
        names = ("compute", "memory", "tensor", "expert", "context", "pipeline")
        bubble = self._idle(pattern, layout.pipeline_parallel, layout.virtual_stages, count) * sum(slowest)
        times = {name: count * part for name, part in zip(names, slowest, strict=True)}
        return StepTime(**times, bubble=bubble, data=after[0], optimizer=after[1])

    def _idle_micro_batches(self, pattern: Pattern, ranks: int, virtual: int, count: int) -> float:
        """Return the idle time of the slowest pipeline rank in a step of `count` micro-batches.

        The unit is the rank's time for one micro-batch. At most `SIMULATED` times the number of ranks are simulated;
        the idle time of further micro-batches is extrapolated from the second half of those.
        """
        if ranks == 1:
            return 0.0
        if count % (ranks if virtual > 1 else 1):
            return (ranks - 1) / virtual
        layout = Layout(pipeline_parallel=ranks, virtual_stages=virtual)
        stages = cost.per_stage(self.architecture.with_pattern(pattern), layout, seq_length=self.length)
        costs = [stage.forward_flops_per_token for stage in stages]
        slowest = max(sum(costs[rank::ranks]) for rank in range(ranks))

        def idle(number: int) -> float:
            share = idle_share(costs, replace(layout, micro_batches=number))
            assert share is not None
            return number * (sum(costs) / ranks / (1 - share) / slowest - 1)

        whole = min(count, SIMULATED * ranks)
        if whole == count:
            return idle(whole)
        half = whole // 2
        # Before the schedule settles, the idle time falls.
        return idle(whole) + (count - whole) * max(0.0, idle(whole) - idle(half)) / (whole - half)

    def _shape(self, layout: Layout) -> _Shape:
        """Return the sizes of a layout that the time of a block's kernels depends on."""
        tokens = self.length * layout.micro_batch_size / layout.context_parallel
        return _Shape(tokens, layout.tensor_parallel, layout.expert_parallel, layout.expert_tensor)

    def _loss(self, layout: Layout, shape: _Shape) -> float:
        """Return the seconds per micro-batch of reads and writes of the logits, in the training precision and FP32."""
        weight, _, _ = layout.bytes_per_parameter
        numbers = shape.tokens * self.architecture.vocab_size / layout.tensor_parallel
        return (1 if layout.frozen else 2) * (weight + 4) * numbers / self.gpu.memory

    def _product(self, rows: float, columns: float, shape: _Shape, low: float, *, grouped: float = 0) -> float:
        """Return the seconds of a forward product, whose weight has `columns` outputs and `rows` inputs on this GPU.

        Args:
            rows: inputs.
            columns: outputs.
            shape: sizes of the layout.
            low: share that is multiplied in FP8.
            grouped: tokens of each of a rank's experts; 0 for a dense weight.
        """
        if not rows or not columns:
            return 0.0
        flops, sizes = 2 * rows * columns * shape.tokens, (grouped or shape.tokens, rows, columns)
        in_low = low / self.gpu.product(bool(grouped), "fp8", *sizes) if low else 0.0
        return flops * (in_low + (1 - low) / self.gpu.product(bool(grouped), "bf16", *sizes))

    def _block(self, block: Block, layer: int, shape: _Shape, low: float) -> _Work:
        """Return the work of a block; `layer` is the 1-based number of any equal block."""
        model, gpu, hidden, ways = self.architecture, self.gpu, self.architecture.hidden_size, shape.tensor
        counted = cost.block_parameters(model, layer)
        weights = {
            "sharded": counted.sharded,
            "replicated": counted.replicated,
            "expert_weights": counted.experts,
            "expert_biases": counted.experts_replicated,
        }
        if block.is_linear:
            return _Work(dense=self._product(hidden, hidden / ways, shape, low), **weights)
        flops = cost.block_forward_flops_per_token(model, layer, seq_length=self.length)
        if block.kind == "*":
            query, key, projected = attention_widths(model, block)
            dense = self._product(hidden, projected / ways, shape, low)
            dense += self._product(query / ways, hidden, shape, low)
            core = (flops - 2 * hidden * (projected + query)) * shape.tokens / ways
            scores = core / (gpu.sustained * gpu.attention.forward)
            backward = BACKWARD_SCORES * core / (gpu.sustained * gpu.attention.backward)
            return _Work(dense=dense, scores=scores, backward=backward, pairs=1, rings=1, keys=2 * key, **weights)
        if block.kind == "-":
            dense = self._mlp(hidden, block.size("ffn"), shape, low)
            return _Work(dense=dense, mlp=dense, pairs=1, mlp_pairs=1, **weights)
        if block.kind == "M":
            inner, _, projected = mamba_widths(block)
            dense = self._product(hidden, projected / ways, shape, low)
            dense += self._product(inner / ways, hidden, shape, low)
            core = (flops - 2 * hidden * (projected + inner)) * shape.tokens / ways
            return _Work(dense=dense, scan=core / gpu.scan, pairs=1, exchanged=projected + inner, **weights)
        width, experts, topk = expert_width(model, block), block.size("experts"), block.size("topk")
        split = _Shape(shape.tokens / ways, shape.expert_tensor, shape.expert, shape.expert_tensor)
        arriving = split.tokens * topk * shape.expert * shape.expert_tensor / experts
        # Every rank of an expert-tensor group multiplies all tokens of the group by its part of the weights.
        group = split._replace(tokens=split.tokens * topk * shape.expert_tensor)
        near, far = self._copies(topk, shape)
        latent = self._product(hidden, 2 * block.size("latent") / ways, shape, low)
        dense = self._mlp(hidden, block.size("shared"), shape, low) + latent
        dense += self._product(hidden, experts, split, 0.0)
        shared = 1 if block.size("shared") else 0
        return _Work(
            dense=dense,
            moe=dense,
            experts=self._mlp(width, block.size("ffn"), group, low, grouped=arriving),
            pairs=shared,
            moe_pairs=shared,
            routed=topk * width,
            near=near * width,
            far=far * width,
            routers=1,
            **weights,
        )

    def _copies(self, topk: int, shape: _Shape) -> tuple[float, float]:
        """Return the mean number of copies of a token sent to other GPUs of its node, and to other nodes.

        Experts are chosen evenly. Between nodes, `flex` sends one copy to each node, which passes it on to its ranks.
        """
        ranks = shape.expert
        near = self._near(ranks, shape.expert_tensor)
        if not self.flex:
            return topk * (near - 1) / ranks, topk * (ranks - near) / ranks
        nodes = ranks / near
        hit_rank, hit_node = 1 - (1 - 1 / ranks) ** topk, 1 - (1 - 1 / nodes) ** topk
        # Of the copies from other nodes, those for another rank than the one that receives them are passed on.
        return (near - 1) * hit_rank * nodes, (nodes - 1) * hit_node

    def _mlp(self, width: float, ffn: int, shape: _Shape, low: float, *, grouped: float = 0) -> float:
        first = first_width(self.architecture, ffn) / shape.tensor
        up = self._product(width, first, shape, low, grouped=grouped)
        return up + self._product(ffn / shape.tensor, width, shape, low, grouped=grouped)

    def _sum(self, shape: _Shape) -> list[_Work]:
        """Return cumulative work: item n is the work of the first n blocks; item 0 is empty."""
        model = self.architecture
        first: dict[tuple[Block, float], int] = {}
        works = []
        for layer in layers(model):
            block, low = block_at(model, layer), self.low.get(layer - 1, 0.0)
            works.append(self._blocks(block, first.setdefault((block, low), layer), shape, low))
        return list(accumulate(works, _plus, initial=_Work()))

    def _prediction(self, shape: _Shape) -> _Work:
        """Return the work of all depths of multi-token prediction, which is in BF16."""
        model = self.architecture
        if not model.pattern.mtp:
            return _Work()
        hidden, counted = model.hidden_size, cost.mtp_parameters(model)
        rate = self.gpu.product(False, "bf16", shape.tokens, hidden / shape.tensor)
        flops = cost.mtp_forward_flops_per_token(model, seq_length=self.length)
        return _Work(
            dense=flops * shape.tokens / shape.tensor / rate,
            sharded=counted.sharded,
            replicated=counted.replicated,
            expert_weights=counted.experts,
            expert_biases=counted.experts_replicated,
        )

    def _rank(self, stages: tuple[range, ...], first: bool, last: bool, shape: _Shape) -> _Work:
        model, work, sums = self.architecture, _Work(), self._sums(shape)
        for numbers in stages:
            work = _plus(work, map(sub, sums[numbers[-1]], sums[numbers[0] - 1]))
        if first:
            counted = cost.embedding_parameters(model)
            work = _plus(work, _Work(sharded=counted.sharded, replicated=counted.replicated))
        if last:
            counted = cost.head_parameters(model)
            dense = self._product(model.hidden_size, model.vocab_size / shape.tensor, shape, self.low.get(None, 0.0))
            head = _Work(dense=dense, pairs=0.5, sharded=counted.sharded, replicated=counted.replicated)
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
        repeats = {name: full or name in modules for name in ("core_attn", "mlp", "moe")}
        # Matrix products, or the memory traffic of their weights: of experts, and of everything else.
        weight, gradient, _ = layout.bytes_per_parameter
        trains = passes == 3

        def traffic(weights: float, products: float) -> float:
            return ((products - trains) * weight + 2 * gradient * trains) * weights / gpu.memory

        expert_passes = passes + repeats["moe"]
        experts = max(
            expert_passes * work.experts, traffic(work.expert_weights / (expert * layout.expert_tensor), expert_passes)
        )
        again = work.dense if full else repeats["mlp"] * work.mlp + repeats["moe"] * work.moe
        dense = max(passes * work.dense + again, traffic(work.sharded / tensor + work.replicated, passes + full))
        scores = (1 + repeats["core_attn"]) * work.scores + backward * work.backward
        dense += scores + (1 + full + 2 * backward) * work.scan
        kept = self._kept(stages, layout.sequence_parallel, tensor, layout.expert_tensor, layout.precision)
        memory = MOVES * (1 + backward + full) / 2 * kept * tokens / gpu.memory
        # Communication.
        wide = tokens * model.hidden_size * NUMBER
        messages = (2 + 2 * backward + 2 * full) * work.pairs
        if not full:
            messages += 2 * (repeats["mlp"] * work.mlp_pairs + repeats["moe"] * work.moe_pairs)
        message = wide * (tensor - 1) / tensor / self._ring(tensor, 1) + self._latency(tensor, 1)
        in_tensor = messages * message if tensor > 1 else 0.0
        in_expert = self._experts(layout, work, tokens, 2 + 2 * backward + 2 * repeats["moe"], gathers_experts)
        part = work.keys * tokens / tensor * NUMBER
        message = part / self._ring(context, tensor) + work.rings * self._latency(context, tensor)
        ring = (1 + 2 * backward) * (context - 1) * message
        hides = work.scores + backward * work.backward
        exchange = (1 + backward + full) * work.exchanged * tokens / tensor * NUMBER
        in_context = max(0.0, ring - hides) + self._all_to_all(exchange, context, tensor)
        passed = 0.0
        if layout.pipeline_parallel > 1 and stages:
            rows = wide / (tensor if layout.sequence_parallel else 1)
            link = gpu.between if tensor * context * layout.data_parallel >= self.per_node else gpu.node
            passed = (1 + backward) * layout.virtual_stages * (link.latency + rows / link.all_to_all)
        return dense + experts, memory, in_tensor, in_expert, in_context, passed

    def _experts(self, layout: Layout, work: _Work, tokens: float, times: int, gathers: bool) -> float:
        local = tokens / (layout.tensor_parallel if layout.sequence_parallel else 1)
        group = layout.expert_parallel * layout.expert_tensor
        if gathers:
            numbers = work.routers * local * self.architecture.hidden_size * (group - 1)
            return times * numbers * NUMBER / self._ring(group, 1)
        among = times * local * work.routed * NUMBER * (layout.expert_tensor - 1)
        among /= self._ring(layout.expert_tensor, 1)
        start = times * work.routers * self._latency(group, 1) if group > 1 else 0.0
        inside = self._inside(self.gpu.node.all_to_all, self._near(layout.expert_parallel, layout.expert_tensor))
        near, far = work.near / inside, work.far / self.gpu.between.all_to_all
        return start + among + times * local * NUMBER * max(near, far)

    def _once(self, layout: Layout, work: _Work, hides_reduce: float, hides_gather: float) -> tuple[float, float]:
        """Estimate the seconds per step of data-parallel communication and of the optimizer.

        Args:
            layout: parallel layout.
            work: work of a pipeline rank.
            hides_reduce: seconds of computation that overlap with the reduction of gradients.
            hides_gather: seconds of computation that overlap with the gathering of weights.

        Returns:
            Seconds of data-parallel communication that does not overlap, and seconds of the optimizer.
        """
        weight, gradient, state = layout.bytes_per_parameter
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
        return exposed, updated / self.gpu.memory

    def _near(self, ranks: int, stride: int) -> int:
        """Return how many GPUs of a group share a node; the group has `ranks` GPUs whose numbers are `stride` apart."""
        return max(1, min(ranks, self.per_node // stride))

    def _latency(self, ranks: int, stride: int) -> float:
        """Return the seconds of an empty message in a group of `ranks` GPUs whose numbers are `stride` apart."""
        return (self.gpu.node if self._near(ranks, stride) >= ranks else self.gpu.between).latency

    def _inside(self, rate: float, near: int) -> float:
        """Return the bytes/s that a GPU sends to `near` - 1 others of its node, given its `rate` to all of them."""
        return rate * max(1, near - 1) / max(1, self.per_node - 1) if self.gpu.node.mesh else rate

    def _ring(self, ranks: int, stride: int) -> float:
        """Return the bandwidth in bytes/s of a ring of `ranks` GPUs whose numbers are `stride` apart."""
        near = self._near(ranks, stride)
        inside = self._inside(self.gpu.node.gather, near)
        if near >= ranks:
            return inside
        return near * self.gpu.between.gather if near == 1 else min(inside, near * self.gpu.between.gather)

    def _all_to_all(self, sent: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-to-all among `ranks` GPUs that are `stride` apart; each sends `sent` bytes."""
        near = self._near(ranks, stride)
        far = sent * (ranks - near) / ranks / self.gpu.between.all_to_all
        return max(far, sent * (near - 1) / ranks / self._inside(self.gpu.node.all_to_all, near))

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
