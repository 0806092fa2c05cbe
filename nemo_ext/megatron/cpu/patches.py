"""Table of named patches for all places where Megatron requires CUDA, applied only where CUDA is absent.

A row gives the target, its replacement, the reason, and where upstream needs it. `tests/megatron/cpu/test_patches.py`
trains without each row in turn and fails when upstream no longer needs it. For Megatron-Core 0.19 and 0.20.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from nemo_ext.megatron.cpu import devices, mamba_step


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One row of the table.

    Attributes:
        name: short name, for `apply(without=...)` and the logs.
        targets: objects to replace, `module:attribute` or `module:Class.attribute`.
        make: makes the replacement from the original.
        why: failure without the patch.
        upstream: file under `megatron/` that needs it.
        applies: returns True if this machine needs the row; by default where CUDA is absent.
    """

    name: str
    targets: tuple[str, ...]
    make: Callable[[Any], Any]
    why: str
    upstream: str
    applies: Callable[[], bool] = lambda: not torch.cuda.is_available()


_originals: dict[str, Any] = {}
"""Original object of each patched target; makes `apply` idempotent and `restore` possible."""


WORKER = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop"


def checkpoint_worker(*arguments: Any, **keywords: Any) -> None:
    """Megatron's checkpoint worker, which applies the rows it needs in its own process."""
    needed = ("device_count", "queue", "checkpoint_worker")
    apply(without=[patch.name for patch in PATCHES if patch.name not in needed])
    _originals[WORKER](*arguments, **keywords)


def _constant_object(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="current_device",
        targets=("torch.cuda:current_device",),
        make=devices.constant(devices.CPU),
        why="parameters, masks and seeds are created on torch.cuda.current_device()",
        upstream="core/ssm/mamba_mixer.py, core/tensor_parallel/layers.py",
    ),
    Patch(
        name="device_keyword",
        targets=tuple(f"torch:{name}" for name in ("rand", "tensor", "zeros")),
        make=devices.on_cpu,
        why='tensor factories are called with device="cuda"',
        upstream="training/training.py, core/optimizer, core/distributed",
    ),
    Patch(
        name="to_cuda",
        targets=("torch:Tensor.cuda",),
        make=devices.identity,
        why="models and batches are moved with .cuda()",
        upstream="training/training.py, training/models/dist_utils.py",
    ),
    Patch(
        name="device_count",
        targets=("torch.cuda:device_count",),
        make=devices.constant(1),
        why="ranks are placed on rank % torch.cuda.device_count()",
        upstream="training/initialize.py",
    ),
    Patch(
        name="device_properties",
        targets=("torch.cuda:get_device_properties",),
        make=_constant_object(devices.device_properties),
        why="argument checks under tensor parallelism ask for the compute capability",
        upstream="training/arguments.py, training/utils/common_utils.py",
    ),
    Patch(
        name="queue",
        targets=("torch.cuda:synchronize", "torch.cuda:set_device"),
        make=devices.constant(None),
        why="timers and checkpoints wait for the device queue",
        upstream="core/timers.py, training/initialize.py, training/checkpointing.py",
    ),
    Patch(
        name="streams",
        targets=("torch.cuda:Stream",),
        make=_constant_object(devices.Stream),
        why="the MoE dispatcher and gradient reduction keep side streams",
        upstream="core/transformer/moe/token_dispatcher.py, core/distributed",
    ),
    Patch(
        name="current_stream",
        targets=("torch.cuda:current_stream",),
        make=_constant_object(devices.Stream),
        why="work is ordered against the current stream",
        upstream="core/tensor_parallel/random.py, core/pipeline_parallel",
    ),
    Patch(
        name="rng_state",
        targets=("torch.cuda:get_rng_state", "megatron.core.tensor_parallel.random:_get_cuda_rng_state"),
        make=_constant_object(devices.get_rng_state),
        why="the model-parallel random states live on the CUDA generator",
        upstream="core/tensor_parallel/random.py",
    ),
    Patch(
        name="set_rng_state",
        targets=("megatron.core.tensor_parallel.random:_set_cuda_rng_state",),
        make=_constant_object(devices.set_rng_state),
        why="without it a forked random state is never put back: no error, wrong numbers",
        upstream="core/tensor_parallel/random.py",
    ),
    Patch(
        name="manual_seed",
        targets=("torch.cuda:manual_seed",),
        make=lambda original: lambda seed: torch.default_generator.manual_seed(int(seed)),
        why="without it every model-parallel random state is the same: no error, wrong numbers",
        upstream="core/tensor_parallel/random.py",
    ),
    Patch(
        name="tensor_type",
        targets=("torch:Tensor.type",),
        make=devices.cuda_tensor_type,
        why='the optimizers compare Tensor.type() with "torch.cuda.FloatTensor"',
        upstream="core/optimizer/optimizer.py, core/optimizer/distrib_optimizer.py",
    ),
    Patch(
        name="allow_no_cuda",
        targets=("megatron.training.training:initialize_megatron",),
        make=lambda original: partial(original, allow_no_cuda=True),
        why="pretrain() does not pass allow_no_cuda on",
        upstream="training/training.py",
    ),
    Patch(
        name="mamba_convolution_step",
        targets=("megatron.core.ssm.mamba_mixer:causal_conv1d_update",),
        make=_constant_object(mamba_step.causal_conv1d_update),
        why="a decoding step runs a Triton kernel",
        upstream="core/ssm/mamba_mixer.py",
    ),
    Patch(
        name="mamba_scan_step",
        targets=("megatron.core.ssm.mamba_mixer:selective_state_update",),
        make=_constant_object(mamba_step.selective_state_update),
        why="a decoding step runs a Triton kernel",
        upstream="core/ssm/mamba_mixer.py",
    ),
    Patch(
        name="checkpoint_worker",
        targets=(WORKER,),
        make=lambda original: checkpoint_worker,
        why="the worker of use_persistent_ckpt_worker is a process of its own, where nothing is patched, and divides "
        "by torch.cuda.device_count(): it dies and its rank waits for ever",
        upstream="core/dist_checkpointing/strategies/async_utils.py",
    ),
    Patch(
        name="compile_helpers",
        targets=("megatron.core.datasets.utils:compile_helpers",),
        make=devices.constant(None),
        why="start-up runs `make` for the dataset helpers; the wheel brings them compiled and has no Makefile",
        upstream="core/datasets/utils.py",
        applies=lambda: importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None,
    ),
)


