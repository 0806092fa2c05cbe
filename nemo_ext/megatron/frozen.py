"""Weights that a run does not train: the whole model, or all but multi-token prediction (MTP); new weights of MTP."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def freeze(model: list[torch.nn.Module], *, but_mtp: bool = False) -> list[torch.nn.Module]:
    """Freeze the model's stages, and return them; Megatron-Core 0.19's model builders ignore its flag for this.

    As with Megatron's `freeze_all_layers` (training/training.py, `get_model`), weights get no gradients, and routers
    keep their expert bias. With `but_mtp`, multi-token prediction is trained, as with the later
    `freeze_base_model_for_mtp`.
    """
    module: Any
    for stage in model:
        stage.requires_grad_(False)
        trained = getattr(stage, "mtp", None) if but_mtp else None
        kept = set() if trained is None else set(trained.requires_grad_(True).modules())
        for module in set(stage.modules()) - kept:
            if hasattr(module, "expert_bias"):
                module.frozen_expert_bias = True
    return model


def load_without_mtp(model: list[torch.nn.Module], *, ends: list[Callable[[], None]]) -> list[torch.nn.Module]:
    """Exclude multi-token prediction from what the model's stages load, and return the stages.

    Megatron loads the tensors that `sharded_state_dict` names, so the excluded weights keep their initial values.

    Args:
        model: the stages.
        ends: list to which this appends a function that ends the exclusion; call it before saving anything.
    """
    depth: Any
    for depth in (stage.mtp for stage in model if hasattr(stage, "mtp")):
        depth.sharded_state_dict = lambda *_, **__: {}
        ends.append(partial(delattr, depth, "sharded_state_dict"))
    return model
