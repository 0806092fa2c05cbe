"""Speed of BF16 on this machine: most CPUs without instructions for it are several times slower than in FP32."""


def is_fast() -> bool:
    """Return whether BF16 is fast here: on GPUs, and on CPUs with instructions for it or wide enough to emulate it."""
    import torch

    return torch.cuda.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def remark(key: str, *, used: bool) -> str | None:
    """Return a warning if BF16 is used but slow here, otherwise None.

    Args:
        key: the setting that turns BF16 off, with its value.
        used: True if the run computes in BF16.
    """
    if not used or is_fast():
        return None
    return f"this CPU has no instructions for BF16, which can take several times as long as FP32: set {key}"
