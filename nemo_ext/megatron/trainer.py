"""Training on one rank: turns the composed config into checked Megatron arguments and calls Megatron's `pretrain()`.

`rank.py` is the process around it. Laptops and clusters run the same file. Without CUDA, the CPU runtime is installed
first (`megatron/cpu`), and without mamba_ssm, the torch kernels.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import torch

from nemo_ext.architecture.cost import peak_of, six_n, train_flops_per_token
from nemo_ext.architecture.model import Architecture
from nemo_ext.checkpoint import retention
from nemo_ext.checkpoint.pickles import only_data
from nemo_ext.data.phases import Plan, plan_of
from nemo_ext.job import run_directory
from nemo_ext.job.files import write_text
from nemo_ext.megatron import guard
from nemo_ext.megatron.arguments import command_line, one_parser, pattern_with_cuts, without_unused_packages
from nemo_ext.megatron.cpu import runtime
from nemo_ext.megatron.fp8 import Precision, check_backend
from nemo_ext.megatron.run import target_of
from nemo_ext.memory import sampler


def main(config_path: str, prepare: Callable[[], None] | None = None) -> None:
    """Train from a resolved config.

    Args:
        config_path: path of the resolved config.
        prepare: function called after Megatron is imported and before its arguments are read.
    """
    main_entry = time.time()
    config = run_directory.read_config(Path(config_path))
    memory_phases = profile_memory(config)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # required under tensor and context parallelism
    runtime.check_gpu()
    runtime.check_ranks()
    # Kernels' packages import transformers too (mamba_ssm).
    transformers = torch.cuda.is_available() or config["megatron"].get("tokenizer_type") != "NullTokenizer"
    with without_unused_packages(config["megatron"], transformers=transformers):
        stand_ins = runtime.enable()  # before any import of Megatron, which binds these names once
        only_data()
        share_cores(int(config["launcher"]["nproc_per_node"]))

        # Imported here: Megatron's modules bind mamba_ssm and torch.cuda names at import.
        import_module("megatron.core.tokenizers.text")  # otherwise imported after the context
        from megatron.core.enums import ModelType
        from megatron.training import get_args, pretrain, set_startup_timestamps, training
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        from nemo_ext.megatron import distillation, frozen, phases, stability
        from nemo_ext.megatron.expert_bias import update_by_size
        from nemo_ext.megatron.forward_step import datasets, forward_step
        from nemo_ext.megatron.model import model_config
        from nemo_ext.megatron.versions import model_of_container

    if prepare is not None:
        prepare()
    set_startup_timestamps(program_start=psutil.Process().create_time(), main_entry=main_entry)
    sys.argv = [sys.argv[0], *command_line(config)]
    with one_parser():
        arguments = parse_and_validate_args()
    check_backend(config, arguments.transformer_impl)
    write_checkpoints_without_helper(arguments)
    copy_before_writing(arguments)
    resume_with_settings(arguments)
    load_distributed_optimizers(arguments)
    arguments.mixed_lengths = (config.get("data") or {}).get("mixed_lengths")
    if arguments.rank == 0:
        print(f"stand-ins for CUDA and kernels on this machine: {', '.join(stand_ins) or 'none'}")
    model = model_config(config["model"], pattern_with_cuts(config), arguments, Precision.from_config(config))
    if getattr(arguments, "freeze_all_layers", False):  # not in every version
        model.pre_wrap_hooks.append(frozen.freeze)
    if config["train"].get("mtp_only"):
        model.pre_wrap_hooks.append(partial(frozen.freeze, but_mtp=True))
    loaded: list[Callable[[], None]] = []
    if config["train"].get("new_mtp") and run_directory.last_checkpoint(Path(config["run_dir"])) is None:
        model.pre_wrap_hooks.append(partial(frozen.load_without_mtp, ends=loaded))
    distilled = distillation.from_config(config, arguments)
    stable = stability.Stability.from_config(config)
    z_loss = stability.ZLoss(stable.z_loss) if stable.z_loss else None
    step: Callable[..., Any] = partial(forward_step, distillation=distilled, z_loss=z_loss)
    alive = None
    if (minutes := guard.Guard.from_config(config).minutes) is not None:
        alive = guard.Alive(minutes, Path(config["run_dir"]) / guard.STACKS, arguments.rank)
        step = partial(watched, step)
    training.dummy_train_step = guard.read_and_drop
    if distilled is not None:
        if isinstance(distilled, distillation.OnlineTeacher) and arguments.pipeline_model_parallel_size > 1:
            schedule = training.get_forward_backward_func
            training.get_forward_backward_func = lambda *a, **named: distilled.schedule(schedule(*a, **named))
        model.post_wrap_hooks.append(distilled.attach)  # after the student, whose initial weights stay the same
    if z_loss is not None:
        model.post_wrap_hooks.append(z_loss.attach)  # last: the losses before it may overwrite the logits
    stability.use(stable)
    model.pre_wrap_hooks.append(partial(note_phases, memory_phases=memory_phases))
    plan = plan_of(config)
    provide: Callable[[list[int]], tuple[Any, Any, None]] = datasets
    if plan is not None:
        phases.use_token_schedule(plan, config["segment"]["whole"])
        provide = partial(phases.phased_datasets, plan, config["segment"])
    if config["train"].get("validate_at_start"):
        model.post_wrap_hooks.append(partial(validate_at_start, run_dir=Path(config["run_dir"]), forward_step=step))

    def provider(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, None]:
        # The first call after the checkpoint is loaded, when the step that training resumes from is known.
        built = provide(samples)
        while loaded:
            loaded.pop()()
        if not vp_stage:
            attach_metrics(config, plan, first_step=get_args().iteration)
        return built

    provider.is_distributed = True  # type: ignore[attr-defined]
    container = pretrain_cfg_container_from_args(arguments, model)
    update_by_size()
    conclude = retain(config, arguments, () if plan is None else [phase.last_step for phase in plan.phases])
    try:
        with one_parser():  # its fault tolerance reads the command line again
            pretrain(
                container,
                provider,
                model_type=ModelType.encoder_or_decoder,
                forward_step_func=step,
                **model_of_container(container),
            )
    finally:
        memory_phases.begin(None)
        close_metrics()
        if alive is not None:
            alive.end()
        conclude()
    if plan is not None and (saved := run_directory.last_checkpoint(Path(config["run_dir"]))) is not None:
        phases.check_consumed(plan, saved)
    torch.distributed.destroy_process_group()


def watched(forward_step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Report this rank's progress to its guard, then run the forward step."""
    guard.here()
    return forward_step(*arguments, **named)


