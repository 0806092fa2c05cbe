"""Describe: `nemo-ext describe model=... [draw=model.svg]`, or `recipe=...` for a recipe's model on its GPUs."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config, prints the model's figures and draws its blocks."""
    from nemo_ext.describe import report

    run_job("describe", report)


if __name__ == "__main__":
    main()
