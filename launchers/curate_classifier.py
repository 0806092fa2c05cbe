"""Classifier: `nemo-ext curate_classifier positives=good.jsonl negatives=web.jsonl output=data/quality`."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and trains on this machine."""

    def job(config: dict[str, object]) -> None:
        from nemo_ext.data.curation.training import run

        run(config)

    run_job("curate_classifier", job)


if __name__ == "__main__":
    main()
