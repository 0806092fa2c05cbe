"""Entry point of the scripts in `slurm/` on the first node: starts the job, or this task of an array.

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
from nemo_ext.slurm.jobs import SERVING, script_name
from nemo_ext.slurm.settings import SHARDED, settings_of, split
from nemo_ext.slurm.start import say
from nemo_ext.slurm.sweep import MULTIRUN, points
from nemo_ext.slurm.task import Task
from nemo_ext.slurm.training import Training


def own_words(job: str, words: Sequence[str], slurm: Mapping[str, str]) -> list[str]:
    """Arguments of this array task: a sweep's point or a job's shard; otherwise `words` unchanged.

    Raises:
        ValueError: if a sweep is not started as an array, or has no point of the task's number.
    """
    number = slurm.get("SLURM_ARRAY_TASK_ID")
    if MULTIRUN in words:
        found = points(job, words)
        if number is None or int(number) >= len(found):
            raise ValueError(f"{MULTIRUN}: {len(found)} runs: give sbatch --array=0-{len(found) - 1}")
        return found[int(number)]
    if number is not None and job == "puzzle":
        return [*words, f"puzzle.shard={number}/{slurm['SLURM_ARRAY_TASK_COUNT']}", "puzzle.stages=[distill]"]
    if number is not None and job in SHARDED:
        return [*words, f"shard={number}/{slurm['SLURM_ARRAY_TASK_COUNT']}"]
    if number is not None and job in SERVING:
        return [*words, f"serving.replica={number}"]
    return list(words)


def forget_callers_array() -> None:
    """Drop the variables of another job's array, which a job has that `sbatch` submitted from within that job."""
    if "SLURM_ARRAY_TASK_ID" not in os.environ:
        return
    said = call(["squeue", "--noheader", f"--jobs={os.environ.get('SLURM_JOB_ID')}", "--format=%A|%K"]).stdout
    if said.strip() == f"{os.environ.get('SLURM_JOB_ID')}|N/A":
        for name in [name for name in os.environ if name.startswith("SLURM_ARRAY_")]:
            del os.environ[name]


def main() -> NoReturn:
    """Run the command; a user's mistake gives one line and exit code 2, and the job is not requeued."""
    with mistakes_are_one_line():
        job, *words = sys.argv[1:] or [""]
        script_name(job)
        forget_callers_array()
        ours, theirs = split(own_words(job, words, os.environ))
        settings = settings_of([*ours, f"job={job}"])
        kind = Training if job == "train" else Task
        try:
            sys.exit(kind(settings, theirs).run())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            with suppress(OSError):  # the output may be on that disk
                say(f"stopped: {error.strerror}: {error.filename}; not queued again: make room, then submit again")
            sys.exit(DISK_FULL)


if __name__ == "__main__":
    main()
