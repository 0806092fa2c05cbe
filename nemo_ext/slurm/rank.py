"""One rank as srun starts it: sets torchrun's variables from Slurm's, then becomes `nemo_ext.megatron.rank`."""

import os
import sys
from collections.abc import Mapping


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
    os.execv(sys.executable, [sys.executable, "-m", "nemo_ext.megatron.rank", *sys.argv[1:]])


if __name__ == "__main__":
    main()
