"""Train: `nemo-ext train recipe=... key=value`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and trains on this machine."""

    def job(config: dict[str, object]) -> None:
        require("torch", "megatron-core")
        from nemo_ext.evaluation.live import check_machine
        from nemo_ext.launch import train

        check_machine(config)
        train(config)

    run_job("train", job)


if __name__ == "__main__":
    main()
