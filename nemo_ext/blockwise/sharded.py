"""A parent whose blocks are shared out among the ranks with torch's FSDP: each block is gathered while it runs.

Embedding, final norm and output layer stay whole on every rank. Data are split among the ranks as for a parent that is
whole on each of them, so scores and variants are the same; ranks only have to call the same blocks in the same order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nemo_ext.architecture.pattern import parse
from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent
from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder
from nemo_ext.megatron.session import build_model, load_weights, put_tensors

SHARD, OFFLOAD = "shard", "offload"
"""Where a rank's part of the blocks is: on its device, or in the host's memory."""


def open_parent(config: Mapping[str, Any], checkpoint: Path, fsdp: str | None = None) -> Parent:
    """The model of a checkpoint, whole on every rank, or with its blocks shared out among them.

    Blocks are read one after the other, each by one rank while others read theirs, so that no rank ever holds the whole
    model, on its device or in the host's memory.

    Args:
        config: training config of a stage (`stage_config`), with the checkpoint's model.
        checkpoint: run, checkpoints directory or checkpoint of any parallel layout.
        fsdp: `SHARD` or `OFFLOAD`; None for a whole model on every rank.
    """
    folder = checkpoint_folder(checkpoint)
    model, made = build_model(config, blocks=fsdp is None)
    load_weights(model, folder)
    parent = Parent(model, made)
    if fsdp is None:
        return parent
    blocks = len(parse(made.pattern).blocks)
    tensors = _ahead(TorchDistReader(folder), data_parallel.share(range(blocks)))

    def fill(layer: torch.nn.Module, prefix: str, number: int) -> None:
        reads = number % data_parallel.count()
        if reads == data_parallel.number():
            put_tensors(layer, next(tensors), prefix)
        if data_parallel.count() > 1:
            for each in (*layer.parameters(), *layer.buffers()):
                dist.broadcast(each.data, src=reads)

    with data_parallel.progress("parent", blocks, "blocks") as advance:
        share_out(parent, all_ranks(parent), fsdp, fill, advance)
    return parent


def all_ranks(parent: Parent) -> DeviceMesh:
    """All ranks, on the model's kind of device."""
    return init_device_mesh(parent.device.type, (data_parallel.count(),))


def share_out(
    parent: Parent,
    mesh: DeviceMesh,
    fsdp: str,
    fill: Callable[[torch.nn.Module, str, int], None] = lambda layer, prefix, number: None,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Makes the blocks of a model without any, fills them and shares them out, one after the other.

    Args:
        parent: the model (`build_model(config, blocks=False)`).
        mesh: the ranks.
        fsdp: `SHARD` or `OFFLOAD`.
        fill: called with a block, the prefix of its names in Megatron's checkpoint and its 0-based number.
        advance: called with 1 for every block.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if fsdp == OFFLOAD else OffloadPolicy()
    for number, block in enumerate(parse(parent.model_config.pattern).blocks):
        layer = parent.fresh(number, block)
        fill(layer, f"decoder.layers.{number}.", number)
        # FSDP takes one type: Mamba-2's few numbers in fp32 stay whole on every rank.
        other = {each for each in layer.parameters() if each.dtype != parent.model_config.transformer.params_dtype}
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=other)
        parent.layers.append(layer)
        advance(1)
    parent.model.decoder.layers = torch.nn.ModuleList(parent.layers)


def _ahead(reader: TorchDistReader, numbers: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    """Tensors of these blocks by their names, one block read ahead."""

    def read(number: int) -> dict[str, Tensor]:
        prefix = f"decoder.layers.{number}."
        return {name: reader.read(name) for name in reader.tensors if name.startswith(prefix)}

    coming: Future[dict[str, Tensor]] | None = None
    with ThreadPoolExecutor(1) as pool:
        for number in numbers:
            coming, ready = pool.submit(read, number), coming
            if ready is not None:
                yield ready.result()
        if coming is not None:
            yield coming.result()
