"""Entry point on a multi-node replica's further nodes: `srun ... python -m nemo_ext.serving.follow JOB key=value`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_ext.job.config import compose, mistakes_are_one_line
from nemo_ext.job.registry import job as find
from nemo_ext.job.run_directory import OWN
from nemo_ext.serving import vllm
from nemo_ext.serving.model import folder_of
from nemo_ext.serving.settings import ServingSettings


def follow(job: str, words: Sequence[str]) -> int:
    """Run this node's part of `vllm serve` until it ends, and return its exit code.

    Args:
        job: name of the job that uses the replica.
        words: the job's arguments, such as `key=value`.
    """
    config = compose(job, words)
    place = Path(str(config["run_dir"] if "run_dir" in config else config["output"]))
    if not find(job).server:
        place /= OWN
    settings = ServingSettings.from_config(config)
    folder = folder_of(str(config["served"]), place.expanduser(), config["files_from"], draft=settings.draft)
    rank = int(os.environ["SLURM_PROCID"]) + 1
    with vllm.running(vllm.command(folder, settings, config, rank=rank), None) as process:
        return process.wait()


if __name__ == "__main__":
    with mistakes_are_one_line():
        sys.exit(follow(sys.argv[1], sys.argv[2:]))