def share_cores(ranks: int) -> None:
    """Without CUDA, give each rank an equal share of the machine's cores as threads, unless OMP_NUM_THREADS is set."""
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def write_checkpoints_without_helper(arguments: argparse.Namespace) -> None:
    """Make Megatron keep the results of writing a checkpoint in this process, if it does not write asynchronously.

    Megatron's queue for the results is a separate process (core/dist_checkpointing/strategies/filesystem_async.py) that
    imports Megatron to read them. On every rank, this takes seconds at the first checkpoint, and half a gigabyte of
    memory.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if not arguments.async_save:
        filesystem_async._results_queue = queue.Queue()


def copy_before_writing(arguments: argparse.Namespace) -> None:
    """Copy tensors in host memory before an asynchronous checkpoint is written, so that it is consistent.

    Megatron's persistent writer copies tensors on a GPU, but shares the memory of tensors on the CPU, which training
    then changes. This affects machines without a GPU, and offloaded optimizers.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    prepare = FileSystemWriterAsync.prepare_write_data

    def copied(self: Any, plan: Any, planner: Any) -> None:
        prepare(self, plan, planner)
        for _, _, (_, tensors) in self.write_buckets:
            tensors[:] = [(item, tensor.clone() if tensor.is_cpu else tensor) for item, tensor in tensors]

    if arguments.async_save:
        FileSystemWriterAsync.prepare_write_data = copied


