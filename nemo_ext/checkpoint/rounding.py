"""Share of a training's weight changes that rounding to bfloat16 undoes."""

from pathlib import Path

from nemo_ext.checkpoint.safetensors_files import SafetensorsReader
from nemo_ext.checkpoint.storage import WEIGHT_TYPES


def undone_by_bfloat16(start: Path, trained: Path) -> float | None:
    """Return the share of changed weights that equal the weights from before training once both are bfloat16.

    Args:
        start: Hugging Face folder that training started from.
        trained: Hugging Face folder with the result; only its float32 tensors count.

    Returns:
        A share from 0 to 1; None if no float32 weight was changed.

    Raises:
        CheckpointError: a folder has no readable safetensors files.
    """
    import torch

    before, after = SafetensorsReader(start), SafetensorsReader(trained)
    changed = undone = 0
    for name, stored in after.tensors.items():
        other = before.tensors.get(name)
        if stored.dtype != "float32" or other is None or other.shape != stored.shape or other.dtype not in WEIGHT_TYPES:
            continue
        old, new = before.read(name), after.read(name)
        differs = old != new
        changed += int(differs.sum())
        undone += int((differs & (old.to(torch.bfloat16) == new.to(torch.bfloat16))).sum())
    return undone / changed if changed else None
