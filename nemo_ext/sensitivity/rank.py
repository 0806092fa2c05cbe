"""The process of one rank of a sensitivity sweep, started by the job like Puzzle's stages."""

import sys

from nemo_ext.blockwise.rank import leave, main
from nemo_ext.sensitivity.workspace import LOG


def work(config_path: str) -> None:
    """Runs the measurements; Megatron is imported here."""
    from nemo_ext.sensitivity.sweep import run

    run(config_path)


if __name__ == "__main__":
    leave(main(sys.argv[1], LOG, work))
