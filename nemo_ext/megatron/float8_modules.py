"""Precision plans for Megatron's own linear layers, without Transformer Engine (`nemo_ext.megatron.float8`).

Megatron's column- and row-parallel layers, and our replicated layer for latent projections, keep their weights,
sharding and communication; only the product inside is replaced. Each rank scales its own shard of a matrix, except in
quantisation-aware training.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from nemo_ext.architecture.precision_plan import HEAD, LOW, Weight, assigned
from nemo_ext.megatron.float8 import E4M3, E5M2, NVFP4, NVFP4_STORED, SCALINGS, Scaling, float8_linear, rounded_linear
from nemo_ext.megatron.fp8 import Precision, module_patterns
from nemo_ext.megatron.layers import ReplicatedLinear

LINEAR = ColumnParallelLinear, RowParallelLinear, ReplicatedLinear
_FORWARD = "_forward_impl"
"""Name of the method that Megatron's linear layers call for the product (tensor_parallel/layers.py)."""


@dataclass(frozen=True)
class Float8Product:
    """Replacement for a linear layer's `_forward_impl`.

    Attributes:
        scaling: scaling of the matrices.
        gradients: float8 dtype to which the output's gradients are rounded; None to pass them through the rounding of
            weights and inputs (quantisation-aware training).
        group: ranks that hold shards of the layer's matrices, which then have the scale of the whole matrix; None for
            a scale of each shard.
    """

    scaling: Scaling
    gradients: torch.dtype | None
    group: Any = None

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **others: Any,
    ) -> Tensor:
        """Compute the layer's product in FP8 or NVFP4, with the same communication as Megatron's `_forward_impl`."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        if self.gradients is None:
            output = rounded_linear(input, weight, self.scaling, group=self.group)
        else:
            output = float8_linear(input, weight, self.scaling, gradients=self.gradients)
        return output if bias is None else output + bias


def use_float8(
    model: torch.nn.Module, precision: Precision, stage: Sequence[int], *, stored: bool = False
) -> list[torch.nn.Module]:
    """Set a pipeline stage's linear layers to FP8 or NVFP4 by the plan, and return the layers that were changed.

    Args:
        model: the stage's model, without wrappers such as DDP.
        precision: precision plan and architecture.
        stage: 0-based numbers of the stage's blocks, in order.
        stored: True for NVFP4 as in quantised checkpoints, with weights in blocks of 1x16, not 16x16 as in training.

    Raises:
        ValueError: the scaling needs Transformer Engine, or a weight is not in one of Megatron's linear layers.
    """
    plan = precision.plan
    if plan.uses_fp8 and plan.recipe not in SCALINGS:
        raise ValueError(
            f"precision_plan.recipe={plan.recipe} needs Transformer Engine; without it use {', '.join(SCALINGS)}"
        )
    gradients = None if precision.aware else E5M2 if plan.format == "hybrid" else E4M3
    lowest = (NVFP4_STORED if stored or precision.aware else NVFP4)[plan.nvfp4]
    products = {"nvfp4": Float8Product(lowest, None if precision.aware else E4M3)}
    if plan.uses_fp8:
        products["fp8"] = Float8Product(SCALINGS[plan.recipe], gradients)
    layers: list[tuple[torch.nn.Module, Float8Product]] = []
    named = dict(model.named_modules())
    for assignment in assigned(plan, precision.architecture):
        if (low := assignment.precision) in LOW:
            layers += [(layer, products[low]) for layer in _linears(named, assignment.weight, low, precision, stage)]
    for layer, product in layers:
        setattr(
            layer, _FORWARD, replace(product, group=getattr(layer, "tp_group", None)) if precision.aware else product
        )
    return [layer for layer, _ in layers]


@contextmanager
def in_float8(model: torch.nn.Module, precision: Precision) -> Iterator[None]:
    """Set a model without pipeline stages to the plan's precision in the context, as a checkpoint would store it.

    Raises:
        ValueError: see `use_float8`.
    """
    changed = use_float8(model, precision, range(len(precision.architecture.sizes)), stored=True)
    try:
        yield
    finally:
        for module in changed:
            delattr(module, _FORWARD)


def _linears(
    named: dict[str, torch.nn.Module], weight: Weight, low: str, precision: Precision, stage: Sequence[int]
) -> list[torch.nn.Module]:
    if weight.block is None:
        kind = ""
        if "output_layer" not in named and weight.part == HEAD:
            return []  # on another stage
    elif weight.block in stage:
        kind = precision.architecture.sizes[weight.block].kind
    else:
        return []
    first = stage[0] if stage else 0
    patterns = module_patterns(weight, kind, first_block=first)
    matched = [m for name, m in named.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    linears = [module for module in matched if isinstance(module, LINEAR)]
    if not linears or len(linears) != len(matched):
        hint = ", or set megatron.moe_grouped_gemm=false" if kind == "E" else ""
        raise ValueError(
            f"precision_plan sets {weight} to {low}, but it is not in one of Megatron's linear layers, and "
            f"{low.upper()} elsewhere needs model.backend=transformer_engine: exclude it with "
            f"precision_plan.rules{hint}"
        )
    return linears
