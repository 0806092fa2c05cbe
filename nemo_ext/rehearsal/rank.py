"""The process of one rehearsed rank: `python -m nemo_ext.rehearsal.rank ASKED.json RECORD.json`."""

import json
import resource
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_ext.job.files import write_text
from nemo_ext.job.parent import end_with_parent
from nemo_ext.megatron.rank import leave
from nemo_ext.rehearsal.tracker import Tracker
from nemo_ext.rehearsal.world import fake_world, megatron_arguments

ONCE_A_STEP = ("reduce", "optimizer")
"""Phases that a step has once, and not for each micro-batch; so does what data-parallel groups send, whenever it is."""
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
        rank, parameters (numbers on it), peak_bytes, peak_phase, peak (bytes by kind at the highest), flops (of a step,
        by phase), collectives (of a step: group, operation, count, bytes), micro_batches (of a step),
        rehearsed_micro_batches, curve ([place in the step 0..1, phase, bytes]), seconds; of this process:
        processor_seconds since it began, memory_bytes (its largest resident set).

    What Megatron or torch refuses is raised as they raise it.
    """
    began = time.monotonic()
    tracker = Tracker()
    with fake_world(rank, world):
        arguments = megatron_arguments(config)
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        from nemo_ext.rehearsal.kernels import stand_ins
        from nemo_ext.rehearsal.transformer_engine import transformer_engine

        whole = get_num_microbatches()
        run = min(micro_batches, whole)
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(tracker)
            if kernels:
                stack.enter_context(stand_ins(tracker))
                stack.enter_context(transformer_engine(tracker, config))
            models = step(config, arguments, tracker, run)
            parameters = sum(each.numel() for model in models for each in model.parameters())
    scale = whole / run
    sent: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0])
    for (phase, group, operation), counted in tracker.collectives.items():
        times = 1 if phase in ONCE_A_STEP or "DATA_PARALLEL" in group else scale
        for place, number in enumerate(counted):
            sent[group, operation][place] += number * times
    return {
        "rank": rank,
        "parameters": parameters,
        "peak_bytes": sum(tracker.peak.values()),
        "peak_phase": tracker.peak_phase,
        "peak": {kind: size for kind, size in tracker.peak.items() if size},
        "flops": {phase: round(count * scale) for phase, count in tracker.flops.items()},
        "collectives": [
            {"group": group, "operation": operation, "count": round(count), "bytes": round(size)}
            for (group, operation), (count, size) in sorted(sent.items())
        ],
        "micro_batches": whole,
        "rehearsed_micro_batches": run,
        "curve": _thinned(tracker.curve),
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(time.process_time(), 1),
        "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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
        for buffer in (*model.buffers, *model.expert_parallel_buffers):  # of the wrapper: a list
            tracker.label([buffer.grad_data], "gradients")
            if buffer.param_data is not None:
                tracker.label([buffer.param_data], "weights")
    settings = get_model_config(models[0])
    settings.grad_scale_func = optimizer.scale_loss

    def reduce(*args: Any, **kwargs: Any) -> None:
        with tracker.during("reduce", "temporary"):
            finalize_model_grads(*args, **kwargs)

    settings.finalize_model_grads_func = reduce
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
    end_with_parent(signal.SIGKILL)
    asked = json.loads(Path(sys.argv[1]).read_text())
    code = 0
    try:
        write_text(Path(sys.argv[2]), json.dumps(rehearse(**asked)))
    except Exception:
        traceback.print_exc()
        code = 1
    leave(code)
