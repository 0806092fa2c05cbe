"""Rules that convert the tensors of one row of a mapping into each other, exact in both directions.

A row maps some tensors of Megatron's checkpoint (parts of them, for experts) to some Hugging Face tensors.
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
    """Conversion of a row's tensors in both directions."""

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Hugging Face tensors of these shapes from Megatron's."""
        ...

    def to_megatron(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Megatron tensors of these shapes from Hugging Face's."""
        ...


@dataclass(frozen=True)
class Rows:
    """Both sides hold the same numbers in the same order, cut at different rows (dimension 0).

    Covers one tensor under another name, gate and up stacked to `linear_fc1`, Mamba's `in_proj` cut to z, x, B, C, dt,
    and an expert `[ffn, hidden]` as `[1, ffn, hidden]` of all experts.
    """

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Rule`; the same in both directions."""
        import torch

        flat = tensors[0].reshape(-1) if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
        sizes = [prod(shape) for shape in shapes]
        return [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

    to_megatron = to_hf


@dataclass(frozen=True)
class QKV:
    """`q_proj`, `k_proj`, `v_proj` and Megatron's `linear_qkv`, which holds them group by group.

    `linear_qkv` `[groups x (heads / groups + 2) x head_dim, ...]`: for each group its queries, its key, its value
    (megatron/core/transformer/attention.py, SelfAttention.get_query_key_value_tensors). Weights and biases.
    """

    heads: int
    groups: int
    head_dim: int

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Rule`."""
        (fused,) = tensors
        each = self.heads // self.groups
        by_group = fused.reshape(self.groups, each + 2, self.head_dim, *fused.shape[1:])
        parts = by_group[:, :each], by_group[:, each], by_group[:, each + 1]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def to_megatron(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Rule`."""
        import torch

        (shape,) = shapes
        by_group = [tensor.reshape(self.groups, -1, self.head_dim, *tensor.shape[1:]) for tensor in tensors]
        return [torch.cat(by_group, dim=1).reshape(shape)]


@dataclass(frozen=True)
class Vocabulary:
    """Embedding rows: Megatron's may be followed by rows of padding, zero where they are created."""

    def to_hf(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Rule`."""
        (table,), ((rows, _),) = tensors, shapes
        return [table[:rows]]

    def to_megatron(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """See `Rule`."""
        (table,), ((rows, _),) = tensors, shapes
        missing = rows - table.shape[0]
        if missing == 0:
            return [table]
        import torch

        return [torch.cat([table, table.new_zeros(missing, table.shape[1])])]
