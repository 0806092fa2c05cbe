"""Stand-ins that allocate as Transformer Engine's linear layers do: FP8 and NVFP4 copies, grouped GEMM, permutation, workspaces.

Read from the sources of Transformer Engine 2.20.2 (`transformer_engine/pytorch`) and Megatron-Core 0.19.2, not measured:

| subject | fact | source |
|---|---|---|
| FP8, per-tensor scale | 1 byte per number and one fp32 scale; before Blackwell a transposed copy for the products of the backward pass; the same for delayed and current scaling | tensor/float8_tensor.py, utils.py is_non_tn_fp8_gemm_supported |
| FP8, blockwise | both directions; an fp32 scale per 1x128 numbers, in weights per 128x128 | tensor/float8_blockwise_tensor.py get_scale_shape |
| MXFP8 | both directions; a 1-byte scale per 32 numbers, padded to 128x4 | tensor/mxfp8_tensor.py get_scale_shape |
| NVFP4 | both directions; half a byte per number, a 1-byte scale per 16, padded to 128x4, and an fp32 maximum; the same for weights, whose blocks are 16x16 | tensor/nvfp4_tensor.py inner_tensor_specs, get_scale_shape |
| weights | BF16 parameter, and both quantised directions, kept from the first micro-batch on and refilled in the first of each step; with disable_parameter_transpose_cache made in each forward pass and kept until its backward pass | module/base.py quantize_weight; extensions/transformer_engine.py TELinear.forward |
| saved input | only quantised, in the direction of the weight gradient; if it is gathered along the sequence and has a per-tensor scale, the rank's rows untransposed | module/linear.py _linear_forward_impl |
| input saved in BF16 | where another layer has saved it: attention's projection, the shared expert's first layer, layers recomputed by moe_act; not with delayed scaling | transformer/attention.py, moe/shared_experts.py, moe/experts.py: set_save_original_input |
| fused norm and linear | saves the norm's input, statistics and output; the output as the linear layer's input above | module/layernorm_linear.py |
| sequence parallelism | gathers FP8 or NVFP4, not BF16; also for gradients of row-parallel layers; NVFP4's transposed numbers are reordered into a second tensor | distributed.py gather_along_first_dim, _post_process_nvfp4_gather; module/base.py grad_output_preprocess |
| output gradient | both quantised directions while in use | module/linear.py _linear_backward_impl |
| weight gradient | accumulated in main_grad by the product; autograd gets one dummy per weight shape | module/base.py get_dummy_wgrad |
| amax (delayed scaling) | histories and scales in fp32, 3 forward and 2 backward per weight | module/base.py set_meta_tensor, quantization.py DelayedScalingRecipeState |
| grouped GEMM | one call for all experts of a rank; saves one quantised copy or the BF16 input; tokens per expert padded to 16, with MXFP8 to 32, with NVFP4 to 128 | module/grouped_linear.py, module/fp8_padding.py |
| fused permutation | saves int32 row ids, tokens x (2 experts + 1); sorting of chunks saves one per token; no int64 indices | triton/permutation.py |
| cuBLAS workspace | 32 MiB + 1 KiB from Hopper on, else 4 MiB; grouped GEMM 4 more; torch's own 32 MiB | cpp_extensions/gemm.py get_cublas_workspace |

Read in the sources but not modelled: the fused router saves its map and [tokens, experts] in fp32 (csrc/extensions/router.cpp);
the fused cross-entropy saves its logits and a few numbers per token, and returns the gradient in their place (cross_entropy.py);
the rotation before NVFP4 rounding writes a temporary BF16 copy where no fused kernel fits the shape (csrc/quantizer.cpp);
communication overlap holds a buffer [tokens, hidden] for each of up to 11 products (module/base.py initialize_ub);
with fp8_param_gather the FP8 copies are the parameters, without BF16 ones (tensor/float8_tensor.py).
The GPU is assumed to be a Hopper or, with MXFP8 or NVFP4, a Blackwell. LayerNormMLP is not used by Megatron's specs.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe import experts, token_dispatcher
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from nemo_ext.architecture.pattern import parse
from nemo_ext.architecture.precision import NVFP4_BLOCK
from nemo_ext.architecture.precision_plan import LOW, NVFP4_MULTIPLE, assigned
from nemo_ext.architecture.precision_plan import multiple as scaling_of
from nemo_ext.megatron import model as builders
from nemo_ext.megatron import specs
from nemo_ext.megatron.fp8 import Precision, module_patterns
from nemo_ext.rehearsal.settings import QUANTISED_WEIGHTS
from nemo_ext.rehearsal.tracker import Tracker

MIB = 2**20
PER_TENSOR = ("delayed", "tensorwise")
LEADING = {"delayed": 8, "tensorwise": 8, "blockwise": 8, "mxfp8": 32, "nvfp4": NVFP4_MULTIPLE}
"""Number by which the tokens must be divisible (utils.py assert_dim_for_fp8_exec; MXFP8Quantizer.is_quantizable)."""
WIDTH = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": NVFP4_MULTIPLE}
"""Number by which rows and columns of a rank's matrix must be divisible (the same sources, and cuBLAS)."""


