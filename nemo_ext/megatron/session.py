"""Megatron without its trainer, in this process: a whole model on each rank, with weights keyed by checkpoint names.

For jobs that inspect a model (block libraries, scores, calibration) rather than train it as a whole.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_ext.architecture.pattern import Pattern, parse
from nemo_ext.architecture.pattern import compile as compile_pattern
from nemo_ext.checkpoint.pickles import only_data
from nemo_ext.megatron.arguments import without_unused_packages
from nemo_ext.megatron.cpu import runtime
from nemo_ext.megatron.fp8 import Precision


@contextmanager
def data_parallel(seed: int = 1) -> Iterator[None]:
    """Open Megatron's process groups for the context, over the environment's ranks (`RANK`, `WORLD_SIZE`) or just one.

    Each rank has a whole model. Existing process groups are used unchanged. `seed` sets Megatron's random states.
    """
    runtime.check_gpu()
    runtime.check_ranks()
    with without_unused_packages({}):
        runtime.enable()
    only_data()
    from megatron.core import parallel_state
    from megatron.core.safe_globals import register_safe_globals
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    register_safe_globals()  # again: transformers' Trainer unregisters NumPy's classes when it has resumed
    opened = not torch.distributed.is_initialized()
    if opened:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        if "WORLD_SIZE" in os.environ:
            # One rank may work for hours while the others wait.
            torch.distributed.init_process_group(backend, timeout=timedelta(days=1))
        else:
            torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(seed)
    try:
        yield
    finally:
        if opened:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def build_model(config: Mapping[str, Any], *, blocks: bool = True) -> tuple[Any, Any]:
    """Build a composed training config's whole model on this rank, and return it with its `BlockModelConfig`.

    Args:
        config: composed training config.
        blocks: False to build only the embedding, the final norm and the output layer.

    Raises:
        ValueError: Megatron rejects the config; the message gives its reason.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    from nemo_ext.megatron.arguments import command_line, parse_arguments, pattern_with_cuts
    from nemo_ext.megatron.model import BlockModelBuilder, model_config

    # Fused kernels add gradients to `main_grad`, which only Megatron's DDP creates; this model is not wrapped in DDP.
    config = {**config, "megatron": {**config["megatron"], "no_gradient_accumulation_fusion": True}}
    arguments = parse_arguments(command_line(config), world_size=torch.distributed.get_world_size())
    whole = model_config(config["model"], pattern_with_cuts(config), arguments, Precision.from_config(config))
    whole.finalize()
    built = whole
    if not blocks:  # Megatron builds at least one
        first = Pattern(parse(whole.pattern).blocks[:1])
        built = replace(whole, pattern=str(first))
        built.hybrid_layer_pattern = compile_pattern(first).hybrid_layer_pattern
    model = BlockModelBuilder(built).build_model(ProcessGroupCollection.use_mpu_process_groups())
    if not blocks:
        model.decoder.layers = torch.nn.ModuleList()
    # Some modules are created on the CPU; Megatron's trainer moves them in the same way.
    return (model.cuda() if torch.cuda.is_available() else model), whole


def named_parts(module: Any, prefix: str = "") -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
    """Yield, for each part of a Megatron checkpoint's tensors that a module holds, its key, place and memory.

    The key is the name of the whole tensor, starting with `prefix`; the place is the part's slices in that tensor. The
    memory is a view of the module's own weight, so writing to it changes the module. Parts with the same key (experts,
    gate and up) are consecutive.
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
    """Set a module's weights from whole tensors, keyed by their names in Megatron's checkpoint, `prefix` included.

    Raises:
        ValueError: a tensor is missing or has the wrong shape; the message names it.
    """
    with torch.no_grad():
        for key, place, memory in named_parts(module, prefix):
            if key not in tensors:
                raise ValueError(
                    f"{key} is missing from the loaded weights: use the model settings with which they were saved"
                )
            part = tensors[key][place]
            if part.shape != memory.shape:
                raise ValueError(
                    f"{key} has shape {list(part.shape)} in the loaded weights, but the model expects "
                    f"{list(memory.shape)}: use the model settings with which they were saved"
                )
            memory.copy_(part)


def take_tensors(module: torch.nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return copies of a module's weights, keyed by their names in Megatron's checkpoint, `prefix` included.

    This rank must hold the whole module.
    """
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
    """Load a checkpoint (a folder with `.metadata`), saved in any parallel layout, with Megatron's own loader."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    model.load_state_dict(state["model"])
