"""Entry point of a rehearsed rank: `python -m nemo_ext.rehearsal.rank REQUEST.json RECORD.json`."""

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
"""Phases that occur once per step rather than once per micro-batch."""
SYNCHRONISE = ("start_param_sync", "finish_param_sync", "start_grad_sync", "finish_grad_sync")
"""Methods of Megatron's bucket groups that communicate weights and gradients, also during micro-batches."""
POINTS = 2000
"""Maximum number of points in a record's memory curve."""


def rehearse(
    config: Mapping[str, Any],
    *,
    rank: int,
    world: int,
    micro_batches: int,
    kernels: bool = True,
    imbalance: float = 1.0,
) -> dict[str, Any]:
    """Rehearse one rank of a training step, measuring memory, FLOPs and communication.

    Args:
        config: training config from `settings.rehearsed`; a teacher's config, if any, is under `teacher`.
        rank: global rank.
        world: number of ranks.
        micro_batches: number of micro-batches to run; FLOPs and communication are scaled to a whole step.
        kernels: whether to use the stand-ins of `kernels.py` in place of the modules that run on a CPU.
        imbalance: number of tokens routed to this rank's experts, divided by the mean over expert-parallel ranks.

    Returns:
        A record with rank, parameters (number on this rank), peak_bytes, peak_phase, peak (bytes at the peak, keyed by
        kind), flops (per step, keyed by phase), collectives (per step: group, operation, count, bytes), micro_batches
        (per step), rehearsed_micro_batches, curve ([position in the step 0..1, phase, bytes]), seconds, checkpoint
        (from `checkpoint.plan`), and for this process processor_seconds and memory_bytes (peak resident set).

    Errors of Megatron and torch are not caught.
    """
    began = time.monotonic()
    tracker = Tracker()
    tracker.kind = "temporary"
    with fake_world(rank, world):
        arguments = megatron_arguments(config)
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        from nemo_ext.rehearsal.kernels import stand_ins
        from nemo_ext.rehearsal.transformer_engine import transformer_engine

        total = get_num_microbatches()
        run = min(micro_batches, total)
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(tracker)
            stack.enter_context(stand_ins(tracker, kernels=kernels, imbalance=imbalance))
            stack.enter_context(_once(tracker))
            if kernels:
                stack.enter_context(transformer_engine(tracker, config))
            models, optimizer = step(config, arguments, tracker, run)
            parameters = sum(weight.numel() for model in models for weight in model.parameters())
            tracker.stop()
            checkpoint = plan(arguments, models, optimizer)
    return {
        "rank": rank,
        **record_of(tracker, parameters=parameters, began=began, scale=total / run),
        "micro_batches": total,
        "rehearsed_micro_batches": run,
        "checkpoint": checkpoint,
    }