def resume_with_settings(arguments: argparse.Namespace) -> None:
    """With override_opt_param_scheduler, make a resumed optimizer take rates, betas and epsilon from the config.

    Megatron finds a checkpoint's parameter groups by settings that include the learning rate, so a changed rate would
    end the run. It also restores the saved betas and epsilon. Groups that differ only in their rates, as with
    `decoupled_lr`, are paired in the order of their rates.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    def by_kind(groups: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
        kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for group in sorted(groups, key=lambda group: group.get("max_lr") or 0):
            kinds.setdefault(tuple(group.get(key) for key in same), []).append(group)
        return kinds

    def with_settings(load: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
        def load_state_dict(self: Any, state: dict[str, Any]) -> None:
            names = ("optimizer", "optimizer_state_dict")
            saved: dict[str, Any] = next((state[name] for name in names if name in state), state)
            now = by_kind(self.optimizer.param_groups)
            for kind, groups in by_kind(saved["param_groups"]).items():
                alike = now.get(kind, [])
                if len(alike) == 1:  # a pipeline rank may not have all groups that differ in their rates
                    alike *= len(groups)
                if len(alike) == len(groups):  # else Megatron decides
                    for group, current in zip(groups, alike, strict=True):
                        group.update({key: current[key] for key in settings if key in current})
            load(self, state)

        return load_state_dict

    if arguments.override_opt_param_scheduler:
        settings = ("max_lr", "min_lr", "betas", "eps", "default_config")  # the last marks whose rate is logged
        same = [key for key in optimizer.param_group_identifier_keys if key not in settings]
        kinds = (optimizer.FP32Optimizer, optimizer.Float16OptimizerWithFloat16Params)
        for kind in (*kinds, distrib_optimizer.DistributedOptimizer):
            kind.load_state_dict = with_settings(kind.load_state_dict)


def load_distributed_optimizers(arguments: argparse.Namespace) -> None:
    """Make distributed optimizers able to resume in fp32, and without Transformer Engine and apex.

    Megatron-Core 0.19 fails to load fp32 parameters in place, because they are leaves that require gradients. With
    torch's Adam, it reads the step from each parameter's state, which exists only after the first step, and loads 0
    instead of the saved step (core/optimizer/distrib_optimizer.py).
    """
    from megatron.core.optimizer import distrib_optimizer

    kind = distrib_optimizer.DistributedOptimizer
    state_dict, load = kind.state_dict, torch.no_grad()(kind.load_state_dict)

    def initialised_state_dict(self: Any) -> dict[str, Any]:
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            if not (state := self.optimizer.state[parameter]):
                state["step"] = torch.tensor(0.0)
                state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        saved: dict[str, Any] = state_dict(self)
        return saved

    def load_with_step(self: Any, state: dict[str, Any]) -> None:
        load(self, state)
        for of_parameter in self.optimizer.state.values():
            of_parameter["step"] = torch.tensor(float(state["optimizer"]["param_groups"][0]["step"]))

    if arguments.use_distributed_optimizer and distrib_optimizer.HAVE_APEX_OR_TE:
        kind.load_state_dict = load
    elif arguments.use_distributed_optimizer:
        kind.state_dict, kind.load_state_dict = initialised_state_dict, load_with_step


def retain(config: Mapping[str, Any], arguments: argparse.Namespace, ends: Collection[int]) -> Callable[[], None]:
    """Make Megatron delete checkpoints according to the config's `retention` section instead of its own rule.

    Megatron deletes on rank 0 after a checkpoint is complete, in a separate process if writing is asynchronous, and
    otherwise in a thread, which would not survive the end of the rank.

    Args:
        config: the run's config.
        arguments: Megatron's arguments, in which its own rule is turned off.
        ends: last steps of the phases.

    Returns:
        Function to call at the end of this start: it waits for deletions, and marks the last step's checkpoint as kept.
    """
    from megatron.training import checkpointing

    settings, before = retention.Retention.from_config(config), guard.Guard.from_config(config).before
    if settings.last is None:
        return lambda: None
    arguments.save_retain_interval = sys.maxsize  # without it, or at its multiples, Megatron deletes nothing
    delete, run_dir, lock = checkpointing._async_delete_checkpoint_impl, Path(config["run_dir"]), threading.Lock()

    def remove_old(save: str, _: int, *others: Any) -> None:
        with lock:
            for step in retention.set_aside(run_dir, settings, before=before, ends=ends):
                delete(str(Path(save) / retention.REMOVED), step, *others)

    def conclude() -> None:
        checkpointing.finalize_deletion_processes(blocking=True)
        last = target_of(config)[0]
        if arguments.rank == 0 and run_directory.last_checkpoint(run_dir) == last:
            try:
                retention.keep(run_dir, last)
                remove_old(arguments.save, last)
            except OSError as error:  # a full disk, after a complete run
                print(f"not all old checkpoints were removed ({error}): free space on the disk")

    checkpointing._async_delete_checkpoint_impl = remove_old
    return conclude


def profile_memory(config: Mapping[str, Any]) -> sampler.Phases:
    """Start a memory sampler on each node's first rank; return a log of phases, which only the first rank writes."""
    seconds = sampler.interval(config)
    if seconds is None:
        return sampler.Phases(None)
    folder = Path(config["run_dir"]) / sampler.FOLDER
    phases = sampler.Phases(folder if os.environ.get("RANK", "0") == "0" else None)
    phases.begin("setup")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sampler.start(folder, root=sampler.root_of_ranks(), seconds=seconds)
    return phases


