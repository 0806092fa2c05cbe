"""Sensitivity: `nemo-ext sensitivity sensitivity.model=...`, which blocks need more than FP8."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config, measures on this machine and proposes a plan."""

    def job(config: dict[str, object]) -> None:
        require("torch", "megatron-core")
        from nemo_ext.sensitivity.job import run

        run(config)

    run_job("sensitivity", job, resumable=True)


if __name__ == "__main__":
    main()
