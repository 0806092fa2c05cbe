"""Preference data: `nemo-ext preference_data preset=domyn sources.heuristic.strong=... output=pairs/domyn`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and writes the pairs on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.preference.job import run

        run(config)

    run_job("preference_data", job, resumable=True)


if __name__ == "__main__":
    main()
