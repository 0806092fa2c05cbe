"""Table of named patches for all places where Megatron requires CUDA, applied only on machines without it.

A row names the targets, their replacement, and why and where upstream needs it. `tests/megatron/cpu/test_patches.py`
trains without each row in turn, and fails if upstream no longer needs it. For Megatron-Core 0.19 and 0.20.
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


@dataclass(frozen=True)
class Patch:
    """One row in the table of patches.

    Attributes:
        name: short name, for `apply(without=...)` and logs.
        targets: objects to replace, as `module:attribute` or `module:Class.attribute`.
        make: function that makes the replacement from the original.
        why: reason for the patch, and the files under `megatron/` that need it.
        applies: function that returns whether this machine needs the patch; by default, if it has no CUDA.
    """

    name: str
    targets: tuple[str, ...]
    make: Callable[[Any], Any]
    why: str
    applies: Callable[[], bool] = lambda: not torch.cuda.is_available()


_originals: dict[str, Any] = {}
"""Mapping from patched targets to the original objects, which makes `apply` idempotent and `restore` possible."""


MIXER = "megatron.core.ssm.mamba_mixer"
RANDOM = "megatron.core.tensor_parallel.random"
WORKER = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop"


def checkpoint_worker(*arguments: Any, **keywords: Any) -> None:
    """Apply the patches that Megatron's checkpoint worker needs in its own process, then run the worker."""
    needed = ("device_count", "queue", "checkpoint_worker")
    apply(without=[patch.name for patch in PATCHES if patch.name not in needed])
    _originals[WORKER](*arguments, **keywords)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "current_device",
        ("torch.cuda:current_device",),
        devices.constant(devices.CPU),
        "parameters, masks and seeds are created on it: core/ssm/mamba_mixer.py, core/tensor_parallel/layers.py",
    ),
    Patch(
        "device_keyword",
        ("torch:rand", "torch:tensor", "torch:zeros", "torch:empty_like"),
        devices.on_cpu,
        'they are called with device="cuda": training/training.py, core/optimizer, core/distributed, '
        "core/dist_checkpointing/exchange_utils.py",
    ),
    Patch(
        "to_cuda",
        ("torch:Tensor.cuda",),
        devices.identity,
        "models and batches are moved with it: training/training.py",
    ),
    Patch(
        "device_count",
        ("torch.cuda:device_count",),
        devices.constant(1),
        "ranks are placed by it: training/initialize.py",
    ),
    Patch(
        "device_properties",
        ("torch.cuda:get_device_properties",),
        devices.instead(devices.device_properties),
        "checks under tensor parallelism ask for the compute capability: training/arguments.py, "
        "training/utils/common_utils.py",
    ),
    Patch(
        "queue",
        ("torch.cuda:synchronize", "torch.cuda:set_device"),
        devices.constant(None),
        "timers and checkpoints wait for the device queue: core/timers.py, training/initialize.py, "
        "training/checkpointing.py",
    ),
    Patch(
        "streams",
        ("torch.cuda:Stream",),
        devices.instead(devices.Stream),
        "the MoE dispatcher and gradient reduction keep side streams: core/transformer/moe/token_dispatcher.py, "
        "core/distributed",
    ),
    Patch(
        "current_stream",
        ("torch.cuda:current_stream",),
        devices.instead(devices.Stream),
        "work is ordered against it: core/tensor_parallel/random.py, core/pipeline_parallel",
    ),
    Patch(
        "rng_state",
        ("torch.cuda:get_rng_state", f"{RANDOM}:_get_cuda_rng_state"),
        devices.instead(lambda *args, **kwargs: torch.get_rng_state()),
        "the model-parallel random states live on the CUDA generator: core/tensor_parallel/random.py",
    ),
    Patch(
        "set_rng_state",
        (f"{RANDOM}:_set_cuda_rng_state",),
        devices.instead(lambda state, *args, **kwargs: torch.set_rng_state(state)),
        "a forked random state is never put back: no error, wrong numbers: core/tensor_parallel/random.py",
    ),
    Patch(
        "manual_seed",
        ("torch.cuda:manual_seed",),
        devices.instead(lambda seed: torch.default_generator.manual_seed(int(seed))),
        "every model-parallel random state is the same: no error, wrong numbers: core/tensor_parallel/random.py",
    ),
    Patch(
        "tensor_type",
        ("torch:Tensor.type",),
        devices.cuda_tensor_type,
        'the optimizers compare it with "torch.cuda.FloatTensor": core/optimizer',
    ),
    Patch(
        "allow_no_cuda",
        ("megatron.training.training:initialize_megatron",),
        lambda original: partial(original, allow_no_cuda=True),
        "pretrain() does not pass allow_no_cuda on: training/training.py",
    ),
    Patch(
        "mamba_convolution_step",
        (f"{MIXER}:causal_conv1d_update",),
        devices.instead(mamba_step.causal_conv1d_update),
        "a decoding step runs a Triton kernel: core/ssm/mamba_mixer.py",
    ),
    Patch(
        "mamba_scan_step",
        (f"{MIXER}:selective_state_update",),
        devices.instead(mamba_step.selective_state_update),
        "a decoding step runs a Triton kernel: core/ssm/mamba_mixer.py",
    ),
    Patch(
        "checkpoint_worker",
        (WORKER,),
        devices.instead(checkpoint_worker),
        "the worker of use_persistent_ckpt_worker is a separate, unpatched process that divides by device_count(): it "
        "dies and its rank waits forever: core/dist_checkpointing/strategies/async_utils.py",
    ),
    Patch(
        "compile_helpers",
        ("megatron.core.datasets.utils:compile_helpers",),
        devices.constant(None),
        "start-up runs `make` for the dataset helpers; the wheel brings them compiled and has no Makefile: "
        "core/datasets/utils.py",
        applies=lambda: importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None,
    ),
)


