"""The `nemo-ext rehearse` command: measures a full-size job's memory, FLOPs and communication without GPUs."""

import sys

from nemo_ext.job.config import mistakes_are_one_line, run_job
from nemo_ext.job.job import Command, Grammar
from nemo_ext.job.settings import nearest
from nemo_ext.megatron.commands import TRAINING

CONFIGS = {"train": "rehearse", "puzzle": "rehearse_puzzle"}
"""Mapping from rehearsed jobs to their primary config."""


def _main(words: list[str]) -> None:
    with mistakes_are_one_line():
        jobs = [word.removeprefix("job=") for word in words if word.startswith("job=")] or ["train"]
        if jobs[-1] not in CONFIGS:
            raise ValueError(f"job={jobs[-1]} cannot be rehearsed: {nearest(jobs[-1], CONFIGS)}")
    from nemo_ext.rehearsal.job import job

    sys.argv = [sys.argv[0], *(word for word in words if not word.startswith("job="))]
    run_job(CONFIGS[jobs[-1]], job)


REHEARSE = Command(
    name="rehearse",
    group="cluster",
    help="step one rank of each kind of a full-size run without GPUs: memory, FLOPs, communication",
    main=_main,
    grammar=Grammar(settings=TRAINING),
)
