"""The process of one rehearsed rank: `python -m nemo_ext.rehearsal.rank ASKED.json RECORD.json`."""

import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_ext.job.files import write_text
from nemo_ext.megatron.rank import leave
from nemo_ext.rehearsal.tracker import Tracker
from nemo_ext.rehearsal.world import fake_world, megatron_arguments

ONCE_A_STEP = ("DATA_PARALLEL", "DISTRIBUTED_OPTIMIZER", "MODEL_PARALLEL_GROUP", "default_pg", "EMBEDDING")
"""Parts of the names of groups that talk once a step, not once a micro-batch."""
PARTS = ("TENSOR_AND_", "TENSOR_MODEL", "PIPELINE_MODEL", "EXPERT_MODEL", "EXPERT_TENSOR", "CONTEXT")
POINTS = 2000
"""Points of the curve that are kept."""


def rehearse(
    config: Mapping[str, Any], *, rank: int, world: int, micro_batches: int, kernels: bool = True
) -> dict[str, Any]:
    """What one rank of a training step holds, computes and sends.

    Args:
        config: composed training config, as `world.rehearsed` makes it.
        rank: global rank.
        world: number of ranks.
        micro_batches: how many are run; FLOPs and communication are scaled to those of a step.
        kernels: whether the stand-ins of `kernels.py` are used, or what runs on this machine.

    Returns:
        parameters: on this rank. peak: bytes by kind at the highest, and `phase`, `bytes`. flops: of a step, by phase.
        collectives: {group, operation, count, bytes} of a step. curve: [place in the step 0..1, bytes].

    Raises:
        ValueError: Megatron refuses it, or a shape does not fit; gives the reason.
    """
    began = time.monotonic()
    tracker = Tracker()
    with fake_world(rank, world):
        arguments = megatron_arguments(config)
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        from nemo_ext.rehearsal.kernels import stand_ins

        whole = get_num_microbatches()
        run = min(micro_batches, whole)
        with FakeTensorMode(allow_non_fake_inputs=True), tracker, stand_ins(tracker) if kernels else nullcontext():
            models = step(config, arguments, tracker, run)
            parameters = sum(each.numel() for model in models for each in model.parameters())
    scale = whole / run
    collectives = []
    for (group, operation), (count, size) in sorted(tracker.collectives.items()):
        once = any(part in group for part in ONCE_A_STEP) and not group.startswith(PARTS)
        times = 1.0 if once else scale
        collectives.append(
            {"group": group, "operation": operation, "count": round(count * times), "bytes": round(size * times)}
        )
    return {
        "rank": rank,
        "parameters": parameters,
        "peak_bytes": sum(tracker.peak.values()),
        "peak_phase": tracker.peak_phase,
        "peak": {kind: size for kind, size in tracker.peak.items() if size},
        "flops": {phase: round(count * scale) for phase, count in tracker.flops.items()},
        "collectives": collectives,
        "micro_batches": whole,
        "rehearsed_micro_batches": run,
        "curve": _thinned(tracker.curve),
        "seconds": round(time.monotonic() - began, 1),
    }


def step(config: Mapping[str, Any], arguments: Any, tracker: Tracker, micro_batches: int) -> list[torch.nn.Module]:
    """Builds as the trainer does, then one training step after the optimizer has its state."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config
    from megatron.training import training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from nemo_ext.megatron.arguments import pattern_with_cuts
    from nemo_ext.megatron.forward_step import forward_step
    from nemo_ext.megatron.model import model_config

    container = pretrain_cfg_container_from_args(
        arguments, model_config(config["model"], pattern_with_cuts(config), arguments)
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, cfg_container=container, pg_collection=groups
    )
    for model in models:
        tracker.label((*model.module.parameters(), *model.module.buffers()), "weights")
        for buffer in (
            *model.buffers,
            *model.expert_parallel_buffers,
        ):  # those of gradients, a list in Megatron's class
            tracker.label([buffer.grad_data], "gradients")
            if buffer.param_data is not None:
                tracker.label([buffer.param_data], "weights")
    settings = get_model_config(models[0])
    settings.grad_scale_func = optimizer.scale_loss
    settings.finalize_model_grads_func = finalize_model_grads
    optimizer.step()  # makes the moments
    tracker.forget_peak()

    def forward(iterator: Any, model: Any) -> Any:
        with tracker.during("forward", "activations"):
            return forward_step(iterator, model)

    update = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        with tracker.during("optimizer", "temporary"):
            return update(*args, **kwargs)

    optimizer.step = stepped
    training.get_num_microbatches = lambda: micro_batches
    data = [RerunDataIterator(_batches(arguments)) for _ in models]
    with tracker.during("backward", "temporary"):
        training.train_step(
            forward,
            data if len(models) > 1 else data[0],
            models,
            optimizer,
            scheduler,
            settings,
            get_forward_backward_func(),
            iteration=0,
        )
    return list(models)


def _batches(arguments: Any) -> Iterator[dict[str, torch.Tensor]]:
    shape = (arguments.micro_batch_size, arguments.seq_length)
    while True:
        ids = torch.zeros(shape, dtype=torch.long)
        places = torch.arange(arguments.seq_length).expand(shape)
        yield {"tokens": ids, "labels": ids.clone(), "loss_mask": torch.ones(shape), "position_ids": places}


def _thinned(curve: list[tuple[int, str, int]]) -> list[tuple[float, str, int]]:
    """The highest point of each of `POINTS` pieces."""
    if not curve:
        return []
    last = max(curve[-1][0], 1)
    highest: dict[int, tuple[float, str, int]] = {}
    for at, phase, size in curve:
        piece = at * POINTS // last
        if piece not in highest or size > highest[piece][2]:
            highest[piece] = (at / last, phase, size)
    return [highest[piece] for piece in sorted(highest)]


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    code = 0
    try:
        write_text(Path(sys.argv[2]), json.dumps(rehearse(**asked)))
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)
