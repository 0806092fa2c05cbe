"""Makes a process one rank of a large job, with fake process groups and fake tensors under Megatron's trainer."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Context manager in which this process is one rank of `size`; must be entered before Megatron is imported."""
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "CUDA_DEVICE_MAX_CONNECTIONS": 1}
    os.environ.update({name: str(value) for name, value in variables.items()})
    from nemo_ext.megatron.arguments import without_unused_packages
    from nemo_ext.megatron.cpu import runtime

    with without_unused_packages({}):
        runtime.enable()
    import megatron.core.optimizer.clip_grads as clip_grads
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with ExitStack() as stack:
        for target, name, replacement in (
            # Not available here: CUDA random states, objects of other ranks, pinned memory, the fused norm.
            (CudaRNGStatesTracker, "fork", lambda self, *a, **k: contextlib.nullcontext()),
            (torch.distributed, "all_gather_object", _repeat_own_object),
            (torch, "tensor", _unpinned(torch.tensor)),
            (clip_grads, "l2_norm_impl", lambda chunk, flag, lists, each, *a: (torch.zeros(1), torch.zeros(1))),
            (
                MixedPrecisionOptimizer,
                "_unscale_main_grads_and_check_for_nan",
                _finite(MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan),
            ),
            # torch would swap fake parameters, which fails if they have weak references.
            (torch.nn.Module, "_apply", _apply),
        ):
            stack.enter_context(patch.object(target, name, replacement))
        yield


def megatron_arguments(config: Mapping[str, Any]) -> Any:
    """Set Megatron's global arguments for a config, create its process groups, and return the arguments."""
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    from nemo_ext.megatron.arguments import command_line, one_parser

    # The fused SwiGLU is plain torch on a CPU and saves the same tensors; a TensorBoard directory would be created.
    excluded = ("--no-bias-swiglu-fusion", "--tensorboard-dir=")
    words = [word for word in command_line(config) if not word.startswith(excluded)]
    words = ["rehearse", *words, "--disable-gloo-process-groups", "--fake-process-group"]
    with patch.object(sys, "argv", words), one_parser():
        arguments = parse_and_validate_args()
    arguments.save = arguments.load = arguments.pretrained_checkpoint = None
    initialize_megatron(allow_no_cuda=True)
    return arguments


def _unpinned(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, pin_memory=False, **kwargs: tensor(*args, **kwargs)


def _finite(check: Callable[..., bool]) -> Callable[..., bool]:
    def wrapped(self: Any) -> bool:
        check(self)
        return False  # fake gradients never overflow; otherwise FP16 would skip the step

    return wrapped


def _repeat_own_object(out: list[Any], mine: Any, group: Any = None) -> None:
    out[:] = [mine] * len(out)


def _apply(self: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    for child in self.children() if recurse else ():
        child._apply(fn)
    with torch.no_grad():
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.data = fn(parameter)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
    return self
