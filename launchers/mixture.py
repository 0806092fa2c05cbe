"""Mixture: `nemo-ext mixture train='...' evaluate='...' output=runs/mixture`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config, trains small models here and chooses a mixture."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.mixture.job import run

        run(config)

    run_job("mixture", job, resumable=True)


if __name__ == "__main__":
    main()
