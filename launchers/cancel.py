"""Cancel: `nemo-ext cancel RUN_DIR`, a run's job on Slurm, or those of a pipeline or sweep."""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import mistakes_are_one_line


def main() -> None:
    """Cancels, and says how to go on."""
    told = "Cancel the job of a run, or all jobs of a pipeline or sweep. Ranks save first."
    parser = argparse.ArgumentParser(prog="nemo-ext cancel", description=told)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    arguments = parser.parse_args()
    from nemo_ext.slurm.status import cancel

    with mistakes_are_one_line():
        jobs = cancel(arguments.run_dir)
    print(f"cancelled: {', '.join(jobs)}; `nemo-ext submit` with the same words goes on from the last checkpoint")


if __name__ == "__main__":
    main()
