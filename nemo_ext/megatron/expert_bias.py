"""Support in Megatron's trainer for models whose MoE blocks differ in their number of experts.

After each step, Megatron-Core 0.19 stacks the token counts of all routers to update their expert biases
(core/distributed/finalize_model_grads.py), which requires the same number of experts in every block. Here the update
is called once for each number of experts, with the routers that have it.
"""

import importlib
from functools import wraps
from typing import Any

import torch


def update_by_size() -> None:
    """Patch Megatron, for the rest of this process, to update expert biases separately for each number of experts."""
    # By its path: the package has a function of the same name.
    upstream = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    update = upstream._update_router_expert_bias
    if hasattr(update, "__wrapped__"):
        return

    @wraps(update)
    def by_size(model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        routers: dict[int, list[torch.nn.Module]] = {}
        for module in (module for chunk in model for module in chunk.modules()):
            frozen = getattr(module, "frozen_expert_bias", False)  # Megatron-Core 0.18 does not know it
            if not frozen and isinstance(bias := getattr(module, "expert_bias", None), torch.Tensor):
                routers.setdefault(len(bias), []).append(module)
        for size in sorted(routers):
            update([torch.nn.ModuleList(routers[size])], *args, **kwargs)

    upstream._update_router_expert_bias = by_size  # type: ignore[attr-defined]