def note_phases(model: list[torch.nn.Module], *, memory_phases: sampler.Phases) -> list[torch.nn.Module]:
    """Make Megatron's timers record the run's phases in a log, and return the model's stages unchanged.

    This is a hook for Megatron's model builder, because the timers do not exist earlier.
    """
    from megatron.training import get_timers

    from nemo_ext.megatron.metrics import PhaseTimers

    PhaseTimers.take_over(get_timers(), memory_phases)
    return model


def attach_metrics(config: Mapping[str, Any], plan: Plan | None, *, first_step: int) -> None:
    """Insert the metrics writer between Megatron and TensorBoard on the last rank, which is the one that logs.

    Args:
        config: the run's config.
        plan: plan of the phases; None without phases.
        first_step: step that training starts or resumes from.
    """
    from megatron.training import get_args, get_timers, global_vars

    from nemo_ext.megatron.metrics import MetricsWriter

    arguments = get_args()
    if arguments.rank != arguments.world_size - 1:
        return
    architecture, peak = Architecture.from_config(config), peak_flops()
    if peak is not None:
        print(f"MFU is relative to a peak of {peak / 1e12:.3g} TFLOP/s per rank", flush=True)
    tokens_per_step = arguments.global_batch_size * arguments.seq_length
    frozen = getattr(arguments, "freeze_all_layers", False)  # not in every version
    mtp_only = bool(config["train"].get("mtp_only"))
    begins = () if plan is None else tuple(phase.first_step for phase in plan.phases)
    watch = guard.Watch(guard.Guard.from_config(config), Path(config["run_dir"]), first_step, begins)

    def on_line(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        watch(line)

    global_vars._GLOBAL_TENSORBOARD_WRITER = MetricsWriter(
        Path(config["run_dir"]) / run_directory.METRICS,
        first_step=first_step,
        tokens_per_step=tokens_per_step,
        tokens_at=(lambda step: step * tokens_per_step) if plan is None else plan.tokens_at_step,
        flops_per_token=train_flops_per_token(
            architecture, seq_length=arguments.seq_length, frozen=frozen, mtp_only=mtp_only
        ),
        flops_per_token_6n=six_n(architecture, frozen=frozen or mtp_only),
        peak_flops=None if peak is None else peak * arguments.world_size,
        cpu_seconds=None if torch.cuda.is_available() else get_timers().cpu.seconds,
        tensorboard=global_vars._GLOBAL_TENSORBOARD_WRITER,
        on_line=on_line,
    )


def close_metrics() -> None:
    """Write pending metrics, on the rank that logs."""
    from megatron.training import global_vars

    from nemo_ext.megatron.metrics import MetricsWriter

    if isinstance(global_vars._GLOBAL_TENSORBOARD_WRITER, MetricsWriter):
        global_vars._GLOBAL_TENSORBOARD_WRITER.close()


def validate_at_start(
    model: list[torch.nn.Module], *, run_dir: Path, forward_step: Callable[..., Any]
) -> list[torch.nn.Module]:
    """Write the untrained model's validation loss to metrics.jsonl, and return the model's stages unchanged.

    This is a hook for Megatron's model builder, because Megatron's loop cannot evaluate before the first step. It calls
    Megatron's own `evaluate` with `forward_step`, unless the run already has a checkpoint or has no evaluations.
    """
    from megatron.core.utils import get_model_config
    from megatron.training import get_args, training

    from nemo_ext.megatron.forward_step import LOSS, datasets

    arguments = get_args()
    if run_directory.last_checkpoint(run_dir) is not None or not arguments.eval_iters:
        return model
    _, validation, _ = datasets(training.get_train_valid_test_num_samples())
    consumed = arguments.consumed_valid_samples
    # An iterator per virtual pipeline stage: each stage reads every batch.
    iterators = [iter(training.build_pretraining_data_loader(validation, 0)) for _ in model]
    data = iterators if len(model) > 1 else iterators[0]
    losses, _, _ = training.evaluate(forward_step, data, model, None, get_model_config(model[0]))
    arguments.consumed_valid_samples = consumed
    if LOSS in losses and arguments.rank == arguments.world_size - 1:
        line = {"step": 0, "tokens": 0, "val_loss": losses[LOSS].item()}
        write_text(run_dir / run_directory.METRICS, json.dumps(line) + "\n")
    return model


def peak_flops() -> float | None:
    """Return the device's peak FLOP/s: NVIDIA's BF16 figure, or a CPU's measured matmul rate; None for unknown GPUs."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties()
        clock = getattr(device, "clock_rate", 0)  # in kHz; not in every torch
        return peak_of(device.name, device.multi_processor_count, clock * 1e3 or None)
    size = 1024
    a = torch.rand(size, size)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best
