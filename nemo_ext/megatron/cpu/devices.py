"""Stand-ins for the parts of `torch.cuda` that Megatron touches, with the CPU behind them.

Nothing here patches anything: `patches.py` says which name gets which of these, and why.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


def is_cuda(device: object) -> bool:
    """Whether a `device=` argument means a CUDA device (`"cuda"`, `"cuda:1"`, `torch.device("cuda")`, an index)."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The tensor factory with `device="cuda"` read as the CPU."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapped


def identity(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `Tensor.cuda`: the tensor is where it should be already."""
    return lambda self, *args, **kwargs: self


def constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """A function that answers `value` to anything."""
    return lambda original: lambda *args, **kwargs: value


class Stream:
    """A CUDA stream on a device that runs everything in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Program order is enough."""

    def record_event(self, event: object = None) -> "Stream":
        """What was queued is done: the stream itself serves as the event to wait for."""
        return self

    def synchronize(self) -> None:
        """Nothing is pending."""


def device_properties(*args: Any) -> SimpleNamespace:
    """What Megatron reads of `torch.cuda.get_device_properties`: the feature level, that of an A100."""
    return SimpleNamespace(name="cpu", major=8, minor=0)


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The CPU generator's state."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Sets the CPU generator's state."""
    torch.set_rng_state(state)


def cuda_tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` that answers `torch.cuda.FloatTensor` for a float tensor (optimizers compare names)."""

    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return wrapped
