"""Rehearse: `nemo-ext rehearse [job=puzzle] recipe=...`: ranks of a full-size job on fake tensors, before it queues."""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder's tokenize.py must not hide the standard library's

from nemo_ext.job.config import USER_ERROR, run_job
from nemo_ext.job.settings import nearest

CONFIGS = {"train": "rehearse", "puzzle": "rehearse_puzzle"}


def main() -> None:
    """Composes the config and rehearses its ranks."""
    from nemo_ext.rehearsal.job import job

    named = [word.removeprefix("job=") for word in sys.argv[1:] if word.startswith("job=")] or ["train"]
    if named[-1] not in CONFIGS:
        print(f"error: job={named[-1]}: {nearest(named[-1], CONFIGS)}", file=sys.stderr)
        sys.exit(USER_ERROR)
    sys.argv = [word for word in sys.argv if not word.startswith("job=")]
    run_job(CONFIGS[named[-1]], job)


if __name__ == "__main__":
    main()
