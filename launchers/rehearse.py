"""Rehearse: `nemo-ext rehearse recipe=...`: ranks of a full-size training job on fake tensors, before it queues."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import run_job


def main() -> None:
    """Composes the config and rehearses its ranks."""
    from nemo_ext.rehearsal.job import job

    run_job("rehearse", job)


if __name__ == "__main__":
    main()