def apply(without: Collection[str] = ()) -> list[str]:
    """Apply the patches that this machine needs, and return their names. Applying twice has no further effect.

    Call this before Megatron builds anything.

    Args:
        without: names of patches, or single targets (as in `Patch.targets`), to skip.

    Raises:
        ValueError: `without` contains a name that is neither a patch nor a target.
        AttributeError: upstream has moved a target; the patch's `why` says where to look.
    """
    leave_uncompiled()
    names = [patch.name for patch in PATCHES]
    unknown = set(without) - {*names, *(target for patch in PATCHES for target in patch.targets)}
    if unknown:
        raise ValueError(f"unknown patches in without: {', '.join(sorted(unknown))}; known: {', '.join(names)}")
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
    """Keep Megatron's small fused functions (`core/jit.py`) uncompiled on machines without CUDA.

    They are bound to torch.compile when their modules are imported, before `--disable-jit-fuser` is read. Every process
    would import torch's compiler and run a C++ compiler, which costs more than the functions save. This has no effect
    if Megatron's `core/jit.py` is already imported.
    """
    if torch.cuda.is_available() or "megatron.core.jit" in sys.modules:
        return
    name, compiling = "compile", torch.compile
    setattr(torch, name, lambda function: function)
    try:
        jit = importlib.import_module("megatron.core.jit")
    finally:
        setattr(torch, name, compiling)
    jit.disable_jit_fuser()


def restore(keep: Collection[str] = ()) -> None:
    """Undo the patches: restore the originals of all patched targets, except those in `keep`."""
    for target in [target for target in _originals if target not in keep]:
        owner, attribute = _locate(target)
        setattr(owner, attribute, _originals.pop(target))


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Apply the patches that this machine needs while the context is open; patches applied earlier remain in place."""
    before = tuple(_originals)
    apply()
    try:
        yield
    finally:
        restore(keep=before)


def _locate(target: str) -> tuple[Any, str]:
    """Return the module or class that holds a target (`module:Class.attribute`), and the attribute's name."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute
