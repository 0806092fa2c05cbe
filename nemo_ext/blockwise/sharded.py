"""Parent model with sharded blocks: each rank holds a shard of every block, which is gathered while the block runs.

Embedding, final norm and output layer are replicated. Data are split among the ranks as for a replicated parent, so
scores and variants are the same; ranks only have to call the same blocks in the same order.

torch's FSDP is not used because it is made for training: each separately called block gets its own streams and memory
pools, parameters are replaced, and every forward pass prepares for a backward pass that never happens.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
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
"""Where a rank keeps its shards: on its device, or in host memory."""
_ALIGNED = 128
"""Alignment of parameters in the flat tensor, in elements; kernels need addresses aligned to at least 16 bytes."""


class SharedOut:
    """Sharded weights of a block, gathered while the block runs or this context is open.

    Args:
        layer: the block, identical on every rank; its parameters are empty unless gathered.
        host: True to keep the shard in host memory.
    """

    def __init__(self, layer: torch.nn.Module, *, host: bool) -> None:
        by_dtype: defaultdict[torch.dtype, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in layer.parameters():
            by_dtype[parameter.dtype].append(parameter)
        self.numel = sum(parameter.numel() for parameter in layer.parameters())
        self.device = next(layer.parameters()).device
        self._parameters = list(by_dtype.values())
        self._shapes = [[parameter.shape for parameter in group] for group in self._parameters]
        self.parts: list[Tensor] = []
        for group, shapes in zip(self._parameters, self._shapes, strict=True):
            size = -(-_places(shapes)[-1] // data_parallel.count())
            part = torch.zeros(size, dtype=group[0].dtype, device="cpu" if host else self.device)
            for parameter, place in zip(group, _places(shapes), strict=False):
                begin = size * data_parallel.number() - place
                first, end = max(begin, 0), min(begin + size, parameter.numel())
                if first < end:
                    part[first - begin : end - begin] = parameter.data.reshape(-1)[first:end]
            self.parts.append(part.pin_memory() if host and torch.cuda.is_available() else part)
        self._uses = 1
        self.__exit__()
        layer.register_forward_pre_hook(lambda *_: self.__enter__())
        layer.register_forward_hook(lambda *_: self.__exit__(), always_call=True)

    def __enter__(self) -> None:
        """Gather the weights, unless an outer context has. Collective."""
        self._uses += 1
        if self._uses == 1:
            self._gather()

    def __exit__(self, *_: object) -> None:
        """Free the gathered weights, unless an outer context needs them."""
        self._uses -= 1
        if self._uses == 0:
            for group in self._parameters:
                empty = torch.empty(0, dtype=group[0].dtype, device=self.device)
                for parameter in group:
                    parameter.data = empty

    def _gather(self) -> None:
        for part, group, shapes in zip(self.parts, self._parameters, self._shapes, strict=True):
            mine = part.to(self.device, non_blocking=True)
            whole = torch.empty(len(mine) * data_parallel.count(), dtype=mine.dtype, device=self.device)
            if data_parallel.count() > 1:
                dist.all_gather_into_tensor(whole, mine)
            else:
                whole.copy_(mine)
            places = _places(shapes)
            pieces = whole[: places[-1]].split([end - begin for begin, end in pairwise(places)])
            for parameter, piece, shape in zip(group, pieces, shapes, strict=True):
                parameter.data = piece[: shape.numel()].view(shape) if len(piece) > shape.numel() else piece.view(shape)


def _places(shapes: Sequence[torch.Size]) -> list[int]:
    """Return the offsets of parameters with these shapes in one flat tensor, followed by the tensor's length."""
    return [0, *accumulate(-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes)]


def open_parent(config: Mapping[str, Any], checkpoint: Path, fsdp: str | None = None) -> Parent:
    """Load a checkpoint's model, replicated on every rank or with sharded blocks.

    If the blocks are sharded, each is read by one rank, in parallel with other ranks' blocks, so that no rank ever
    holds the whole model on its device or in host memory.

    Args:
        config: training config of a stage (`stage_config`), with the checkpoint's model.
        checkpoint: run directory, checkpoints directory or single checkpoint, saved in any parallel layout.
        fsdp: `SHARD` or `OFFLOAD`; None for a replicated model.
    """
    folder = checkpoint_folder(checkpoint)
    model, model_config = build_model(config, blocks=fsdp is None)
    load_weights(model, folder)
    parent = Parent(model, model_config)
    if fsdp is None:
        return parent
    blocks = len(parse(model_config.pattern).blocks)
    mine = [number for number in range(blocks) if _reader(number) == data_parallel.number()]
    reader = TorchDistReader(folder)

    def read(number: int) -> dict[str, Tensor]:
        prefix = f"decoder.layers.{number}."
        return {name: reader.read(name) for name in reader.tensors if name.startswith(prefix)}

    tensors = read_ahead(read, mine)

    def fill(layer: torch.nn.Module, prefix: str, number: int) -> None:
        if _reader(number) == data_parallel.number():
            put_tensors(layer, next(tensors), prefix)
        if data_parallel.count() > 1:
            for tensor in (*layer.parameters(), *layer.buffers()):
                dist.broadcast(tensor.data, src=_reader(number))

    with data_parallel.progress("parent", blocks, "blocks") as advance:
        share_out(parent, fsdp, fill, advance)
    return parent


def _reader(number: int) -> int:
    """Return the rank that reads a block: ranks take two consecutive blocks, as often every second one is large."""
    return number // 2 % data_parallel.count()


def share_out(
    parent: Parent,
    fsdp: str,
    fill: Callable[[torch.nn.Module, str, int], None] = lambda layer, prefix, number: None,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Create, fill and shard the blocks of a model built without blocks, one after the other.

    Args:
        parent: the model (`build_model(config, blocks=False)`).
        fsdp: `SHARD` or `OFFLOAD`.
        fill: sets a block's weights, called with the block, its name prefix in Megatron's checkpoint and its 0-based
            number.
        advance: called with 1 after every block.
    """
    parent.share = partial(SharedOut, host=fsdp == OFFLOAD)
    for number, block in enumerate(parse(parent.model_config.pattern).blocks):
        layer = parent.fresh(number, block)
        fill(layer, f"decoder.layers.{number}.", number)
        parent.shared.append(parent.share(layer))
        parent.layers.append(layer)
        advance(1)
    parent.model.decoder.layers = torch.nn.ModuleList(parent.layers)
