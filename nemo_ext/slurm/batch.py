"""Entry point of the batch scripts in `slurm/`, which starts a job, or one task of an array, on its first node.

exec python -m nemo_ext.slurm.batch train recipe=... cluster=leonardo key=value
"""

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from nemo_ext.job.config import mistakes_are_one_line
from nemo_ext.slurm.cluster import call
from nemo_ext.slurm.ends import DISK_FULL
from nemo_ext.slurm.jobs import submitted
from nemo_ext.slurm.settings import settings_of, split
from nemo_ext.slurm.start import say
from nemo_ext.slurm.sweep import MULTIRUN, points
from nemo_ext.slurm.task import Task
from nemo_ext.slurm.training import Training


def own_words(job: str, words: Sequence[str], slurm: Mapping[str, str]) -> list[str]:
    """Return the arguments of this array task, which does one run of a sweep or one shard of a job.

    Args:
        words: arguments of the whole job, which are returned unchanged outside an array.
        slurm: environment variables, including those that Slurm sets.

    Raises:
        ValueError: a sweep is not started as an array, or has fewer runs than the task's index requires.
    """
    number = slurm.get("SLURM_ARRAY_TASK_ID")
    if MULTIRUN in words:
        runs = points(job, words)
        if number is None or int(number) >= len(runs):
            raise ValueError(f"{MULTIRUN} has {len(runs)} runs: pass --array=0-{len(runs) - 1} to sbatch")
        return runs[int(number)]
    array = submitted(job).array
    if number is not None and array is not None:
        count = slurm.get("SLURM_ARRAY_TASK_COUNT", "1")
        return [*words, *(word.format(number=number, count=count) for word in array.words)]
    return list(words)


def forget_callers_array() -> None:
    """Remove Slurm's array variables if they are only inherited: this job was submitted from within an array task."""
    if "SLURM_ARRAY_TASK_ID" not in os.environ:
        return
    job = os.environ.get("SLURM_JOB_ID")
    if call(["squeue", "--noheader", f"--jobs={job}", "--format=%A|%K"]).stdout.strip() == f"{job}|N/A":
        for name in [name for name in os.environ if name.startswith("SLURM_ARRAY_")]:
            del os.environ[name]


def main() -> NoReturn:
    """Run the job given on the command line; a user error is printed as one line, and ends the job with exit code 2."""
    with mistakes_are_one_line():
        job, *words = sys.argv[1:] or [""]
        ranks = submitted(job).ranks
        forget_callers_array()
        ours, theirs = split(own_words(job, words, os.environ))
        settings = settings_of([*ours, f"job={job}"])
        kind = Training if ranks == "slurm" else Task
        try:
            sys.exit(kind(settings, theirs).run())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with suppress(OSError):  # the output may be on the same disk
                say(f"stopped: {error.strerror}: {error.filename}; not queued again: free space, then submit again")
            sys.exit(DISK_FULL)


if __name__ == "__main__":
    main()
