"""A parent whose blocks are shared out among the ranks: each has a part of a block, which is gathered while it runs.

Embedding, final norm and output layer stay whole on every rank. Data are split among the ranks as for a parent that is
whole on each of them, so scores and variants are the same; ranks only have to call the same blocks in the same order.

torch's FSDP would do it too, but it is made for training: each block that is called by itself has streams and pools of
memory of its own, parameters become others, and every forward pass is noted for a backward pass that never comes.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from nemo_ext.architecture.pattern import parse
from nemo_ext.blockwise import data_parallel
from nemo_ext.blockwise.parent import Parent
from nemo_ext.blockwise.read_ahead import read_ahead
from nemo_ext.checkpoint.torch_dist import TorchDistReader, checkpoint_folder
from nemo_ext.megatron.session import build_model, load_weights, put_tensors

SHARD, OFFLOAD = "shard", "offload"
"""Where a rank's part of the blocks is: on its device, or in the host's memory."""
_ALIGNED = 128
"""Numbers to a multiple of which each parameter begins: kernels want addresses of 16 bytes at least."""


class SharedOut:
    """The weights of a block, of which this rank holds one of equally large parts; whole while it runs or is open.

    Args:
        layer: the block, whole and alike on every rank. Its parameters are empty from now on while it does not run.
        host: True to hold the part in the host's memory.
    """

    def __init__(self, layer: torch.nn.Module, *, host: bool) -> None:
        alike: defaultdict[torch.dtype, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in layer.parameters():
            alike[parameter.dtype].append(parameter)
        self.numel = sum(each.numel() for each in layer.parameters())
        self.device = next(layer.parameters()).device
        self._parameters = list(alike.values())
        self._shapes = [[each.shape for each in own] for own in self._parameters]
        self.parts: list[Tensor] = []
        for own, shapes in zip(self._parameters, self._shapes, strict=True):
            size = -(-_places(shapes)[-1] // data_parallel.count())
            part = torch.zeros(size, dtype=own[0].dtype, device="cpu" if host else self.device)
            for each, place in zip(own, _places(shapes), strict=False):
                begin = size * data_parallel.number() - place
                first, end = max(begin, 0), min(begin + size, each.numel())
                if first < end:
                    part[first - begin : end - begin] = each.data.reshape(-1)[first:end]
            self.parts.append(part.pin_memory() if host and torch.cuda.is_available() else part)
        self.__exit__()
        layer.register_forward_pre_hook(lambda *_: self.__enter__())
        layer.register_forward_hook(lambda *_: self.__exit__(), always_call=True)

    def __enter__(self) -> None:
        """Gathers the weights; all ranks together."""
        for part, own, shapes in zip(self.parts, self._parameters, self._shapes, strict=True):
            mine = part.to(self.device, non_blocking=True)
            whole = torch.empty(len(mine) * data_parallel.count(), dtype=mine.dtype, device=self.device)
            if data_parallel.count() > 1:
                dist.all_gather_into_tensor(whole, mine)
            else:
                whole.copy_(mine)
            for parameter, place, shape in zip(own, _places(shapes), shapes, strict=False):
                parameter.data = whole[place : place + shape.numel()].view(shape)

    def __exit__(self, *_: object) -> None:
        """Frees the whole weights."""
        for own in self._parameters:
            for parameter in own:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)


def _places(shapes: Sequence[torch.Size]) -> list[int]:
    """Where parameters of these shapes begin in their flat tensor, and where it ends."""
    return [0, *accumulate(-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes)]


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
    own = [number for number in range(blocks) if _reader(number) == data_parallel.number()]
    reader = TorchDistReader(folder)

    def read(number: int) -> dict[str, Tensor]:
        prefix = f"decoder.layers.{number}."
        return {name: reader.read(name) for name in reader.tensors if name.startswith(prefix)}

    tensors = read_ahead(read, own)

    def fill(layer: torch.nn.Module, prefix: str, number: int) -> None:
        if _reader(number) == data_parallel.number():
            put_tensors(layer, next(tensors), prefix)
        if data_parallel.count() > 1:
            for each in (*layer.parameters(), *layer.buffers()):
                dist.broadcast(each.data, src=_reader(number))

    with data_parallel.progress("parent", blocks, "blocks") as advance:
        share_out(parent, fsdp, fill, advance)
    return parent


def _reader(number: int) -> int:
    """The rank that reads a block: two in a row each, since in many models every second one is large."""
    return number // 2 % data_parallel.count()


def share_out(
    parent: Parent,
    fsdp: str,
    fill: Callable[[torch.nn.Module, str, int], None] = lambda layer, prefix, number: None,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Makes the blocks of a model without any, fills them and shares them out, one after the other.

    Args:
        parent: the model (`build_model(config, blocks=False)`).
        fsdp: `SHARD` or `OFFLOAD`.
        fill: called with a block, the prefix of its names in Megatron's checkpoint and its 0-based number.
        advance: called with 1 for every block.
    """
    parent.share = partial(SharedOut, host=fsdp == OFFLOAD)
    for number, block in enumerate(parse(parent.model_config.pattern).blocks):
        layer = parent.fresh(number, block)
        fill(layer, f"decoder.layers.{number}.", number)
        parent.shared.append(parent.share(layer))
        parent.layers.append(layer)
        advance(1)
    parent.model.decoder.layers = torch.nn.ModuleList(parent.layers)
