"""Synthesize: `nemo-ext synthesize recipe=NAME input=... output=...`, training data made by models."""

import sys
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and runs the recipe; the same command goes on after a stop."""

    def job(config: dict[str, Any]) -> None:
        if config["endpoint"] is None and config["served"] and config["serving"]["engine"] == "transformers":
            require("torch")
        from nemo_ext.synthesis.job import run

        run(config)

    run_job("synthesize", job, resumable=True)


if __name__ == "__main__":
    main()
