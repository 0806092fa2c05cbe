"""CPU stand-ins for the parts of `torch.cuda` that Megatron uses.

Nothing is patched here: `patches.py` lists which name each stand-in replaces, and why.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


def is_cuda(device: object) -> bool:
    """True if a `device=` argument is a CUDA device (`"cuda"`, `"cuda:1"`, `torch.device("cuda")`, an index)."""
    if isinstance(device, int):
        return not isinstance(device, bool)
    return isinstance(device, torch.device | str) and str(device).startswith("cuda")


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The tensor factory with `device="cuda"` redirected to the CPU."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapped


def identity(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `Tensor.cuda` that returns the tensor itself."""
    return lambda self, *args, **kwargs: self


def constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """A replacement that returns `value` for any arguments."""
    return lambda original: lambda *args, **kwargs: value


def instead(value: Any) -> Callable[[Any], Any]:
    """A replacement that is `value` itself."""
    return lambda original: value


class Stream:
    """CUDA stream of a device that runs everything in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Does nothing: program order is enough."""

    def record_event(self, event: object = None) -> "Stream":
        """Returns the stream itself as the event: queued work is already done."""
        return self

    def synchronize(self) -> None:
        """Does nothing: no work is pending."""


def device_properties(*args: Any) -> SimpleNamespace:
    """The fields that Megatron reads from `torch.cuda.get_device_properties`, with an A100's compute capability."""
    return SimpleNamespace(name="cpu", major=8, minor=0)


def cuda_tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` that returns `torch.cuda.FloatTensor` for a float tensor (optimizers compare names)."""

    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return wrapped
