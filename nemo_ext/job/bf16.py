"""Whether BF16 is fast on this machine: CPUs without instructions for it take several times as long as in FP32.

Does not import torch, as configs are composed on machines without it.
"""

import os
from contextlib import suppress
from pathlib import Path

import pynvml

_INSTRUCTIONS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags in /proc/cpuinfo of CPUs that multiply BF16 matrices; the last is ARM's."""


def is_fast() -> bool:
    """Return whether this machine has a GPU, or a CPU with instructions for BF16."""
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and pynvml.nvmlDeviceGetCount():
            return True
    with suppress(OSError):
        return not _INSTRUCTIONS.isdisjoint(Path("/proc/cpuinfo").read_text().split())
    return False


def remark(key: str, *, used: bool) -> str | None:
    """Return a warning if BF16 is used but slow here, otherwise None.

    Args:
        key: the setting that turns BF16 off, with its value.
        used: True if the run computes in BF16.
    """
    if not used or is_fast():
        return None
    return f"this CPU has no instructions for BF16, which can take several times as long as FP32: set {key}"
