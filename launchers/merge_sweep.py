"""Averages that are evaluated: `nemo-ext merge_sweep 'from=[a,b]' 'sweep.points=[0,0.5,1]' suite=...`."""

import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config, averages, evaluates and chooses; the same command goes on after a stop."""

    def job(config: dict[str, Any]) -> None:
        require("torch")
        from nemo_ext.evaluation.merges import run

        run(config)

    run_job("merge_sweep", job, resumable=True)


if __name__ == "__main__":
    main()
