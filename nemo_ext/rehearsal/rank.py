"""The process of one rehearsed rank: `python -m nemo_ext.rehearsal.rank ASKED.json RECORD.json`."""

import json
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from nemo_ext.architecture.pattern import parse
from nemo_ext.job.files import write_text
from nemo_ext.job.parent import end_with_parent
from nemo_ext.megatron.rank import leave
from nemo_ext.rehearsal.checkpoint import plan
from nemo_ext.rehearsal.tracker import Tracker
from nemo_ext.rehearsal.world import fake_world, megatron_arguments

ONCE_A_STEP = ("reduce", "optimizer")
"""Phases that a step has once, and not for each micro-batch."""
SYNCHRONISE = ("start_param_sync", "finish_param_sync", "start_grad_sync", "finish_grad_sync")
"""Methods of Megatron's bucket groups that send weights and gradients, also while micro-batches run."""
POINTS = 2000
"""Points of the curve that are kept."""


def rehearse(
    config: Mapping[str, Any],
    *,
    rank: int,
    world: int,
    micro_batches: int,
    kernels: bool = True,
    imbalance: float = 1.0,
) -> dict[str, Any]:
    """What one rank of a training step holds, computes and sends.

    Args:
        config: composed training config, as `settings.rehearsed` makes it; with a teacher its config under `teacher`.
        rank: global rank.
        world: number of ranks.
        micro_batches: how many are run; FLOPs and communication are scaled to those of a step.
        kernels: whether the stand-ins of `kernels.py` are used, or what runs on this machine.
        imbalance: see `kernels.stand_ins`.

    Returns:
        rank, parameters (numbers on it), peak_bytes, peak_phase, peak (bytes by kind at the highest), flops (of a step,
        by phase), collectives (of a step: group, operation, count, bytes), micro_batches (of a step),
        rehearsed_micro_batches, curve ([place in the step 0..1, phase, bytes]), seconds, checkpoint (of
        `checkpoint.plan`); of this process: processor_seconds since it began, memory_bytes (its largest resident set).

    What Megatron or torch refuses is raised as they raise it.
    """
    began = time.monotonic()
    tracker = Tracker()
    tracker.kind = "temporary"
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
            stack.enter_context(stand_ins(tracker, kernels=kernels, imbalance=imbalance))
            stack.enter_context(_once(tracker))
            if kernels:
                stack.enter_context(transformer_engine(tracker, config))
            models, optimizer = step(config, arguments, tracker, run)
            parameters = sum(each.numel() for model in models for each in model.parameters())
            tracker.stop()
            saved = plan(arguments, models, optimizer)
    return {
        "rank": rank,
        **record_of(tracker, parameters=parameters, began=began, scale=whole / run),
        "micro_batches": whole,
        "rehearsed_micro_batches": run,
        "checkpoint": saved,
    }


def record_of(tracker: Tracker, *, parameters: int, began: float, scale: float) -> dict[str, Any]:
    """The part of a record that a tracker has seen; `scale` is what a step has in multiples of what was run."""
    sent: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0])
    for (phase, group, operation), counted in tracker.collectives.items():
        times = 1 if phase in ONCE_A_STEP else scale
        for place, number in enumerate(counted):
            sent[group, operation][place] += number * times
    return {
        "parameters": parameters,
        "peak_bytes": sum(tracker.peak.values()),
        "peak_phase": tracker.peak_phase,
        "peak": {kind: size for kind, size in tracker.peak.items() if size},
        "flops": {phase: round(count * scale) for phase, count in tracker.flops.items()},
        "collectives": [
            {"group": group, "operation": operation, "count": round(count), "bytes": round(size)}
            for (group, operation), (count, size) in sorted(sent.items())
        ],
        "curve": _thinned(tracker.curve),
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(time.process_time(), 1),
        "memory_bytes": largest_resident_set(),
    }


