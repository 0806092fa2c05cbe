"""The `nemo-ext mixture` command: finds optimal shares of streams from the losses of small runs on sampled mixtures."""

from typing import Any

from nemo_ext.job.config import compose
from nemo_ext.job.job import Array, Config, Grammar, Job, invoke, reads
from nemo_ext.job.registry import job
from nemo_ext.job.settings import strings


def _size(config: Config, settings: Any) -> tuple[int, int]:
    """Return the numbers of nodes (always 1) and GPUs that a run needs: the larger of training and evaluation."""
    runs = {"train": strings(config["train"]), "evaluate": ["model=small", *strings(config["evaluate"])]}
    return 1, max(invoke(job(name).size, compose(name, words), settings)[1] for name, words in runs.items())


MIXTURE = Job(
    name="mixture",
    group="data",
    help="optimal shares of streams, from the losses of small runs on sampled mixtures",
    run="nemo_ext.mixture.job:run",
    resumable=True,
    check=reads("nemo_ext.mixture.job:check", files="files"),
    started="nemo_ext.mixture.settings:runs_of",
    script="task",
    size=_size,
    # First an array of all runs, then one task for the optimum.
    array=Array(
        key="shard", words=("shard={number}/{count}",), tasks=lambda config, shards: 1, rounds=lambda config: 2
    ),
    grammar=Grammar(settings="nemo_ext.mixture.settings:Settings"),
)
