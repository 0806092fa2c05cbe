"""Bytes per number, and per parameter including its training state."""

BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Mapping from precisions to the bytes of one number."""


NVFP4_BLOCK = 16
"""Length of a block of numbers that share a scale in NVFP4, along the summed dimension of a product."""
NVFP4_BITS = 4 + 8 / NVFP4_BLOCK
"""Bits of a number in NVFP4, with its block's E4M3 scale; the FP32 scale of a matrix is not counted."""


def bytes_per_number(precision: str) -> int:
    """Return the bytes of one number.

    Raises:
        ValueError: The precision is unknown.
    """
    if precision not in BYTES:
        raise ValueError(f"precision: expected one of {', '.join(BYTES)}, got {precision!r}")
    return BYTES[precision]


def bytes_per_parameter(precision: str) -> tuple[int, int, int]:
    """Return the bytes per parameter of weight, gradient and optimizer state, in Megatron with Adam.

    In fp32 the optimizer state consists of two moments. In lower precisions the gradient is in fp32, and the optimizer
    state is an fp32 master weight and the two moments. A weight that Transformer Engine multiplies in FP8 is also kept
    in BF16; its two FP8 copies, 2 more bytes, are counted only by `nemo-ext rehearse`.
    """
    return (4, 4, 8) if bytes_per_number(precision) == 4 else (2, 4, 12)