def largest_resident_set() -> int:
    """The most bytes this process has held; `ru_maxrss` would count what the process that started it held."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def step(
    config: Mapping[str, Any], arguments: Any, tracker: Tracker, micro_batches: int
) -> tuple[list[torch.nn.Module], Any]:
    """Builds as the trainer does, then one training step after the optimizer has its state.

    Returns:
        The models and the optimizer.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config
    from megatron.training import training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from nemo_ext.megatron.arguments import pattern_with_cuts
    from nemo_ext.megatron.distillation import OnlineTeacher, build_teacher
    from nemo_ext.megatron.forward_step import forward_step
    from nemo_ext.megatron.model import model_config
    from nemo_ext.megatron.stability import Stability, ZLoss

    made = model_config(config["model"], pattern_with_cuts(config), arguments)
    weight = Stability.from_config(config).z_loss
    z_loss = ZLoss(weight) if weight else None
    distilled, ahead = None, partial(forward_step, z_loss=z_loss)
    if (teacher := config.get("teacher")) is not None:
        distilled = OnlineTeacher(config, load=lambda _: build_teacher(teacher))
        ahead = partial(forward_step, distillation=distilled, z_loss=z_loss)
        made.post_wrap_hooks.append(distilled.attach)
    if z_loss is not None:
        made.post_wrap_hooks.append(z_loss.attach)
    container = pretrain_cfg_container_from_args(arguments, made)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, cfg_container=container, pg_collection=groups
    )
    settings = get_model_config(models[0])
    settings.grad_scale_func = optimizer.scale_loss

    def reduce(*args: Any, **kwargs: Any) -> None:
        tracker.phase = "optimizer"  # what comes after the last micro-batch
        with tracker.during("reduce", "temporary"):
            finalize_model_grads(*args, **kwargs)

    settings.finalize_model_grads_func = reduce
    optimizer.step()  # makes the moments
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.optimizer is None:  # of a stage without parameters
            continue
        masters = [group["params"] for group in each.optimizer.param_groups]
        states = tree_iter((masters, list(each.optimizer.state.values())))
        tracker.label((state for state in states if isinstance(state, torch.Tensor)), "optimizer")
    for model in models:  # last: in FP32 they are the optimizer's masters
        tracker.label((*model.module.parameters(), *model.module.buffers()), "weights")
        for buffer in (*model.buffers, *model.expert_parallel_buffers):  # of the wrapper: a list
            tracker.label([buffer.grad_data], "gradients")
            if buffer.param_data is not None:
                tracker.label([buffer.param_data], "weights")
    if distilled is not None:
        tracker.label((*distilled.teacher.parameters(), *distilled.teacher.buffers()), "teacher")
    tracker.forget_peak()

    def forward(iterator: Any, model: Any) -> Any:
        with tracker.during("forward", "activations"):
            return ahead(iterator, model)

    update = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        with tracker.during("optimizer", "temporary"):
            return update(*args, **kwargs)

    optimizer.step = stepped
    training.get_num_microbatches = lambda: micro_batches
    schedule = get_forward_backward_func()
    if distilled is not None and arguments.pipeline_model_parallel_size > 1:
        schedule = distilled.schedule(schedule)
    data = [RerunDataIterator(_batches(arguments)) for _ in models]
    with tracker.during("backward", "temporary"):
        training.train_step(
            forward,
            data if len(models) > 1 else data[0],
            models,
            optimizer,
            scheduler,
            settings,
            schedule,
            iteration=0,
        )
    return list(models), optimizer


@contextmanager
def _once(tracker: Tracker) -> Iterator[None]:
    """Megatron's data parallelism with its sending as a phase that a step has once."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    def apart(method: Any) -> Any:
        @wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with tracker.during("reduce", tracker.kind):
                return method(*args, **kwargs)

        return wrapped

    with ExitStack() as stack:
        for name in SYNCHRONISE:
            stack.enter_context(patch.object(Group, name, apart(getattr(Group, name))))
        yield


def explained(error: BaseException, pattern: str) -> str:
    """Reason of an error as one line, with the block that was built or run, and where it was raised."""
    block, at = "", ""
    blocks = parse(pattern).blocks
    for frame, line in traceback.walk_tb(error.__traceback__):
        at = f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line}"
        here = frame.f_locals
        number = here.get("layer_number", getattr(here.get("self"), "layer_number", None))
        if isinstance(number, int) and 1 <= number <= len(blocks):
            block = f"block {number} ({blocks[number - 1]}): "
    said = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{block}{type(error).__name__}: {said[:500]} ({at})"


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


def main(work: Callable[..., dict[str, Any]]) -> None:
    """A process that calls `work` with what ASKED.json has, and writes RECORD.json or its reason as the last line."""
    end_with_parent(signal.SIGKILL)
    asked = json.loads(Path(sys.argv[1]).read_text())
    code = 0
    try:
        write_text(Path(sys.argv[2]), json.dumps(work(**asked)))
    except Exception as error:
        traceback.print_exc()
        print(explained(error, asked["config"]["model"]["pattern"]))
        code = 1
    leave(code)


if __name__ == "__main__":
    main(rehearse)
