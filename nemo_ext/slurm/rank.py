"""One rank as srun starts it: torchrun's variables from Slurm's, then `nemo_ext.megatron.rank` in the same process."""

import os
import sys
from collections.abc import Mapping


def variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """What torch.distributed reads.

    Raises:
        ValueError: a variable of srun is missing.
    """
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
    """Becomes the rank: signals of Slurm reach it without anything between."""
    os.environ.update(variables(os.environ))
    os.execv(sys.executable, [sys.executable, "-m", "nemo_ext.megatron.rank", *sys.argv[1:]])


if __name__ == "__main__":
    main()
