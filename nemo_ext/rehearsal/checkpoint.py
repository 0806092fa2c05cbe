"""The tensors that a rank would write to a checkpoint, taken from Megatron's own sharded state dict."""

import math
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch


def plan(arguments: Any, models: list[Any], optimizer: Any) -> dict[str, Any]:
    """List the checkpoint tensors that this rank holds in whole or in part.

    Args:
        arguments: Megatron's arguments, including the checkpoint flags.
        models: wrapped models of this rank.
        optimizer: their optimizer, with its state.

    Returns:
        A dict with two keys. `writers` is the number of ranks that write. `tensors` is a list of dicts with `name`,
        `shape` and `type` of the tensor; `offset` and `part` (shape) of this rank's first piece; `bytes` (whole
        tensor, over all ranks); and `own_bytes` (written by this rank; replicated tensors are divided evenly among
        data-parallel ranks).

    Megatron's errors are not caught.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_base
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.utils import unwrap_model
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata, generate_state_dict

    metadata = _build_sharded_state_dict_metadata(arguments)
    # The optimizer compares its step counters, which are unknown for fake tensors.
    with patch.object(MegatronOptimizer, "_extract_common_per_param_step", lambda *_: 1):
        state = generate_state_dict(
            arguments,
            unwrap_model(models),
            optimizer,
            None,
            None,
            iteration=1,
            optim_sd_kwargs={"metadata": metadata},
            model_sd_kwargs={"metadata": metadata},
        )
    apply_factories(state)
    sharded, _ = extract_sharded_base(state)
    stage = parallel_state.get_pipeline_model_parallel_world_size()
    world = arguments.world_size // stage
    data_parallel = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    groups = _groups(optimizer, world)
    entries: dict[str, dict[str, Any]] = {}
    for tensor in _tensors(sharded):
        if not isinstance(tensor, ShardedTensor):
            continue
        width = tensor.dtype.itemsize
        local_bytes = math.prod(tensor.local_shape) * width
        # A bucket of the distributed optimizer is one tensor per data-parallel group, divided among its ranks.
        buckets = next((count for prefix, count in groups.items() if tensor.key.startswith(prefix)), None)
        replicas = 1
        if buckets is None and arguments.ckpt_fully_parallel_save:
            expert = ".experts." in tensor.key
            replicas = parallel_state.get_expert_data_parallel_world_size() if expert else data_parallel
        line = entries.setdefault(
            tensor.key,
            {
                "name": tensor.key,
                "shape": list(tensor.global_shape),
                "type": str(tensor.dtype).removeprefix("torch."),
                "offset": list(tensor.global_offset),
                "part": [1] * tensor.prepend_axis_num + list(tensor.local_shape),
                "bytes": math.prod(tensor.global_shape) * width * (buckets or 1),
                "own_bytes": 0,
            },
        )
        line["own_bytes"] += local_bytes // replicas
    return {"tensors": sorted(entries.values(), key=lambda line: line["name"]), "writers": arguments.world_size}


def _groups(optimizer: Any, world: int) -> dict[str, int]:
    """Count the data-parallel groups that hold each distributed optimizer's buckets.

    Args:
        optimizer: Megatron's optimizer, possibly a chain of several.
        world: number of ranks in a pipeline stage.

    Returns:
        Mapping from the name prefix of an optimizer's buckets to the number of its groups in the stage.
    """
    counts = {}
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, each in enumerate(chained):
        if hasattr(each, "data_parallel_group_idx"):
            before = f"chained_{number}." if len(chained) > 1 else ""
            name = f"{before}optimizer.distributed.dp_group_idx_{each.data_parallel_group_idx}."
            counts[name] = world // each.data_parallel_group.size()
    return counts


def _tensors(state: Any) -> Iterable[Any]:
    if isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
    else:
        yield state
