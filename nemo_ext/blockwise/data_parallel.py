"""Helpers for data-parallel ranks: sharding data, summing over ranks, writing on rank 0.

Without a process group there is one rank, and these functions do not communicate.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from nemo_ext.job.progress import notice, progress_of


def number() -> int:
    """Return this rank's number."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def share[T](items: Sequence[T]) -> Sequence[T]:
    """Return this rank's share of the items: every `count()`-th, starting at this rank's number."""
    return items[number() :: count()]


def summed(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, possibly in place. Collective."""
    if count() > 1:
        device = tensor.device
        if dist.get_backend() == "nccl":
            tensor = tensor.cuda()
        dist.all_reduce(tensor)
        tensor = tensor.to(device)
    return tensor


def joined(local: Tensor) -> Tensor:
    """Concatenate all ranks' `[n]` tensors, whose lengths may differ. Collective."""
    sizes = torch.zeros(count(), dtype=torch.long)
    sizes[number()] = len(local)
    before, everything = int(summed(sizes)[: number()].sum()), local.new_zeros(int(sizes.sum()))
    everything[before : before + len(local)] = local
    return summed(everything)


def part_of(tensor: Tensor) -> Tensor:
    """Copy this rank's shard of the flattened tensor, padded with zeros to the same length on all ranks."""
    numbers = tensor.reshape(-1)
    size = _part_size(tensor.numel())
    local = numbers[size * number() : size * (number() + 1)]
    part = numbers.new_zeros(size)
    part[: len(local)] = local
    return part


def whole_of(part: Tensor, size: int) -> Tensor:
    """Gather all ranks' shards (from `part_of`) into a flat tensor of `size` elements. Collective."""
    whole = part
    if count() > 1:
        whole = part.new_empty(len(part) * count())
        dist.all_gather_into_tensor(whole, part)
    return whole[:size]


def mean_part(tensors: Sequence[Tensor]) -> Tensor:
    """Average flattened, concatenated tensors over all ranks in FP32, and return this rank's shard. Collective."""
    total = sum(tensor.numel() for tensor in tensors)
    whole = tensors[0].new_zeros(_part_size(total) * count(), dtype=torch.float32)
    for tensor, place in zip(tensors, whole[:total].split([tensor.numel() for tensor in tensors]), strict=True):
        place.copy_(tensor.reshape(-1))
    if count() == 1:
        return whole
    part = whole.new_empty(_part_size(total))
    dist.reduce_scatter_tensor(part, whole)
    return part.div_(count())


def _part_size(numel: int) -> int:
    return -(-numel // count())


def agreed[T](decide: Callable[[], T]) -> T:
    """Call `decide` on rank 0 and broadcast its result; for checks of the disk, which ranks may see differently."""
    answer: list[Any] = [decide() if number() == 0 else None]
    if count() > 1:
        dist.broadcast_object_list(answer, src=0)
    return answer[0]


def written(write: Callable[[], object], *, on_every_node: bool = False) -> None:
    """Call `write` on rank 0, or with `on_every_node` on each node's first rank, while the other ranks wait."""
    if number() == 0 or (on_every_node and os.environ.get("LOCAL_RANK") == "0"):
        write()
    wait()


def wait() -> None:
    """Wait for all ranks."""
    if count() > 1:
        dist.barrier()


def say(text: str) -> None:
    """Print a message for the user on rank 0."""
    if number() == 0:
        notice(text)


def progress(label: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
    """Return a context with a progress bar on rank 0, which yields the function that advances the bar.

    The `unit` is the name of the items, such as `variants`.
    """
    return progress_of(label, total, unit=unit, enabled=number() == 0)
