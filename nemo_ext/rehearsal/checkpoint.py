"""What a rank would write of a checkpoint: names, shapes and bytes, from Megatron's own sharded state dict."""

import math
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch


def plan(arguments: Any, models: list[Any], optimizer: Any) -> dict[str, Any]:
    """The tensors of a checkpoint that this rank has a part of.

    Args:
        arguments: Megatron's arguments, whose checkpoint flags decide.
        models: wrapped models of this rank.
        optimizer: their optimizer, with its state.

    Returns:
        tensors: of each, `name`, `shape`, `type`, `offset` and `part` (the first of this rank), `bytes` (the whole
        tensor's, on all ranks that have one like it) and `own_bytes` (those that this rank writes: an even share of
        what data-parallel ranks have alike); `writers`: number of ranks that write.

    What Megatron refuses is raised as it raises it.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.utils import extract_sharded_base
    from megatron.core.optimizer.optimizer import MegatronOptimizer
    from megatron.core.utils import unwrap_model
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata, generate_state_dict

    metadata = _build_sharded_state_dict_metadata(arguments)
    # The optimizer compares numbers of steps, which nobody knows here.
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
    groups = _groups(optimizer, world)
    made: dict[str, dict[str, Any]] = {}
    for each in _tensors(sharded):
        if not isinstance(each, ShardedTensor):
            continue
        width = each.dtype.itemsize
        kept = math.prod(each.local_shape) * width
        # Buckets of the distributed optimizer are one tensor for each of its groups, and a part of it for each rank.
        buckets = next((count for prefix, count in groups.items() if each.key.startswith(prefix)), None)
        alike = 1
        if buckets is None and arguments.ckpt_fully_parallel_save:
            expert = ".experts." in each.key
            alike = parallel_state.get_expert_data_parallel_world_size() if expert else _data_parallel()
        line = made.setdefault(
            each.key,
            {
                "name": each.key,
                "shape": list(each.global_shape),
                "type": str(each.dtype).removeprefix("torch."),
                "offset": list(each.global_offset),
                "part": [1] * each.prepend_axis_num + list(each.local_shape),
                "bytes": math.prod(each.global_shape) * width * (buckets or 1),
                "own_bytes": 0,
            },
        )
        line["own_bytes"] += kept // alike
    return {"tensors": sorted(made.values(), key=lambda line: line["name"]), "writers": arguments.world_size}


def _groups(optimizer: Any, world: int) -> dict[str, int]:
    """Beginning of the names of a distributed optimizer's buckets -> number of its groups in a pipeline stage."""
    found = {}
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    for number, each in enumerate(chained):
        if hasattr(each, "data_parallel_group_idx"):
            before = f"chained_{number}." if len(chained) > 1 else ""
            name = f"{before}optimizer.distributed.dp_group_idx_{each.data_parallel_group_idx}."
            found[name] = world // each.data_parallel_group.size()
    return found


def _data_parallel() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


def _tensors(state: Any) -> Iterable[Any]:
    if isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
    else:
        yield state
