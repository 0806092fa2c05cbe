"""Compare: `nemo-ext compare 'runs=[runs/before,runs/after]' paper=domyn_small output=runs/compare`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and compares the runs on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.evaluation.compare_page import run

        run(config)

    run_job("compare", job)


if __name__ == "__main__":
    main()