def apply(without: Collection[str] = ()) -> list[str]:
    """Applies the rows that this machine needs and returns their names. Applying twice has no further effect.

    Call it before Megatron builds anything.

    Args:
        without: names of rows, or single targets, to leave out.

    Raises:
        ValueError: `without` names neither a row nor a target.
        AttributeError: upstream moved a target; the row's `upstream` says where to look.
    """
    leave_uncompiled()
    names = [patch.name for patch in PATCHES]
    unknown = set(without) - {*names, *(target for patch in PATCHES for target in patch.targets)}
    if unknown:
        raise ValueError(f"no patch is named {sorted(unknown)}; the table has {names}")
    # torch caches its tensor factories at their first use under `with torch.device(...)`, and must see the original
    # ones: otherwise "meta" no longer reaches `torch.tensor`, and transformers loads garbage into its buffers.
    with torch.device("meta"):
        torch.empty(0)
    chosen = [patch for patch in PATCHES if patch.name not in without and patch.applies()]
    for patch in chosen:
        for target in patch.targets:
            if target not in _originals and target not in without:
                owner, attribute = _locate(target)
                _originals[target] = getattr(owner, attribute)
                setattr(owner, attribute, patch.make(_originals[target]))
    return [patch.name for patch in chosen]


def leave_uncompiled() -> None:
    """Keeps Megatron's small fused functions (`core/jit.py`) uncompiled where CUDA is absent.

    They are bound to torch.compile when their modules are imported, before `--disable-jit-fuser` is read: every process
    would import torch's compiler and run a C++ compiler, which costs more than the functions save. Has no effect if
    Megatron is already imported.
    """
    if torch.cuda.is_available() or "megatron.core.jit" in sys.modules:
        return
    owner, attribute = _locate("torch:compile")
    compiling = getattr(owner, attribute)
    setattr(owner, attribute, _as_written)
    try:
        jit = importlib.import_module("megatron.core.jit")
    finally:
        setattr(owner, attribute, compiling)
    jit.disable_jit_fuser()


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def restore(keep: Collection[str] = ()) -> None:
    """Restores every original, except at the targets in `keep`."""
    for target in [target for target in _originals if target not in keep]:
        owner, attribute = _locate(target)
        setattr(owner, attribute, _originals.pop(target))


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Applies the rows that this machine needs for a `with` block; patches applied before stay."""
    before = tuple(_originals)
    apply()
    try:
        yield
    finally:
        restore(keep=before)


def _locate(target: str) -> tuple[Any, str]:
    """Object that holds a target, and the attribute's name."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute
