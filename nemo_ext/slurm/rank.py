"""Entry point of a rank started by srun: sets torchrun's variables from Slurm's, then runs the rank's module.

python -m nemo_ext.slurm.rank CONFIG                   rank of a training run
python -m nemo_ext.slurm.rank -m MODULE CONFIG ...     rank of another module; all but the first write to log files
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nemo_ext.job.ranks import rank_log, training_rank
from nemo_ext.job.run_directory import read_config


def variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Derive the environment variables that torch.distributed reads from the variables that Slurm sets.

    Raises:
        ValueError: Slurm has not set a variable that is needed.
    """
    names = {
        "RANK": "SLURM_PROCID",
        "LOCAL_RANK": "SLURM_LOCALID",
        "WORLD_SIZE": "SLURM_NTASKS",
        "LOCAL_WORLD_SIZE": "SLURM_NTASKS_PER_NODE",
    }
    missing = [name for name in (*names.values(), "MASTER_ADDR", "MASTER_PORT") if name not in slurm]
    if missing:
        raise ValueError(
            f"environment variables are not set: {', '.join(missing)}; start this with srun, as slurm/train.sbatch does"
        )
    return {ours: slurm[name] for ours, name in names.items()}


def main() -> None:
    """Replace this process with the rank, so that the rank receives Slurm's signals directly."""
    os.environ.update(variables(os.environ))
    words = sys.argv[1:]
    if words[0] != "-m":
        words = ["-m", training_rank(read_config(Path(words[0]))), *words]
    elif rank := int(os.environ["RANK"]):
        with rank_log(Path(words[2]).parent, rank).open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()
