"""Convert: `nemo-ext convert from=... to=...`, checkpoints between Hugging Face and Megatron."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and converts on this machine."""

    def job(config: dict[str, object]) -> None:
        require("torch")
        from nemo_ext.checkpoint.convert import run

        run(config)

    run_job("convert", job, resumable=True)


if __name__ == "__main__":
    main()
