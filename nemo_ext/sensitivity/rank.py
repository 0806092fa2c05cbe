"""Entry point of a sensitivity sweep's rank, which the job starts."""

import sys

from nemo_ext.job.rank import leave, main
from nemo_ext.sensitivity.workspace import LOG


def work(config_path: str) -> None:
    """Run the measurements of the composed config at a path. Megatron is imported only here."""
    from nemo_ext.sensitivity.sweep import run

    run(config_path)


if __name__ == "__main__":
    leave(main(sys.argv[1], LOG, work))
