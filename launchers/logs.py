"""Logs: `nemo-ext logs RUN_DIR [-f]`, what the ranks of a run write."""

import argparse
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import INTERRUPTED, mistakes_are_one_line


def main() -> None:
    """Shows the end of the run's log, or follows it until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="nemo-ext logs", description="Show the log of a run's ranks, or its job's output."
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the log as it grows")
    parser.add_argument(
        "-n", "--lines", type=int, default=50, help="number of lines to begin with (default: %(default)s)"
    )
    arguments = parser.parse_args()
    from nemo_ext.slurm.status import follow, log_of

    with mistakes_are_one_line():
        if arguments.follow:
            try:
                follow(arguments.run_dir, arguments.lines)
            except KeyboardInterrupt:
                sys.exit(INTERRUPTED)
        path = log_of(arguments.run_dir)
    print(path, file=sys.stderr, flush=True)
    os.execvp("tail", ["tail", f"--lines={arguments.lines}", str(path)])


if __name__ == "__main__":
    main()
