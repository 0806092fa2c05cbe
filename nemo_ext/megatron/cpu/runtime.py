"""Entry point for running Megatron on machines without CUDA or mamba_ssm, and checks that ranks can use their GPUs."""

import os
import platform
from contextlib import suppress
from datetime import timedelta

from nemo_ext.job.ranks import GPUS
from nemo_ext.megatron.cpu import mamba_modules, patches

_stores: list[object] = []
"""Holds the store of `check_ranks`, once created, which rank 0 serves until its process ends."""


def check_gpu() -> None:
    """Reject a rank without a usable GPU in a job that has GPUs, as it would train on the CPU.

    Whether nodes have GPUs is read from the site's file (`nemo_ext.slurm.cluster`), or else from Slurm. An empty
    CUDA_VISIBLE_DEVICES, which hides the GPUs on purpose, is accepted.

    Raises:
        ValueError: this rank has no usable GPU; the message gives torch's reason, or the number of GPUs it sees.
    """
    import torch

    if torch.cuda.is_available():
        place, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if place >= count:
            raise ValueError(
                f"local rank {place} (rank {os.environ.get('RANK')}) sees only {count} GPU{'s' * (count != 1)} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}): make all GPUs of the node visible "
                "to every task (srun --gpu-bind=none, --gpus-per-node instead of --gpus-per-task), or set LOCAL_RANK=0 "
                "if each task is bound to one GPU"
            )
        return
    gpus = next((os.environ[name] for name in (GPUS, "SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS") if name in os.environ), "")
    if gpus in ("", "0", "none") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return
    try:
        torch.cuda.init()
        reason = "no device is visible"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
    raise ValueError(
        f"this job has GPUs ({gpus}), but torch {torch.__version__} cannot use one on {platform.node()}: {reason}; "
        "check nvidia-smi on that node and, in a Singularity or Apptainer container, that --nv is set; "
        f"to train on CPUs deliberately, set {GPUS}=none (when submitting, +cluster.environment.{GPUS}=none)"
    )


def check_ranks() -> None:
    """Reject a run in which only some ranks have a GPU, as gloo and NCCL ranks would wait for each other.

    All of the environment's ranks (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`) must call this. If the site's
    file states the nodes' GPUs, `check_gpu` is enough and this does nothing.

    Raises:
        ValueError: only some ranks have a GPU; raised on all ranks.
    """
    import torch

    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1 or GPUS in os.environ or "MASTER_ADDR" not in os.environ or _stores:
        return
    base, rank, _ = next(torch.distributed.rendezvous("env://"))
    _stores.append(base)
    store = torch.distributed.PrefixStore("nemo_ext", base)
    able = torch.cuda.is_available()
    store.add("with_gpu", int(able))
    if store.add("ranks", 1) == world:
        store.set("counted", "")
    store.wait(["counted"])
    count = store.add("with_gpu", 0)
    if store.add("read", 1) == world:
        store.set("all_read", "")
    if 0 < count < world:
        if rank == 0:  # other ranks read from its process
            with suppress(RuntimeError):
                store.wait(["all_read"], timedelta(seconds=60))
        raise ValueError(
            f"only {count} of {world} ranks have a GPU that torch {torch.__version__} can use (rank {rank} on "
            f"{platform.node()} has {'one' if able else 'none'}): check nvidia-smi on the nodes without one, or set "
            "CUDA_VISIBLE_DEVICES= on all ranks to train on CPUs"
        )


def enable() -> list[str]:
    """Install stand-ins for missing kernels and for CUDA; on a full GPU installation, there are none.

    Call this before anything imports Megatron's Mamba mixer, which binds the kernels' names at import.

    Returns:
        Names of the stand-in modules and of the patches applied.

    Raises:
        RuntimeError: the mixer was already imported.
    """
    return [*mamba_modules.install(), *patches.apply()]
