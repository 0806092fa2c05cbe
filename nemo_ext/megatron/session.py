"""Megatron in this process, without its trainer: a whole model on each rank, weights by checkpoint names.

For work that looks into a model (block libraries, scores, calibration) rather than trains it as a whole.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_ext.checkpoint.pickles import only_data
from nemo_ext.megatron.cpu import runtime
from nemo_ext.megatron.fp8 import Precision


@contextmanager
def data_parallel(seed: int = 1) -> Iterator[None]:
    """Megatron's process groups over the ranks that the environment names (`RANK`, `WORLD_SIZE`), each with a whole
    model; one rank without it.

    An existing process group is used as it is.
    """
    runtime.enable()
    only_data()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    own = not torch.distributed.is_initialized()
    if own:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if "WORLD_SIZE" in os.environ:
            # Work that one rank does for all may take hours.
            torch.distributed.init_process_group(backend, timeout=timedelta(days=1))
        else:
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)
    try:
        yield
    finally:
        if own:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build_model(config: Mapping[str, Any]) -> tuple[torch.nn.Module, Any]:
    """The model of a composed training config, whole on this rank, and its `BlockModelConfig`.

    Raises:
        ValueError: with Megatron's reason, where it refuses the config.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from nemo_ext.megatron.arguments import command_line, parse_arguments, pattern_with_cuts
    from nemo_ext.megatron.model import BlockModelBuilder, model_config

    arguments = parse_arguments(command_line(config), world_size=torch.distributed.get_world_size())
    made = model_config(config["model"], pattern_with_cuts(config), arguments, Precision.from_config(config))
    made.finalize()
    model = BlockModelBuilder(made).build_model(ProcessGroupCollection.use_mpu_process_groups())
    # Some modules are made on the CPU, which Megatron's trainer mends likewise.
    return (model.cuda() if torch.cuda.is_available() else model), made


def named_parts(module: Any, prefix: str = "") -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
    """The parts of Megatron's checkpoint that a module holds: key, place in the whole tensor, and the memory itself.

    Writing into the memory changes the module. Parts of one key (experts, gate and up) come one after the other.

    Args:
        module: anything of Megatron's with a `sharded_state_dict`.
        prefix: what its keys begin with.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = module.sharded_state_dict(prefix=prefix)
    apply_factories(state)
    for part in nested_values(state):
        if isinstance(part, ShardedTensor):
            before = part.prepend_axis_num
            sizes = (1,) * before + tuple(part.local_shape)
            place = tuple(slice(o, o + size) for o, size in zip(part.global_offset, sizes, strict=True))
            yield part.key, place, part.data.view(sizes)


def put_tensors(module: torch.nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Sets a module's weights from whole tensors by their names in Megatron's checkpoint.

    Raises:
        ValueError: naming a tensor that is missing or of another shape.
    """
    with torch.no_grad():
        for key, place, memory in named_parts(module, prefix):
            if key not in tensors:
                raise ValueError(f"{key}: the module has it, the given tensors do not")
            part = tensors[key][place]
            if part.shape != memory.shape:
                raise ValueError(f"{key}: the module wants {list(memory.shape)} of it, there are {list(part.shape)}")
            memory.copy_(part)


def take_tensors(module: torch.nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """A copy of a module's weights as whole tensors by their names in Megatron's checkpoint (one rank holds all)."""
    parts: dict[str, list[tuple[tuple[slice, ...], Tensor]]] = {}
    for key, place, memory in named_parts(module, prefix):
        parts.setdefault(key, []).append((place, memory.detach()))
    whole = {}
    for key, pieces in parts.items():
        shape = [max(place[axis].stop for place, _ in pieces) for axis in range(len(pieces[0][0]))]
        whole[key] = torch.empty(shape, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
        for place, memory in pieces:
            whole[key][place] = memory
    return whole


def load_weights(model: Any, checkpoint: Path) -> None:
    """Loads the weights of a checkpoint, of any layout, with Megatron's own loader.

    Args:
        model: of `build_model`.
        checkpoint: the folder with `.metadata` (`nemo_ext.checkpoint.torch_dist.checkpoint_folder`).
    """
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    model.load_state_dict(state["model"])
