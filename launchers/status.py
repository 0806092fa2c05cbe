"""Status: `nemo-ext status [RUN_DIR ...]`, the runs on Slurm below these directories."""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import mistakes_are_one_line


def main() -> None:
    """Prints a table of runs."""
    parser = argparse.ArgumentParser(
        prog="nemo-ext status", description="Show the runs on Slurm: state, step, time left, loss."
    )
    parser.add_argument(
        "run_dirs",
        nargs="*",
        type=Path,
        default=[Path("runs")],
        metavar="RUN_DIR",
        help="run directories, or folders that hold some (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    arguments = parser.parse_args()
    from nemo_ext.slurm.status import show

    with mistakes_are_one_line():
        show(arguments.run_dirs, as_json=arguments.json)


if __name__ == "__main__":
    main()