def record_of(tracker: Tracker, *, parameters: int, began: float, scale: float) -> dict[str, Any]:
    """Return a tracker's measurements as a record, the largest part of the result of `rehearse`.

    Args:
        tracker: tracker of the rank.
        parameters: number of parameters on the rank.
        began: start of the rehearsal, by `time.monotonic`.
        scale: number of micro-batches in a step, divided by the number that were run.
    """
    sent: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0])
    for (phase, group, operation), counted in tracker.collectives.items():
        times = 1 if phase in ONCE_A_STEP else scale
        for index, number in enumerate(counted):
            sent[group, operation][index] += number * times
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
    """Peak resident bytes of this process; `ru_maxrss` would include the peak of its parent before the fork."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def step(
    config: Mapping[str, Any], arguments: Any, tracker: Tracker, micro_batches: int
) -> tuple[list[torch.nn.Module], Any]:
    """Build model and optimizer as the trainer does, create the optimizer state, then run one training step.

    Args:
        config: training config, as for `rehearse`.
        arguments: Megatron's arguments for this config.
        tracker: tracker that records the step.
        micro_batches: number of micro-batches to run.

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
    from nemo_ext.megatron.frozen import freeze
    from nemo_ext.megatron.model import model_config
    from nemo_ext.megatron.stability import Stability, ZLoss

    model_settings = model_config(config["model"], pattern_with_cuts(config), arguments)
    weight = Stability.from_config(config).z_loss
    z_loss = ZLoss(weight) if weight else None
    online_teacher, forward_pass = None, partial(forward_step, z_loss=z_loss)
    if (teacher := config.get("teacher")) is not None:
        online_teacher = OnlineTeacher(config, load=lambda _: build_teacher(teacher))
        forward_pass = partial(forward_step, distillation=online_teacher, z_loss=z_loss)
        model_settings.post_wrap_hooks.append(online_teacher.attach)
    if z_loss is not None:
        model_settings.post_wrap_hooks.append(z_loss.attach)
    if (config.get("train") or {}).get("mtp_only"):
        model_settings.pre_wrap_hooks.append(partial(freeze, but_mtp=True))
    container = pretrain_cfg_container_from_args(arguments, model_settings)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    models, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder, cfg_container=container, pg_collection=groups
    )
    settings = get_model_config(models[0])
    settings.grad_scale_func = optimizer.scale_loss

    def reduce(*args: Any, **kwargs: Any) -> None:
        tracker.phase = "optimizer"  # everything after the last micro-batch
        with tracker.during("reduce", "temporary"):
            finalize_model_grads(*args, **kwargs)

    settings.finalize_model_grads_func = reduce
    optimizer.step()  # makes the moments
    for chained in getattr(optimizer, "chained_optimizers", [optimizer]):
        if chained.optimizer is None:  # a stage without parameters
            continue
        masters = [group["params"] for group in chained.optimizer.param_groups]
        states = tree_iter((masters, list(chained.optimizer.state.values())))
        tracker.label((state for state in states if isinstance(state, torch.Tensor)), "optimizer")
    for model in models:  # after the optimizer: in FP32 the weights are its masters
        tracker.label((*model.module.parameters(), *model.module.buffers()), "weights")
        for buffer in (*model.buffers, *model.expert_parallel_buffers):  # a list of the DDP wrapper, not the method
            tracker.label([buffer.grad_data], "gradients")
            if buffer.param_data is not None:
                tracker.label([buffer.param_data], "weights")
    if online_teacher is not None:
        tracker.label((*online_teacher.teacher.parameters(), *online_teacher.teacher.buffers()), "teacher")
    tracker.forget_peak()

    def forward(iterator: Any, model: Any) -> Any:
        with tracker.during("forward", "activations"):
            return forward_pass(iterator, model)

    update = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        with tracker.during("optimizer", "temporary"):
            return update(*args, **kwargs)

    optimizer.step = stepped
    training.get_num_microbatches = lambda: micro_batches
    schedule = get_forward_backward_func()
    if online_teacher is not None and arguments.pipeline_model_parallel_size > 1:
        schedule = online_teacher.schedule(schedule)
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
    """Context manager that counts Megatron's data-parallel communication in the phase `reduce`, once per step."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    def as_reduce(method: Any) -> Any:
        @wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with tracker.during("reduce", tracker.kind):
                return method(*args, **kwargs)

        return wrapped

    with ExitStack() as stack:
        for name in SYNCHRONISE:
            stack.enter_context(patch.object(Group, name, as_reduce(getattr(Group, name))))
        yield


def explain(error: BaseException, pattern: str) -> str:
    """Describe an error in one line: the block that was being built or run, the message, and the place in the source.

    `pattern` is the model's pattern, used to name the block.
    """
    block, at = "", ""
    blocks = parse(pattern).blocks
    for frame, line in traceback.walk_tb(error.__traceback__):
        at = f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{line}"
        names = frame.f_locals
        number = names.get("layer_number", getattr(names.get("self"), "layer_number", None))
        if isinstance(number, int) and 1 <= number <= len(blocks):
            block = f"block {number} ({blocks[number - 1]}): "
    message = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{block}{type(error).__name__}: {message[:500]} ({at})"


def _batches(arguments: Any) -> Iterator[dict[str, torch.Tensor]]:
    shape = (arguments.micro_batch_size, arguments.seq_length)
    while True:
        ids = torch.zeros(shape, dtype=torch.long)
        places = torch.arange(arguments.seq_length).expand(shape)
        yield {"tokens": ids, "labels": ids.clone(), "loss_mask": torch.ones(shape), "position_ids": places}


def _thinned(curve: list[tuple[int, str, int]]) -> list[tuple[float, str, int]]:
    """Reduce a memory curve to the highest point in each of `POINTS` equal intervals.

    Args:
        curve: (operations so far, phase, live bytes), in order.

    Returns:
        Points (position from 0 to 1, phase, live bytes).
    """
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
    """Run a rank's process: call `work` with the arguments in REQUEST.json, and write its result to RECORD.json.

    On failure, the last line of the output is the reason.
    """
    end_with_parent(signal.SIGKILL)
    request = json.loads(Path(sys.argv[1]).read_text())
    code = 0
    try:
        write_text(Path(sys.argv[2]), json.dumps(work(**request)))
    except Exception as error:
        traceback.print_exc()
        print(explain(error, request["config"]["model"]["pattern"]))
        code = 1
    leave(code)


if __name__ == "__main__":
    main(rehearse)
