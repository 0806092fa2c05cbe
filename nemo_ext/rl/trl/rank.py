"""One of several processes that train with TRL, which `nemo_ext.rl.trl.run` starts."""

import os
import sys
from pathlib import Path

from nemo_ext.job.rank import leave, main

LOG = "ranks.log"


def work(config_path: str) -> None:
    """Train as in the config at a path; KeyboardInterrupt if a signal ended the run after a step."""
    import torch

    from nemo_ext.job.run_directory import read_config
    from nemo_ext.rl.job import checked_algorithm, over_own_pairs
    from nemo_ext.rl.trl.run import train

    ranks = int(os.environ["WORLD_SIZE"])
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise ValueError(
            f"launcher.nproc_per_node={ranks}: {torch.cuda.device_count()} GPUs are visible; set it to at most this "
            "number"
        )
    config = read_config(Path(config_path))
    try:
        train(config, over_own_pairs(config, checked_algorithm(config)), sys.argv[2:])
    except SystemExit:
        raise KeyboardInterrupt from None


if __name__ == "__main__":
    leave(main(sys.argv[1], LOG, work))
