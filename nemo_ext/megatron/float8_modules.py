"""Precision plans for Megatron's own linear layers, without Transformer Engine (`nemo_ext.megatron.float8`).

Megatron's column- and row-parallel layers, and our replicated one of latent projections, keep their weights, sharding
and communication; only the product inside is replaced. Each rank scales its own shard of a matrix.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

from nemo_ext.architecture.precision_plan import HEAD, Weight, assigned
from nemo_ext.megatron.float8 import E4M3, E5M2, SCALINGS, Scaling, float8_linear
from nemo_ext.megatron.fp8 import Precision, module_patterns
from nemo_ext.megatron.layers import ReplicatedLinear

LINEAR = ColumnParallelLinear, RowParallelLinear, ReplicatedLinear
_FORWARD = "_forward_impl"
"""Name of the method that Megatron's linear layers call for the product (tensor_parallel/layers.py)."""


@dataclass(frozen=True)
class Float8Product:
    """Replacement for a linear layer's `_forward_impl`; `gradients` is the float8 dtype for the output's gradients."""

    scaling: Scaling
    gradients: torch.dtype

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
        """Compute the layer's product in FP8, with the same communication as Megatron's `_forward_impl`."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = float8_linear(input, weight, self.scaling, gradients=self.gradients)
        return output if bias is None else output + bias


def use_float8(model: torch.nn.Module, precision: Precision, stage: Sequence[int]) -> list[torch.nn.Module]:
    """Set a pipeline stage's linear layers to FP8 according to the plan, and return the layers that were changed.

    Args:
        model: the stage's model, without wrappers such as DDP.
        precision: precision plan and architecture.
        stage: 0-based numbers of the stage's blocks, in order.

    Raises:
        ValueError: the scaling needs Transformer Engine, or a weight is not in one of Megatron's linear layers.
    """
    plan = precision.plan
    if plan.recipe not in SCALINGS:
        raise ValueError(
            f"precision_plan.recipe={plan.recipe} needs Transformer Engine; without it use {', '.join(SCALINGS)}"
        )
    layers: list[torch.nn.Module] = []
    named = dict(model.named_modules())
    for assignment in assigned(plan, precision.architecture):
        if assignment.precision == "fp8":
            layers += _linears(named, assignment.weight, precision, stage)
    product = Float8Product(SCALINGS[plan.recipe], E5M2 if plan.format == "hybrid" else E4M3)
    for layer in layers:
        setattr(layer, _FORWARD, product)
    return layers


@contextmanager
def in_float8(model: torch.nn.Module, precision: Precision) -> Iterator[None]:
    """Set a model without pipeline stages to the plan's precision in the context; raises as `use_float8` does."""
    changed = use_float8(model, precision, range(len(precision.architecture.sizes)))
    try:
        yield
    finally:
        for module in changed:
            delattr(module, _FORWARD)


def _linears(
    named: dict[str, torch.nn.Module], weight: Weight, precision: Precision, stage: Sequence[int]
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
            f"precision_plan sets {weight} to fp8, but it is not in one of Megatron's linear layers, and FP8 elsewhere "
            f"needs model.backend=transformer_engine: exclude it by a rule{hint}"
        )
    return linears
