"""CPU stand-ins for the parts of `torch.cuda` that Megatron uses.

This module patches nothing; `patches.py` lists which name each stand-in replaces, and why.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


def is_cuda(device: object) -> bool:
    """Return whether a `device=` argument is a CUDA device, such as `"cuda:1"`, `torch.device("cuda")` or an index."""
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, torch.device | str) and str(device).startswith("cuda")


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory so that `device="cuda"` is redirected to the CPU."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapped


def identity(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a replacement for `Tensor.cuda` that returns the tensor itself."""
    return lambda self, *args, **kwargs: self


def constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return a function for `Patch.make` that replaces a target with a function that always returns `value`."""
    return lambda original: lambda *args, **kwargs: value


def instead(value: Any) -> Callable[[Any], Any]:
    """Return a function for `Patch.make` that replaces a target with `value` itself."""
    return lambda original: value


class Stream:
    """Stand-in for a CUDA stream, on a device that runs everything in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Do nothing, as program order is enough."""

    def record_event(self, event: object = None) -> "Stream":
        """Return the stream itself as the event, as queued work is already done."""
        return self

    def synchronize(self) -> None:
        """Do nothing, as no work is pending."""


def device_properties(*args: Any) -> SimpleNamespace:
    """Return the device properties that Megatron reads, with an A100's compute capability."""
    return SimpleNamespace(name="cpu", major=8, minor=0)


def cuda_tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type` to return names such as `torch.cuda.FloatTensor`, which Megatron's optimizers compare."""

    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return wrapped
