"""Entry point of a rank that runs Puzzle's stages.

    torchrun --nproc-per-node N -m nemo_ext.puzzle.rank RUN_DIR/CHILD/config.yaml library distill score cost

Data are split among ranks; each holds the whole parent, or its shard of it (`puzzle.fsdp`).
Finished stages are skipped, and interrupted ones are resumed.
"""

import sys

from nemo_ext.job.rank import leave, main

LOG = "stages.log"


def stages(config_path: str) -> None:
    """Run the stages named on the command line; imports Megatron."""
    from nemo_ext.puzzle.stages.stages import run

    run(config_path, sys.argv[2:])


if __name__ == "__main__":
    leave(main(sys.argv[1], LOG, stages))
