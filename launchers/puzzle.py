"""Puzzle: `nemo-ext puzzle puzzle.parent=... puzzle.search...`, a smaller model out of a parent."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and compresses on this machine."""

    def job(config: dict[str, object]) -> None:
        require("torch", "megatron-core")
        from nemo_ext.puzzle.job import run

        run(config)

    run_job("puzzle", job, resumable=True)


if __name__ == "__main__":
    main()
