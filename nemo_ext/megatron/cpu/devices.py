"""Stand-ins for the parts of `torch.cuda` that Megatron touches, with the CPU behind them.

Nothing here patches anything: `patches.py` says which name gets which of these, and why.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
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
    """For `Tensor.cuda`, `Module.cuda`, `pin_memory`: the object is where it should be already."""
    return lambda self, *args, **kwargs: self


def constant(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """A function that answers `value` to anything."""
    return lambda original: lambda *args, **kwargs: value


class Event:
    """A CUDA event on a device that has no queue: recorded work is done when `record` returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time = 0.0

    def record(self, stream: object = None) -> None:
        """Remembers the time."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds between two recorded events."""
        return 1000.0 * (end.time - self.time)

    def synchronize(self) -> None:
        """Nothing is pending."""

    def wait(self, stream: object = None) -> None:
        """Nothing is pending."""

    def query(self) -> bool:
        """Always done."""
        return True


class Stream:
    """A CUDA stream on a device that runs everything in program order; also the context `torch.cuda.stream(...)`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        """Program order is enough."""

    def wait_event(self, event: object) -> None:
        """Program order is enough."""

    def synchronize(self) -> None:
        """Nothing is pending."""

    def record_event(self, event: Event | None = None) -> Event:
        """Records and returns the event."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def device_properties(*args: Any) -> SimpleNamespace:
    """What Megatron reads of `torch.cuda.get_device_properties`: an A100's feature level, this machine's memory."""
    return SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=psutil.virtual_memory().total, multi_processor_count=1
    )


def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The CPU generator's state."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Sets the CPU generator's state."""
    torch.set_rng_state(state)


def cuda_tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` that answers `torch.cuda.FloatTensor` for a float tensor (the distributed optimizer compares names)."""

    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return wrapped


def clip_grad_by_total_norm(
    parameters: list[torch.Tensor] | torch.Tensor,
    max_norm: float,
    total_norm: float,
    use_decoupled_grad: bool = False,
) -> None:
    """Scales gradients in place by `max_norm / (total_norm + 1e-6)` where that is below one, as Megatron's fused version."""
    scale = max_norm / (total_norm + 1.0e-6)
    if scale >= 1.0:
        return
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        grad = parameter.decoupled_grad if use_decoupled_grad else parameter.grad  # type: ignore[attr-defined]
        if grad is not None:
            grad.mul_(scale)
