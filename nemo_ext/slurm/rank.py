"""One rank as srun starts it: sets torchrun's variables from Slurm's, then becomes the rank of a training."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nemo_ext.job.ranks import training_rank
from nemo_ext.job.run_directory import read_config


def variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that torch.distributed reads, from Slurm's; ValueError if one is missing."""
    names = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": "SLURM_NTASKS",
        "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
    }
    missing = [name for name in (*names.values(), "MASTER_ADDR", "MASTER_PORT") if name not in slurm]
    if missing:
        raise ValueError(f"{', '.join(missing)} not set: start this with srun, as slurm/train.sbatch does")
    return {ours: slurm[name] for ours, name in names.items()}


def main() -> None:
    """Replace this process by the rank, so that Slurm's signals reach it directly."""
    os.environ.update(variables(os.environ))
    module = training_rank(read_config(Path(sys.argv[1])))
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


if __name__ == "__main__":
    main()
