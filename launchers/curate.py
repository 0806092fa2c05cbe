"""Curation: `nemo-ext curate input='raw/*.jsonl.gz' preset=dolma output=data/curated`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and curates on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.curation.job import run

        try:
            run(config)
        except RuntimeError as error:  # a worker died, which is nothing that a traceback would explain
            sys.exit(f"error: {error}")

    run_job("curate", job, resumable=True)


if __name__ == "__main__":
    main()