def scale_bytes(scaling: str, rows: int, columns: int, *, columnwise: bool = False, weight: bool = False) -> int:
    """Compute the bytes of a matrix's scales in one direction; in NVFP4 with the fp32 maximum.

    Args:
        scaling: one of `precision_plan.RECIPES`, or `nvfp4`.
        rows: rows of the matrix: tokens, or outputs of a weight.
        columns: columns of the matrix.
        columnwise: whether the scales belong to the transposed copy, which the backward pass uses.
        weight: whether the matrix is a weight. In blockwise scaling, a weight has one scale per 128x128 numbers, and
            other matrices have one per 1x128.
    """
    if scaling in PER_TENSOR:
        return 0 if columnwise else 4  # one scale for both directions
    if scaling == "mxfp8":
        if columnwise:
            return _up(rows // 32, 4) * _up(columns, 128)
        return _up(rows, 128) * _up(columns // 32, 4)
    along, across = (columns, rows) if columnwise else (rows, columns)
    if scaling == "nvfp4":
        return _up(along, 128) * _up(-(-across // NVFP4_BLOCK), 4) + 4
    if weight:
        return 4 * _up(along, 128) // 128 * _up(-(-across // 128), 4)
    return 4 * -(-across // 128) * _up(along, 4)


@dataclass
class Engine:
    """State shared by all linear layers of a rank.

    Attributes:
        tracker: the rank's tracker.
        keeps_weights: whether quantised copies of weights are kept between micro-batches.
        fuses: whether products accumulate weight gradients in main_grad.
        history: length of the amax history in delayed scaling.
        dummies: tensors that all layers share: dummy weight gradients for autograd, and workspaces.
    """

    tracker: Tracker
    keeps_weights: bool = True
    fuses: bool = True
    history: int = 1
    dummies: dict[Any, Tensor] = field(default_factory=dict)

    def held(self, key: Any, like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return the shared tensor named `key`; at its first use, allocate it on the device of `like`, and keep it."""
        if key not in self.dummies:
            with self.tracker.during(self.tracker.phase, "temporary"):
                self.dummies[key] = like.new_empty(*shape, dtype=dtype)
        return self.dummies[key]

    def workspaces(self, like: Tensor, *, grouped: bool) -> None:
        """Allocate torch's workspace and cuBLAS's for single or `grouped` products, if not done yet."""
        self.held("torch", like, 32 * MIB, dtype=torch.uint8)
        self.held(("cublas", grouped), like, (4 if grouped else 1) * (32 * MIB + 1024), dtype=torch.uint8)


@dataclass
class Product:
    """Matrix product of a linear layer, which replaces the layer's `_forward_impl`.

    Attributes:
        engine: state shared by all layers.
        weight: name of the weight in the precision plan, for messages; "" for BF16.
        scaling: FP8 scaling, or `nvfp4`; None for BF16.
        keeps_input: whether the input of a quantised product is saved in BF16.
        scatters: process group over which a row-parallel layer scatters its output along the sequence; None for
            other layers.
        multiple: the quantised copy of a sequential expert's input is padded to a multiple of this number of tokens.
    """

    engine: Engine
    weight: str = ""
    scaling: str | None = None
    keeps_input: bool = False
    scatters: Any = None
    multiple: int = 1
    _copies: list[Tensor] = field(default_factory=list)
    _history: list[Tensor] = field(default_factory=list)

    def __call__(
        self,
        input: Tensor,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None = None,
        *,
        counts: Sequence[int] | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **_: Any,
    ) -> Tensor:
        """Compute a linear layer's output, `[..., outputs]`.

        Args:
            input: input of the layer, `[..., inputs]`.
            weight: weight `[outputs, inputs]`; for grouped experts, one per expert.
            bias: bias, if any.
            counts: for grouped experts, the number of tokens of each expert.
            allreduce_dgrad: whether the input's gradient is all-reduced over `tp_group`.
            sequence_parallel: whether the input is gathered along the sequence over `tp_group`.
            tp_group: tensor-parallel process group.
        """
        weights = [weight] if isinstance(weight, Tensor) else list(weight)
        self._check(input, weights[0], counts)
        self.engine.workspaces(input, grouped=counts is not None)
        gathers = tp_group if sequence_parallel else None
        reduces = tp_group if allreduce_dgrad else None
        out: Tensor = _Linear.apply(self, counts, gathers, reduces, torch.is_grad_enabled(), input, bias, *weights)
        return out

    def copies(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights' quantised copies, plain and transposed: tensors of numbers and scales."""
        if self._copies:
            return self._copies
        tracker, scaling = self.engine.tracker, self.scaling
        assert scaling is not None
        sizes = [(each.shape[0], each.shape[1]) for each in weights]
        with tracker.during(tracker.phase, QUANTISED_WEIGHTS):
            made = [each for way in (False, True) for each in _copy(weights[0], scaling, sizes, way, weight=True)]
            if scaling == "delayed" and not self._history:
                numbers = 5 * len(weights) * (self.engine.history + 1)
                self._history = [weights[0].new_empty(numbers, dtype=torch.float32)]
        if self.engine.keeps_weights:
            self._copies = made
        return made

    def rows(self, shape: torch.Size, counts: Sequence[int] | None) -> list[int]:
        """Return the padded numbers of tokens of the quantised input matrices: one per entry of `counts`, or one."""
        return [_up(each, self.multiple) for each in (counts or (shape[:-1].numel(),))]

    def _check(self, input: Tensor, weight: Tensor, counts: Sequence[int] | None) -> None:
        if self.scaling is None:
            return
        step, width = LEADING[self.scaling], WIDTH[self.scaling]
        name = "NVFP4" if self.scaling == "nvfp4" else f"{self.scaling} FP8"
        for rows in self.rows(input.shape, counts):
            if rows % step:
                raise ValueError(
                    f"{self.weight}: {name} requires a multiple of {step} tokens, not {rows}; change the "
                    "sequence length, the microbatch or the parallel sizes"
                )
        if any(size % width for size in weight.shape):
            raise ValueError(
                f"{self.weight}: {name} requires sizes that are multiples of {width}, but a rank's part is "
                f"{weight.shape[0]} x {weight.shape[1]}; change the parallel sizes, or keep it in bf16 with a rule of "
                "precision_plan"
            )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Product, counts: Sequence[int] | None, gathers: Any, reduces: Any, needs_gradient: bool,
        x: Tensor, bias: Tensor | None, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        scaling, wide, out_width = product.scaling, x.shape[-1], weights[0].shape[0]
        needs_gradient = needs_gradient and weights[0].requires_grad
        saved_input, matrices = [x], list(weights)
        if scaling is None:
            total = _gathered(saved_input, gathers)
        else:
            sizes = [(rows, wide) for rows in product.rows(x.shape, counts)]
            untransposed = gathers is not None and scaling in PER_TENSOR
            rowwise = _copy(x, scaling, sizes, False)
            if untransposed and not product.keeps_input:
                saved_input = rowwise
            elif needs_gradient and not product.keeps_input:
                saved_input = _copy(x, scaling, sizes, True)
            total = _gathered(rowwise, gathers)
            matrices = product.copies(weights)
        tokens = x.shape[:-1].numel() * (1 if gathers is None else gathers.size())
        product.engine.tracker.add_flops(2 * tokens * wide * out_width)
        out = x.new_empty(tokens // x.shape[1:-1].numel(), *x.shape[1:-1], out_width)
        del total
        if product.scatters is not None:
            out = _scattered(out, product.scatters)
        ctx.product, ctx.counts, ctx.gathers, ctx.reduces, ctx.tokens = product, counts, gathers, reduces, tokens
        ctx.shape, ctx.weights = x.shape, len(weights)
        ctx.save_for_backward(*weights, bias, *matrices, *(saved_input if needs_gradient else ()))
        ctx.kept = len(saved_input) if needs_gradient else 0
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        product, tokens, shape = ctx.product, ctx.tokens, ctx.shape
        scaling, tracker = product.scaling, product.engine.tracker
        weights, bias = ctx.saved_tensors[: ctx.weights], ctx.saved_tensors[ctx.weights]
        saved_input = list(ctx.saved_tensors[len(ctx.saved_tensors) - ctx.kept :]) if ctx.kept else []
        wide, out_width = weights[0].shape[1], weights[0].shape[0]
        work: list[Tensor] = []
        per_tensor = scaling in PER_TENSOR
        if scaling is not None:
            rows = product.rows(grad.shape, ctx.counts)
            sizes = [(each, out_width) for each in rows]
            scattered = product.scatters
            work += _gathered(_copy(grad, scaling, sizes, False), scattered)
            if scattered is not None and per_tensor:
                work += _copy(grad, scaling, [(each * scattered.size(), out_width) for each in rows], True)
            else:
                work += _gathered(_copy(grad, scaling, sizes, True), scattered, reordered=scaling == "nvfp4")
            input_sizes = [(each, wide) for each in product.rows(shape, ctx.counts)]
            if saved_input and product.keeps_input:
                if per_tensor:
                    work += _copy(grad, scaling, input_sizes, False)
                saved_input = _copy(grad, scaling, input_sizes, not (per_tensor and ctx.gathers is not None))
        if saved_input:
            saved_input = _gathered(saved_input, ctx.gathers, reordered=scaling == "nvfp4")
        dx = None
        if ctx.needs_input_grad[5]:
            tracker.add_flops(2 * tokens * wide * out_width)
            dx = grad.new_empty(tokens // shape[1:-1].numel(), *shape[1:-1], wide)
            if ctx.reduces is not None:
                torch.distributed.all_reduce(dx, group=ctx.reduces)
            if ctx.gathers is not None:
                dx = _scattered(dx, ctx.gathers)
        gradients: list[Tensor | None] = [None] * len(weights)
        if saved_input:
            if per_tensor and ctx.gathers is not None:
                work += _copy(grad, scaling, [(tokens, wide)], True)
            tracker.add_flops(2 * tokens * wide * out_width)
            gradients = [_gradient(product.engine, each) for each in weights]
        return None, None, None, None, None, dx, None if bias is None else torch.empty_like(bias), *gradients


def _copy(
    like: Tensor, scaling: str, sizes: Sequence[tuple[int, int]], columnwise: bool, *, weight: bool = False
) -> list[Tensor]:
    """Allocate a quantised copy of one or several matrices.

    Args:
        like: tensor on the device to use.
        scaling: one of `precision_plan.RECIPES`, or `nvfp4`.
        sizes: rows and columns of each matrix.
        columnwise: whether to make the transposed copy.
        weight: whether the matrices are weights, whose scales differ.

    Returns:
        A tensor with the bytes of the numbers and one with those of the scales; an empty one is omitted.
    """
    numbers = sum(rows * columns for rows, columns in sizes) // (2 if scaling == "nvfp4" else 1)
    scales = sum(scale_bytes(scaling, *size, columnwise=columnwise, weight=weight) for size in sizes)
    return [like.new_empty(each, dtype=torch.uint8) for each in (numbers, scales) if each]


def _gathered(parts: Sequence[Tensor], group: Any, *, reordered: bool = False) -> list[Tensor]:
    """All-gather quantised numbers and scales along the first dimension; per-tensor scales are not gathered.

    Without a group, `parts` are returned unchanged. With `reordered`, each gathered tensor is copied once more, as
    Transformer Engine does with the transposed copy in NVFP4.
    """
    if group is None:
        return list(parts)
    gathered = []
    for part in parts:
        if part.numel() <= 4:
            gathered.append(part)
            continue
        whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, part, group=group)
        gathered.append(torch.empty_like(whole) if reordered else whole)
    return gathered


def _scattered(whole: Tensor, group: Any) -> Tensor:
    part = whole.new_empty(whole.shape[0] // group.size(), *whole.shape[1:])
    torch.distributed.reduce_scatter_tensor(part, whole, group=group)
    return part


def _gradient(engine: Engine, weight: Tensor) -> Tensor:
    if not engine.fuses or not hasattr(weight, "main_grad"):
        return torch.empty_like(weight)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return engine.held((*weight.shape, weight.dtype), weight, *weight.shape, dtype=weight.dtype).detach()


class GroupedLinear(torch.nn.Module):
    """Linear layers of a rank's experts as one grouped product, for Megatron's TEGroupedMLP."""

    def __init__(
        self, count: int, inputs: int, outputs: int, *, config: Any, init_method: Any, pg_collection: Any,
        column: bool, engine: Engine, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        parts = pg_collection.expt_tp.size()
        self.groups, self.axis = pg_collection, 0 if column else 1
        outputs, inputs = (outputs // parts, inputs) if column else (outputs, inputs // parts)
        self.product = Product(engine)  # that of a precision plan replaces it (`use`)
        for number in range(count):
            weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
            init_method(weight)
            # As in extensions/transformer_engine.py _set_expert_parameter_attributes.
            weight.allreduce = not (  # type: ignore[attr-defined]
                config.expert_model_parallel_size > 1
                or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
            )
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim, weight.partition_stride = self.axis, 1  # type: ignore[attr-defined]
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, counts: Sequence[int]) -> tuple[Tensor, None]:
        """Return the outputs for the experts' concatenated tokens, `counts` for each expert, and None for the bias."""
        return self.product(x, list(self.parameters()), counts=counts), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weights under the names of sequential experts; arguments and result are as in TEGroupedLinear."""
        weights, group, state = list(self.parameters()), self.groups.ep, {}
        singleton = (metadata or {}).get("singleton_local_shards", False)
        for number, weight in enumerate(weights):
            expert = group.rank() * len(weights) + number
            before = f"{expert}.{prefix}" if singleton else prefix
            offsets = (len(sharded_offsets), expert, group.size() * len(weights))
            sharded = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                before,
                {"weight": self.axis},
                sharded_offsets if singleton else (*sharded_offsets, offsets),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )[f"{before}weight"]
            sharded.replica_id = (*sharded.replica_id[:2], self.groups.expt_dp.rank())
            state[f"{prefix}weight{number}"] = sharded
        return state


class GroupedMLP(experts.TEGroupedMLP):
    """Megatron's TEGroupedMLP with each expert's tokens padded to a multiple of `multiple`, as Fp8Padding does."""

    multiple = 1

    def forward(self, hidden: Tensor, tokens_per_expert: Any, probs: Tensor, *_: Any) -> tuple[Tensor, None]:
        """Call `TEGroupedMLP.forward` on padded tokens; return the unpadded output, and None as the bias."""
        counts = np.asarray(tokens_per_expert)
        padded = _up(counts, self.multiple)
        if (padded == counts).all():
            return super().forward(hidden, counts, probs)
        rows = int(padded.sum())
        out, _none = super().forward(_Resized.apply(hidden, rows), padded, _Resized.apply(probs, rows))
        return _Resized.apply(out, int(counts.sum())), None


class _Resized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = x.shape[0]
        return x.new_empty(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_empty(ctx.rows, *grad.shape[1:]), None


def _up(number: Any, multiple: int) -> Any:
    return -(-number // multiple) * multiple


@contextmanager
def transformer_engine(tracker: Tracker, config: Mapping[str, Any]) -> Iterator[None]:
    """Context manager in which models are built with stand-ins for Transformer Engine's linear layers.

    Args:
        tracker: tracker of the rank.
        config: training config from `settings.rehearsed`.
    """
    precision = Precision.from_config({**config, "precision_plan": config["transformer_engine"]["precision_plan"]})
    fused = config["transformer_engine"]["permute_fusion"]
    flags = config["megatron"]
    engine = Engine(
        tracker,
        keeps_weights=not flags.get("disable_parameter_transpose_cache"),
        fuses=not flags.get("no_gradient_accumulation_fusion"),
        history=int(flags.get("fp8_amax_history_len") or 1),
    )
    build = builders.BlockModelBuilder.build_model
    local_experts = specs.LocalBackend.grouped_mlp_modules

    def built(self: Any, pg_collection: Any, **arguments: Any) -> Any:
        model, pipeline = build(self, pg_collection, **arguments), pg_collection.pp
        pattern = parse(self._model_config.pattern)
        stage = builders.stage_blocks(pattern, pipeline.rank(), pipeline.size(), arguments.get("vp_stage"))
        use(model, engine, precision, stage)
        return model

    def grouped(self: Any, use_grouped: bool) -> Any:
        if not use_grouped:
            return local_experts(self, use_grouped)
        first, second = (partial(GroupedLinear, column=column, engine=engine) for column in (True, False))
        return partial(GroupedMLP, submodules=experts.GroupedMLPSubmodules(linear_fc1=first, linear_fc2=second))

    with (
        patch.object(builders.BlockModelBuilder, "build_model", built),
        patch.object(specs.LocalBackend, "grouped_mlp_modules", grouped),
        _permutation() if fused else nullcontext(),
    ):
        yield


def use(model: torch.nn.Module, engine: Engine, precision: Precision | None, stage: range) -> None:
    """Replace the matrix products of a model's linear layers with stand-ins.

    Args:
        model: blocks of one pipeline stage.
        engine: state shared by all layers.
        precision: precision plan and the model it applies to; None for BF16.
        stage: 0-based numbers of the stage's blocks.

    Raises:
        ValueError: a weight that the plan puts in FP8 or NVFP4 does not belong to such a layer.
    """
    low = _quantised(precision, stage)
    default = "bf16" if precision is None else scaling_of(precision.plan, precision.plan.default)[0]
    missing = set(low)
    multiple = {"bf16": 1, "mxfp8": 32, "nvfp4": 128}.get(default, 16)
    for name, module in model.named_modules():
        if isinstance(module, GroupedMLP):
            module.multiple = multiple
        # The output layer is Megatron's own with either back end.
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | GroupedLinear) or name == "output_layer":
            continue
        pattern = next((pattern for pattern in low if fnmatchcase(name, pattern)), None)
        product = Product(engine)
        if pattern is not None:
            weight, scaling = low[pattern]
            missing -= {each for each in low if low[each] == low[pattern]}
            keeps = default not in ("bf16", "delayed") and _keeps_input(name, getattr(model, "config", None))
            product = Product(engine, weight, scaling, keeps)
            product.multiple = multiple if ".local_experts." in name else 1
            if _scatters(module):
                # The product communicates in place of Megatron's forward pass.
                product.scatters, module.explicit_expert_comm = module.tp_group, True
        if isinstance(module, GroupedLinear):
            module.product = product
        else:
            module._forward_impl = product
    if missing:
        raise ValueError(
            f"precision_plan: {low[min(missing)][0]} is in FP8 or NVFP4, but is not in a linear layer of this stage; "
            "exclude it with precision_plan.rules"
        )


def _scatters(module: torch.nn.Module) -> bool:
    """Return whether a row-parallel layer scatters its output along the sequence and gathers its gradient quantised."""
    return (
        isinstance(module, RowParallelLinear)
        and module.sequence_parallel
        and module.skip_bias_add
        and not module.explicit_expert_comm
    )


def _quantised(precision: Precision | None, stage: range) -> dict[str, tuple[str, str]]:
    """Map module name patterns to the weights that the plan puts in FP8 or NVFP4, for the blocks of a pipeline stage.

    Args:
        precision: precision plan and the model it applies to; None for BF16.
        stage: 0-based numbers of the stage's blocks.

    Returns:
        Mapping from name pattern to the weight's name in the plan, and its scaling.
    """
    patterns: dict[str, tuple[str, str]] = {}
    for each in assigned(precision.plan, precision.architecture) if precision is not None else ():
        number = each.weight.block
        if precision is None or each.precision not in LOW or number is None or number not in stage:
            continue
        kind = precision.architecture.sizes[number].kind
        quantised = (str(each.weight), scaling_of(precision.plan, each.precision)[0])
        patterns |= dict.fromkeys(module_patterns(each.weight, kind, first_block=stage.start), quantised)
    return patterns


def _keeps_input(name: str, config: Any) -> bool:
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    if name.endswith("self_attention.linear_proj"):
        return True
    if name.endswith("shared_experts.linear_fc1"):
        return "shared_experts" not in recomputed
    return name.endswith("experts.linear_fc2") and "moe_act" in (recomputed or ())


@contextmanager
def _permutation() -> Iterator[None]:
    """Context manager that replaces the permutation of tokens with stand-ins for Transformer Engine's fused kernels."""

    def permute(
        tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        ids = tokens.new_empty(tokens.shape[0], 2 * routing_map.shape[1] + 1, dtype=torch.int32)
        rows = num_out_tokens or tokens.shape[0]
        chosen = None if probs is None else _Moved.apply(probs, ids, (rows,))
        return _Moved.apply(tokens, ids, (rows, tokens.shape[1])), chosen, ids, None, None

    def unpermute(tokens: Tensor, ids: Tensor, restore_shape: torch.Size, **_: Any) -> Tensor:
        moved: Tensor = _Moved.apply(tokens, ids, tuple(restore_shape))
        return moved

    def sort(
        tokens: Tensor, splits: Any, order: Any, probs: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        ids = tokens.new_empty(tokens.shape[0], dtype=torch.int32)
        moved = None if probs is None else _Moved.apply(probs, ids, tuple(probs.shape))
        return _Moved.apply(tokens, ids, tuple(tokens.shape)), moved

    with patch.multiple(token_dispatcher, permute=permute, unpermute=unpermute, sort_chunks_by_idxs=sort):
        yield


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(ids)
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.new_empty(ctx.shape), None, None
