"""Single entry point that lets Megatron run on this machine, whatever it lacks."""

import os
import platform

from nemo_ext.job.ranks import GPUS
from nemo_ext.megatron.cpu import mamba_modules, patches


def check_gpu() -> None:
    """Refuse a rank without the GPU that its job has: it would train on the CPU, or wait for the others for ever.

    The site's file says whether nodes have GPUs (`nemo_ext.slurm.cluster`); without one, Slurm does.

    Raises:
        ValueError: with torch's reason, or with what this rank sees of its node.
    """
    import torch

    if torch.cuda.is_available():
        place, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if place >= count:
            raise ValueError(
                f"rank {os.environ.get('RANK')} is number {place} of its node and sees {count} GPUs "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): let each task see all GPUs of its "
                "node (srun --gpu-bind=none, --gpus-per-node instead of --gpus-per-task), or set LOCAL_RANK=0 for each"
            )
        return
    asked = os.environ.get(GPUS, os.environ.get("SLURM_GPUS_ON_NODE"))
    if asked in (None, "", "0"):
        return
    try:
        torch.cuda.init()
        reason = "no device is visible"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
    raise ValueError(
        f"this job has GPUs ({asked}), but torch {torch.__version__} cannot use one on {platform.node()}: {reason}; "
        f"look at nvidia-smi there and, in a container, for --nv. {GPUS}=0 trains on the CPUs"
    )


def enable() -> list[str]:
    """Installs replacements for what this machine lacks; on a full GPU install, none.

    Call it before anything imports Megatron's Mamba mixer, which binds the kernels' names at import.

    Returns:
        Names of the stand-in modules and of the patches applied.

    Raises:
        RuntimeError: the mixer was already imported.
    """
    return [*mamba_modules.install(), *patches.apply()]
