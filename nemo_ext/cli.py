"""The command `nemo-ext JOB key=value`, which equals `python launchers/JOB.py key=value`; imports only that job."""

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from nemo_ext import __version__
from nemo_ext.job.job import GROUPS, Job, invoke
from nemo_ext.job.registry import command, commands


def main(words: Sequence[str] | None = None) -> None:
    """Run the `nemo-ext` command.

    Args:
        words: name of the job and its arguments; None for this process's arguments.
    """
    name, *rest = (sys.argv[1:] if words is None else words) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return
    if name in ("-V", "--version"):
        print(f"nemo-ext {__version__}")
        return
    try:
        chosen = command(name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [f"nemo-ext {name}", *rest]
    if isinstance(chosen, Job):
        _run(chosen)
    elif chosen.main is not None:
        invoke(chosen.main, rest)


def _run(job: Job) -> None:
    """Compose a job's config from this process's arguments, and run the job."""
    from nemo_ext.job.config import run_job

    def run(config: dict[str, Any]) -> None:
        from nemo_ext.install import check_packages

        check_packages(job, config)
        invoke(job.run, config)

    run_job(job.config or job.name, run, resumable=job.resumable)


def _help() -> str:
    listed = sorted((item for item in commands() if item.group), key=lambda item: (GROUPS.index(item.group), item.name))
    width = max((len(item.name) for item in listed), default=0)
    parts = [
        "\n".join([f"{group}:", *(f"  {item.name:<{width}}  {item.help}" for item in of_group)])
        for group, of_group in groupby(listed, key=lambda item: item.group)
    ]
    return "\n\n".join(
        [
            "usage: nemo-ext JOB [key=value ...]",
            *parts,
            "nemo-ext JOB --help      the job's settings\n"
            "nemo-ext JOB --cfg job   the composed configuration, without running (not for pipeline, Slurm or doctor)",
        ]
    )


if __name__ == "__main__":
    main()
