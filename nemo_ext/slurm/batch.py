"""What a script of `slurm/` becomes on the first node: the words of this task of an array, and the start of its job.

exec python -m nemo_ext.slurm.batch train recipe=... cluster=leonardo key=value
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from nemo_ext.job.config import mistakes_are_one_line
from nemo_ext.slurm.jobs import script_name
from nemo_ext.slurm.settings import settings_of, split
from nemo_ext.slurm.sweep import MULTIRUN, points
from nemo_ext.slurm.task import Task
from nemo_ext.slurm.training import Training


def own_words(job: str, words: Sequence[str], slurm: Mapping[str, str]) -> list[str]:
    """The words of this task of an array: a sweep's point, or a shard of Puzzle's distillation; else the words.

    Raises:
        ValueError: the array's number has no point, or there is no array.
    """
    number = slurm.get("SLURM_ARRAY_TASK_ID")
    if MULTIRUN in words:
        found = points(job, words)
        if number is None or int(number) >= len(found):
            raise ValueError(f"{MULTIRUN}: {len(found)} runs: give sbatch --array=0-{len(found) - 1}")
        return found[int(number)]
    if number is not None and job == "puzzle":
        return [*words, f"puzzle.shard={number}/{slurm['SLURM_ARRAY_TASK_COUNT']}", "puzzle.stages=[distill]"]
    return list(words)


def main() -> NoReturn:
    """The command; a user's mistake is one line and exit code 2, and the job is not queued again."""
    with mistakes_are_one_line():
        job, *words = sys.argv[1:] or [""]
        script_name(job)
        ours, theirs = split(own_words(job, words, os.environ))
        settings = settings_of([*ours, f"job={job}"])
        kind = Training if job == "train" else Task
        sys.exit(kind(settings, theirs).run())


if __name__ == "__main__":
    main()
