"""Rules that convert the tensors in one row of the mapping, exactly in both directions.

A row maps tensors of Megatron's checkpoint (slices, for experts) to Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Rule(Protocol):
    """Rule that converts the tensors of a row between Megatron and Hugging Face, in both directions."""

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Convert a row's Megatron tensors to Hugging Face tensors of the given shapes."""
        ...

    def to_megatron(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Convert a row's Hugging Face tensors to Megatron tensors of the given shapes."""
        ...


@dataclass(frozen=True)
class Rows:
    """Rule for tensors that hold the same values in the same order but are split differently along dimension 0.

    Covers renamed tensors, gate and up projections stacked in `linear_fc1`, Mamba's `in_proj` split into z, x, B, C and
    dt, and an expert `[ffn, hidden]` as a slice `[1, ffn, hidden]` of all experts.
    """

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Regroup the values into tensors of the given shapes; the operation is the same in both directions."""
        import torch

        flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
        sizes = [prod(shape) for shape in shapes]
        return [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    to_megatron = to_hf


@dataclass(frozen=True)
class QKV:
    """Rule for weights and biases of `q_proj`, `k_proj` and `v_proj`, which Megatron's `linear_qkv` interleaves.

    `linear_qkv` is `[groups x (heads / groups + 2) x head_dim, ...]`: for each group, its queries, key and value
    (megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors).
    """

    heads: int
    groups: int
    head_dim: int

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Split `linear_qkv`, the only tensor, into `q_proj`, `k_proj` and `v_proj` of the given shapes."""
        (fused,) = tensors
        queries = self.heads // self.groups
        by_group = fused.reshape(self.groups, queries + 2, self.head_dim, *fused.shape[1:])
        parts = by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def to_megatron(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Interleave `q_proj`, `k_proj` and `v_proj` in a list of one tensor, `linear_qkv`, of the given shape."""
        import torch

        (shape,) = shapes
        by_group = [tensor.reshape(self.groups, -1, self.head_dim, *tensor.shape[1:]) for tensor in tensors]
        return [torch.cat(by_group, dim=1).reshape(shape)]


@dataclass(frozen=True)
class Vocabulary:
    """Rule for the embedding and output layer, to which Megatron adds padding rows; rows added here are zero."""

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Drop the padding rows of the only tensor, which are those beyond the given shape."""
        (table,), ((rows, _),) = tensors, shapes
        return [table[:rows]]

    def to_megatron(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Pad the only tensor with zero rows up to the given shape."""
        (table,), ((rows, _),) = tensors, shapes
        missing = rows - table.shape[0]
        if missing == 0:
            return [table]
        import torch

        return [torch.cat([table, table.new_zeros(missing, table.shape[1])])]
