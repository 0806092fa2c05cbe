"""Evaluate: `nemo-ext evaluate model=... suite=quick`, benchmarks with intervals, tokens and every answer."""

import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and evaluates; the same command goes on after a stop."""

    def job(config: dict[str, Any]) -> None:
        if config["endpoint"] is None and config["serving"]["engine"] == "transformers":
            require("torch")
        from nemo_ext.evaluation.job import run

        run(config)

    run_job("evaluate", job, resumable=True)


if __name__ == "__main__":
    main()
