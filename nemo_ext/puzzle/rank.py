"""The process of one rank of Puzzle's stages.

    torchrun --nproc-per-node N -m nemo_ext.puzzle.rank RUN_DIR/CHILD/config.yaml library distill score cost

Every rank has the whole parent; data are shared out. Finished stages are passed over, interrupted ones go on.
"""

import sys

from nemo_ext.blockwise.rank import leave, main

LOG = "stages.log"


def stages(config_path: str) -> None:
    """Carries out the stages that the command line names; Megatron is imported now."""
    from nemo_ext.puzzle.stages.stages import run

    run(config_path, sys.argv[2:])


if __name__ == "__main__":
    leave(main(sys.argv[1], LOG, stages))
